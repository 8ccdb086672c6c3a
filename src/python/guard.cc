// What the guard of the package looks at before every step, in one call each: a step of a small
// model takes a millisecond, and a look from Python at a hundred things a tenth of that.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/rng.h"
#include "python/bindings.h"

namespace motley::python {

namespace {

constexpr int64_t kWhole = int64_t{1} << 15;  // bytes of a tensor that all count
constexpr int64_t kSamples = 512;             // elements of a larger one

class Hash {
 public:
  explicit Hash(uint64_t start) : state_(start) {}
  void add(uint64_t word) {
    state_ = (state_ ^ word) * 0x9e3779b97f4a7c15ull;
    state_ ^= state_ >> 29;
  }
  void add(const uint8_t* data, int64_t bytes) {
    uint64_t word = 0;
    for (; bytes >= 8; data += 8, bytes -= 8) {
      std::memcpy(&word, data, 8);
      add(word);
    }
    if (bytes == 0) return;
    word = 0;
    std::memcpy(&word, data, static_cast<size_t>(bytes));
    add(word);
  }
  uint32_t folded() const { return static_cast<uint32_t>(mix64(state_) >> 32); }

 private:
  uint64_t state_;
};

// Of large tensors elements at equal distances, others at every step; where memory is not in one
// run, or on another device, of one row, another at every step.
void add_tensor(const at::Tensor& given, int64_t step, Hash* hash) {
  at::Tensor t = given;
  hash->add(static_cast<uint64_t>(t.scalar_type()));
  for (int64_t size : t.sizes()) hash->add(static_cast<uint64_t>(size));
  const auto item = static_cast<int64_t>(t.itemsize());
  const bool large = t.numel() * item > kWhole;
  const bool direct = t.is_cpu() && t.is_contiguous();
  if (!direct) {
    t = t.detach();
    if (large && !t.is_contiguous()) t = t.select(0, step % t.size(0));
    t = t.reshape({-1});
    const int64_t stride = std::max<int64_t>(1, t.numel() / kSamples);
    if (large) t = t.slice(0, step % stride, t.numel(), stride).slice(0, 0, 2 * kSamples);
    t = t.cpu().contiguous();
  }
  if (t.numel() == 0) return;
  const auto* data = static_cast<const uint8_t*>(t.data_ptr());
  if (!direct || !large) {
    hash->add(data, t.numel() * item);
    return;
  }
  const int64_t stride = t.numel() / kSamples;
  for (int64_t i = step % stride; i < t.numel(); i += stride) {
    uint64_t word = 0;
    std::memcpy(&word, data + i * item, static_cast<size_t>(std::min<int64_t>(item, 8)));
    hash->add(word);
  }
}

uint32_t checksum(const std::vector<at::Tensor>& tensors, uint32_t start, int64_t step) {
  Hash hash(start);
  for (const at::Tensor& t : tensors) add_tensor(t, step, &hash);
  return hash.folded();
}

// [tensor] Whether it takes a gradient, and how many hooks it has.
py::bytes flags(const py::list& tensors) {
  std::string found;
  for (const py::handle& item : tensors) {
    if (!THPVariable_Check(item.ptr())) throw py::type_error("a list of tensors is wanted");
    auto* variable = reinterpret_cast<THPVariable*>(item.ptr());
    Py_ssize_t hooks = 0;
    const auto count = [&](PyObject* list) {
      if (list != nullptr && list != Py_None) hooks += PyObject_Size(list);
    };
    count(variable->backward_hooks);
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 1)
    count(variable->post_accumulate_grad_hooks);
#endif
    const bool trained = THPVariable_Unpack(item.ptr()).requires_grad();
    found += static_cast<char>(trained | (std::min<Py_ssize_t>(hooks, 127) << 1));
  }
  return found;
}

// [tensor] How often it was changed in place.
std::vector<int64_t> versions(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> found;
  for (const at::Tensor& t : tensors) found.push_back(static_cast<int64_t>(t._version()));
  return found;
}

// Adds up eight elements at a time, which compilers make one instruction of: NaN where there is one.
template <typename T>
std::pair<double, double> distance_of(const at::Tensor& got, const at::Tensor& wanted) {
  constexpr int64_t kLanes = 8;
  const T *a = got.data_ptr<T>(), *b = wanted.data_ptr<T>();
  double differences[kLanes] = {}, norms[kLanes] = {};
  const auto add = [&](int64_t i, int64_t lane) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    const double size = std::abs(y) <= std::numeric_limits<double>::max() ? y : 0.0;
    const bool same = (x == y) | ((x != x) & (y != y));
    differences[lane] += same ? 0.0 : (x - y) * (x - y);
    norms[lane] += size * size;
  };
  const int64_t count = got.numel(), whole = count - count % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  for (int64_t i = whole; i < count; ++i) add(i, i - whole);
  const double difference = std::accumulate(differences, differences + kLanes, 0.0);
  return {std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference,
          std::accumulate(norms, norms + kLanes, 0.0)};
}

// Two tensors of one shape: the squared norm of their difference, where equal infinities and NaNs
// do not differ, and that of the second one's finite elements.
std::pair<double, double> distance(const at::Tensor& got, const at::Tensor& wanted) {
  TORCH_CHECK_VALUE(got.sizes() == wanted.sizes(), "tensors of one shape are wanted");
  const bool single = got.scalar_type() == at::kFloat && wanted.scalar_type() == at::kFloat;
  const auto plain = [&](const at::Tensor& t) {
    return t.detach().to(at::kCPU, single ? at::kFloat : at::kDouble).contiguous();
  };
  return single ? distance_of<float>(plain(got), plain(wanted))
                : distance_of<double>(plain(got), plain(wanted));
}

// Whether entries of dictionaries are still the same objects, containers as long, and tensors of
// the same version.
class Still {
 public:
  // (holder with get(), key, value or `missing`); (container, length); (tensor, version).
  Still(py::list entries, py::list sizes, py::list versions, py::object missing)
      : entries_(std::move(entries)),
        sizes_(std::move(sizes)),
        versions_(std::move(versions)),
        missing_(std::move(missing)) {
    for (const py::handle& item : entries_) {
      const auto t = py::reinterpret_borrow<py::tuple>(item);
      places_.push_back({t[0].ptr(), t[1].ptr(), t[2].ptr()});
    }
    for (const py::handle& item : sizes_) {
      const auto t = py::reinterpret_borrow<py::tuple>(item);
      lengths_.emplace_back(t[0].ptr(), t[1].cast<Py_ssize_t>());
    }
    for (const py::handle& item : versions_) {
      const auto t = py::reinterpret_borrow<py::tuple>(item);
      tensors_.emplace_back(t[0].cast<at::Tensor>(), t[1].cast<int64_t>());
    }
  }

  bool holds() const {
    for (const Place& place : places_) {
      if (PyDict_Check(place.holder)) {
        PyObject* now = PyDict_GetItemWithError(place.holder, place.key);
        if (now == nullptr && PyErr_Occurred()) throw py::error_already_set();
        if ((now == nullptr ? missing_.ptr() : now) != place.value) return false;
      } else {
        const py::handle holder(place.holder);
        const py::object now = holder.attr("get")(py::handle(place.key), missing_);
        if (now.ptr() != place.value) return false;
      }
    }
    for (const auto& [container, length] : lengths_) {
      const Py_ssize_t now = PyObject_Size(container);
      if (now < 0) throw py::error_already_set();
      if (now != length) return false;
    }
    for (const auto& [tensor, version] : tensors_)
      if (static_cast<int64_t>(tensor._version()) != version) return false;
    return true;
  }

 private:
  struct Place {
    PyObject *holder, *key, *value;  // held by entries_
  };
  py::list entries_, sizes_, versions_;  // hold what is pointed to
  py::object missing_;
  std::vector<Place> places_;
  std::vector<std::pair<PyObject*, Py_ssize_t>> lengths_;
  std::vector<std::pair<at::Tensor, int64_t>> tensors_;
};

}  // namespace

void bind_guard(py::module_& m) {
  m.def("checksum", &checksum, py::arg("tensors"), py::arg("start") = 0, py::arg("step") = 0,
        "32 bits of tensors' shapes and elements; of large ones samples, others at every step.");
  m.def("flags", &flags, "A byte for each tensor: whether it takes a gradient, how many hooks.");
  m.def("distance", &distance, py::call_guard<py::gil_scoped_release>(),
        "(squared norm of the difference, squared norm of the finite elements of the second).");
  m.def("versions", &versions, "[tensor] How often each was changed in place.");
  py::class_<Still>(m, "Still")
      .def(py::init<py::list, py::list, py::list, py::object>())
      .def("holds", &Still::holds);
}

}  // namespace motley::python
