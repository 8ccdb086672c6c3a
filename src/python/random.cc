// Random numbers of devices by a kernel that Python makes (python/motley/_device_numbers.py).
#include "runtime/random.h"

#include "python/bindings.h"

namespace motley::python {

void bind_random(py::module_& m) {
  // kernel(rows, columns, numbers, masked): a tensor, or None where it cannot be made here; see
  // runtime/random.h. None: there is no kernel.
  m.def("set_numbers_kernel", [](const std::string& device, py::object kernel) {
    const at::DeviceType type = at::Device(device).type();
    if (kernel.is_none()) return set_numbers_kernel(type, {});
    const auto held =
        std::shared_ptr<py::object>(new py::object(std::move(kernel)), [](py::object* object) {
          const py::gil_scoped_acquire lock;
          delete object;
        });
    set_numbers_kernel(
        type, [held](const at::Tensor& rows, const at::Tensor& columns, const NumbersAsked& asked) {
          const py::gil_scoped_acquire lock;
          const py::object made = (*held)(rows, columns, asked.numbers, asked.masked);
          return made.is_none() ? at::Tensor() : made.cast<at::Tensor>();
        });
  });
}

}  // namespace motley::python
