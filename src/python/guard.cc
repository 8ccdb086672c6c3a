// What the guard of the package looks at before every step, in one call each: a step of a small
// model takes a millisecond, and a look from Python at a hundred things a tenth of that.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "core/rng.h"
#include "interpret/torch_version.h"
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

// What of a tensor goes into a checksum beside elements, and how these do.
struct Form {
  explicit Form(const at::Tensor& t)
      : type(t.scalar_type()),
        sizes(t.sizes().vec()),
        item(static_cast<int64_t>(t.itemsize())),
        large(t.numel() * item > kWhole),
        in_one_run(t.is_contiguous()) {}
  void add_to(Hash* hash) const {
    hash->add(static_cast<uint64_t>(type));
    for (int64_t size : sizes) hash->add(static_cast<uint64_t>(size));
  }
  // Elements in a row: `count` that are `distance` elements apart.
  void add_elements(const uint8_t* data, int64_t count, int64_t distance, Hash* hash) const {
    if (!large || !in_one_run) {
      hash->add(data, count * item);
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, data + i * distance * item,
                  static_cast<size_t>(std::min<int64_t>(item, 8)));
      hash->add(word);
    }
  }

  at::ScalarType type;
  std::vector<int64_t> sizes;
  int64_t item;
  bool large, in_one_run;
};

// The elements that count, in a row: all; of large tensors some at equal distances, others at every
// step; where memory is not in one run, of one row, another at every step.
at::Tensor counting(const at::Tensor& given, const Form& form, int64_t step) {
  at::Tensor t = given.detach();
  if (form.large && !form.in_one_run) t = t.select(0, step % t.size(0));
  t = t.resolve_conj().resolve_neg().reshape({-1});
  const int64_t stride = std::max<int64_t>(1, t.numel() / kSamples);
  if (form.large) t = t.slice(0, step % stride, t.numel(), stride).slice(0, 0, 2 * kSamples);
  return t.contiguous();
}

void add_tensor(const at::Tensor& t, int64_t step, Hash* hash) {
  const Form form(t);
  form.add_to(hash);
  if (!t.is_cpu() || !form.in_one_run) {
    const at::Tensor found = counting(t, form, step).cpu();
    form.add_elements(static_cast<const uint8_t*>(found.data_ptr()), found.numel(), 1, hash);
    return;
  }
  const int64_t stride = form.large ? t.numel() / kSamples : 1, first = step % stride;
  form.add_elements(static_cast<const uint8_t*>(t.data_ptr()) + first * form.item,
                    (t.numel() - first + stride - 1) / stride, stride, hash);
}

uint32_t checksum(const std::vector<at::Tensor>& tensors, uint32_t start, int64_t step) {
  Hash hash(start);
  for (const at::Tensor& t : tensors) add_tensor(t, step, &hash);
  return hash.folded();
}

// The same for tensors whose elements are on their way to the CPU.
class Samples {
 public:
  Samples(const std::vector<at::Tensor>& tensors, int64_t step) {
    std::vector<std::vector<at::Tensor>> found;
    for (const at::Tensor& t : tensors) {
      forms_.emplace_back(t);
      const auto on = [&](const at::Device& device) { return device == t.device(); };
      const auto at = std::find_if(devices_.begin(), devices_.end(), on) - devices_.begin();
      if (at == std::ssize(devices_)) {
        devices_.push_back(t.device());
        found.emplace_back();
      }
      const at::Tensor elements = counting(t, forms_.back(), step);
      found[static_cast<size_t>(at)].push_back(elements.view(at::kByte));
      places_.emplace_back(at, elements.numel());
    }
    for (const std::vector<at::Tensor>& of_device : found) parts_.push_back(at::cat(of_device));
  }
  // [device] The bytes of their elements, in memory of their own; given away.
  std::vector<at::Tensor> parts() { return std::exchange(parts_, {}); }
  // `arrived`: the parts, on the CPU.
  uint32_t checksum(const std::vector<at::Tensor>& arrived, uint32_t start) const {
    TORCH_CHECK_VALUE(arrived.size() == devices_.size(), "as many parts as devices are wanted");
    Hash hash(start);
    std::vector<int64_t> at(arrived.size(), 0);
    for (size_t i = 0; i < forms_.size(); ++i) {
      const auto& [part, count] = places_[i];
      const at::Tensor& bytes = arrived[static_cast<size_t>(part)];
      int64_t& begin = at[static_cast<size_t>(part)];
      TORCH_CHECK_VALUE(bytes.is_cpu() && begin + count * forms_[i].item <= bytes.numel(),
                        "the parts are wanted, on the CPU");
      forms_[i].add_to(&hash);
      forms_[i].add_elements(bytes.data_ptr<uint8_t>() + begin, count, 1, &hash);
      begin += count * forms_[i].item;
    }
    return hash.folded();
  }

 private:
  std::vector<Form> forms_;
  std::vector<at::Device> devices_;
  std::vector<std::pair<int64_t, int64_t>> places_;  // [tensor] (device, elements)
  std::vector<at::Tensor> parts_;
};

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
    each_list_of_hooks(*variable, count);
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

// The profiler and the debugger of this thread. They may be C functions (cProfile's and
// torch.profiler's are), which sys.setprofile() and sys.settrace() cannot put back.
class Tools {
 public:
  Tools() {
    const PyThreadState* thread = PyThreadState_Get();
    profile_ = thread->c_profilefunc;
    trace_ = thread->c_tracefunc;
    profiler_ = py::reinterpret_borrow<py::object>(thread->c_profileobj);
    debugger_ = py::reinterpret_borrow<py::object>(thread->c_traceobj);
  }
  void put_back_profiler() const { PyEval_SetProfile(profile_, profiler_.ptr()); }
  void put_back_debugger() const { PyEval_SetTrace(trace_, debugger_.ptr()); }

 private:
  Py_tracefunc profile_, trace_;
  py::object profiler_, debugger_;  // null: none
};

}  // namespace

void bind_guard(py::module_& m) {
  m.def("checksum", &checksum, py::arg("tensors"), py::arg("start") = 0, py::arg("step") = 0,
        "32 bits of tensors' shapes and elements; of large ones samples, others at every step.");
  py::class_<Samples>(m, "Samples")
      .def(py::init<const std::vector<at::Tensor>&, int64_t>())
      .def("parts", &Samples::parts)
      .def("checksum", &Samples::checksum, py::arg("arrived"), py::arg("start") = 0);
  m.def("flags", &flags, "A byte for each tensor: whether it takes a gradient, how many hooks.");
  m.def("distance", &distance, py::call_guard<py::gil_scoped_release>(),
        "(squared norm of the difference, squared norm of the finite elements of the second).");
  m.def("versions", &versions, "[tensor] How often each was changed in place.");
  py::class_<Still>(m, "Still")
      .def(py::init<py::list, py::list, py::list, py::object>())
      .def("holds", &Still::holds);
  py::class_<Tools>(m, "Tools")
      .def(py::init<>())
      .def("put_back_profiler", &Tools::put_back_profiler)
      .def("put_back_debugger", &Tools::put_back_debugger);
}

}  // namespace motley::python
