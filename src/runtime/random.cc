#include "runtime/random.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>

#include "core/rng.h"
#include "cost/storage.h"
#include "graph/ops/builder.h"
#include "interpret/dispatch.h"

namespace motley {

namespace {

// Significant bits of a type's numbers.
int digits_of(DType dtype) {
  return dtype == DType::f32 ? 24 : dtype == DType::f16 ? 11 : dtype == DType::bf16 ? 8 : 53;
}

// Bits of 64, as tensors of integers have them.
int64_t as_signed(uint64_t bits) { return static_cast<int64_t>(bits); }

at::Tensor shifted(const at::Tensor& bits, int by) {
  return at::bitwise_right_shift(bits, by).bitwise_and_(as_signed(~uint64_t{0} >> by));
}

// mix64 of each element, in its place.
at::Tensor mixed(at::Tensor bits) {
  bits.add_(as_signed(0x9e3779b97f4a7c15ull));
  bits.bitwise_xor_(shifted(bits, 30)).mul_(as_signed(0xbf58476d1ce4e5b9ull));
  bits.bitwise_xor_(shifted(bits, 27)).mul_(as_signed(0x94d049bb133111ebull));
  return bits.bitwise_xor_(shifted(bits, 31));
}

uint64_t stream_of(uint64_t seed, int64_t step, int node) {
  return mix64(mix64(mix64(seed) ^ static_cast<uint64_t>(step)) ^ static_cast<uint64_t>(node));
}

// random_element() of each index.
at::Tensor uniform(uint64_t seed, int64_t step, int node, const at::Tensor& index) {
  const int64_t stream = as_signed(stream_of(seed, step, node));
  return shifted(mixed(mixed(index.clone()).bitwise_xor_(stream)), 11)
      .to(at::kDouble)
      .mul_(0x1p-53);
}

// The largest numbers of so many bits that are not above x >= 0: a random number below p stays so.
at::Tensor cut_off(const at::Tensor& x, int digits) {
  return x.view(at::kLong).bitwise_and(as_signed(~uint64_t{0} << (53 - digits))).view(at::kDouble);
}

double probability_of(const Node& bernoulli) { return ops::real_arg(bernoulli, 1, 0.5); }

// What a random operator draws, in double precision whatever the type of the result: what is drawn
// in 16 bits must be as likely as in 64. `numbers(seed)` are uniform in [0, 1).
at::Tensor drawn(const Node& node, uint64_t seed, int digits,
                 const std::function<at::Tensor(uint64_t)>& numbers) {
  const std::string& op = node.op;
  at::Tensor u = numbers(seed);
  if (op == "aten::bernoulli.p") return u.lt(probability_of(node));
  if (op == "aten::exponential") return u.neg_().log1p_().div_(-ops::real_arg(node, 1, 1));
  if (op == "aten::randn" || op == "aten::randn_like" || op == "aten::normal_functional") {
    // Box and Muller.
    u.neg_().log1p_().mul_(-2).sqrt_().mul_(numbers(~seed).mul_(2 * M_PI).cos_());
    return op == "aten::normal_functional"
               ? u.mul_(ops::real_arg(node, 2, 1)).add_(ops::real_arg(node, 1, 0))
               : u;
  }
  if (op == "aten::rand" || op == "aten::rand_like") return cut_off(u, digits);
  double low = 0, high = 1;
  if (op == "aten::uniform") {
    low = ops::real_arg(node, 1, 0), high = ops::real_arg(node, 2, 1);
    u.mul_(high - low).add_(low);
    return at::where(u.lt(0), u, cut_off(u, digits));  // below `high` also when it is rounded
  }
  const size_t first = op == "aten::randint_like" || op == "aten::randint_like.low_dtype" ? 1 : 0;
  if (op.ends_with(".low") || op.ends_with(".low_dtype"))
    low = ops::real_arg(node, first), high = ops::real_arg(node, first + 1);
  else
    high = ops::real_arg(node, first);
  return u.mul_(high - low).add_(low).floor_();
}

}  // namespace

double random_element(uint64_t seed, int64_t step, int node, int64_t index) {
  return static_cast<double>(
             mix64(stream_of(seed, step, node) ^ mix64(static_cast<uint64_t>(index))) >> 11) *
         0x1p-53;
}

at::Tensor InWhole::of(const at::Tensor& i) const {
  if (size == 0) return i;
  const at::Tensor row = at::floor_divide(i, inner).remainder_(length);
  return at::floor_divide(i, inner * length)
      .mul_(size)
      .add_(row)
      .add_(begin)
      .mul_(inner)
      .add_(at::remainder(i, inner));
}

namespace {

// The kernel of set_numbers_kernel(). Never freed: it may hold what belongs to an interpreter.
struct KernelInUse {
  std::mutex mutex;
  at::DeviceType type = at::kCUDA;
  std::shared_ptr<const NumbersKernel> kernel;
};

KernelInUse& in_use() {
  static auto* const kernel = new KernelInUse;
  return *kernel;
}

// Columns at most of what a kernel makes.
constexpr int64_t kWidest = 1024;
// Elements of a mask that are made together where they are copied to the result then. In 32 bits,
// with the numbers of rows, they take less than five numbers of 64 bits of kDrawnAtOnce elements,
// which is what src/cost/workspace.cc expects.
constexpr int64_t kMaskedAtOnce = 8 * kDrawnAtOnce;

// Of a result of n elements: a divisor where there is one that makes few rows, else one that makes
// few elements too many.
int64_t width_of(int64_t n) {
  const int64_t even = std::min(n & -n, kWidest);
  if (n > kWidest && even >= kWidest / 16) return even;
  const int64_t rows = (n + kWidest - 1) / kWidest;
  return (n + rows - 1) / rows;
}

// One random operator's numbers made by the kernel of its device, if it has one.
class ByKernel {
 public:
  ByKernel(int64_t step, int node, const std::vector<InWhole>& where, at::Device device)
      : step_(step), node_(node), device_(device) {
    std::vector<InWhole> maps;
    for (const InWhole& in : where)
      if (in.size != 0) maps.push_back(in);
    if (maps.size() > 2) return;
    maps.resize(2);
    for (const InWhole& in : maps)
      for (int64_t number : {in.size, in.length, in.inner, in.begin}) maps_.push_back(number);
    KernelInUse& used = in_use();
    const std::lock_guard lock(used.mutex);
    if (used.type == device.type()) kernel_ = used.kernel;
  }

  // Elements [first, end), a part of a tensor [rows, width] where width does not divide their
  // number; undefined: make them otherwise. `below`: see NumbersAsked.
  at::Tensor numbers(uint64_t seed, int64_t first, int64_t end, at::ScalarType type,
                     std::optional<int64_t> below) {
    if (kernel_ == nullptr) return {};
    const int64_t n = end - first, width = width_of(n), rows = (n + width - 1) / width;
    NumbersAsked asked{{as_signed(stream_of(seed, step_, node_)), first, width}, below.has_value()};
    asked.numbers.insert(asked.numbers.end(), maps_.begin(), maps_.end());
    if (below) asked.numbers.push_back(*below);
    const at::Tensor count =
        at::arange(std::max(rows, width), at::TensorOptions(device_).dtype(type));
    const at::Tensor made = (*kernel_)(count.narrow(0, 0, rows).view({rows, 1}),
                                       count.narrow(0, 0, width).view({1, width}), asked);
    if (made.defined()) return made.reshape({-1}).narrow(0, 0, n);
    KernelInUse& used = in_use();
    const std::lock_guard lock(used.mutex);
    if (used.kernel == kernel_) used.kernel = nullptr;
    kernel_ = nullptr;
    return {};
  }

  // n elements that are 1 with probability p, else 0; undefined: make them otherwise.
  at::Tensor mask(uint64_t seed, double p, int64_t n, at::ScalarType type) {
    if (kernel_ == nullptr || n == 0) return {};
    // u < p where u's bits, a whole number, are below p 2^53.
    const auto below =
        p > 0 ? static_cast<int64_t>(std::ceil(std::min(p, 1.) * 0x1p53)) : int64_t{0};
    const int64_t width = width_of(n);
    if (type == at::kFloat && n % width == 0 && n / width <= kDrawnAtOnce)
      return numbers(seed, 0, n, type, below);
    at::Tensor result = at::empty({n}, at::TensorOptions(device_).dtype(type));
    for (int64_t first = 0; first < n; first += kMaskedAtOnce) {
      const int64_t end = std::min(n, first + kMaskedAtOnce);
      const at::Tensor part = numbers(seed, first, end, at::kFloat, below);
      if (!part.defined()) return {};
      result.narrow(0, first, end - first).copy_(part);
    }
    return result;
  }

 private:
  int64_t step_;
  int node_;
  at::Device device_;
  std::vector<int64_t> maps_;
  std::shared_ptr<const NumbersKernel> kernel_;
};

}  // namespace

void set_numbers_kernel(at::DeviceType type, NumbersKernel kernel) {
  KernelInUse& used = in_use();
  const std::lock_guard lock(used.mutex);
  used.type = type;
  used.kernel = kernel ? std::make_shared<const NumbersKernel>(std::move(kernel)) : nullptr;
}

at::Tensor draw(const Node& node, const Shape& local, DType dtype, uint64_t seed, int64_t step,
                int id, const std::vector<InWhole>& where, at::Device device) {
  int64_t n = 1;
  for (int64_t size : local) n *= size;
  const at::TensorOptions options(device);
  ByKernel by_kernel(step, id, where, device);
  if (node.op == "aten::bernoulli.p") {
    const at::Tensor mask = by_kernel.mask(seed, probability_of(node), n, to_torch(dtype));
    if (mask.defined()) return mask.view(local);
  }
  at::Tensor result = at::empty({n}, options.dtype(to_torch(dtype)));
  for (int64_t first = 0; first < n; first += kDrawnAtOnce) {
    const int64_t end = std::min(n, first + kDrawnAtOnce);
    at::Tensor index;
    const at::Tensor numbers = drawn(node, seed, digits_of(dtype), [&](uint64_t of) {
      const at::Tensor made = by_kernel.numbers(of, first, end, at::kDouble, {});
      if (made.defined()) return made;
      if (!index.defined()) {
        index = at::arange(first, end, options.dtype(at::kLong));
        for (const InWhole& in : where) index = in.of(index);
      }
      return uniform(of, step, id, index);
    });
    result.narrow(0, first, end - first).copy_(numbers);
  }
  return result.view(local);
}

namespace {

Kernel kernel_of(uint64_t seed, int64_t step, std::vector<int> stream, std::vector<InWhole> part) {
  return [=](const Graph& graph, const Node& node, const std::vector<at::Tensor>& inputs) {
    const int id = graph.value(node.outputs[0]).producer.index;
    const TensorSpec& spec = graph.spec(node.outputs[0]);
    return std::vector<at::Tensor>{
        draw(node, spec.shape, spec.dtype, seed, step, stream.empty() ? id : stream[id],
             {part.empty() ? InWhole() : part[id]},
             inputs.empty() || !inputs[0].defined() ? at::Device(at::kCPU) : inputs[0].device())};
  };
}

std::map<std::string, Kernel> for_all_random(const Kernel& kernel) {
  std::map<std::string, Kernel> kernels;
  for (const OpDef* op : all_ops())
    if (op->random) kernels[op->name] = kernel;
  return kernels;
}

}  // namespace

Kernel random_kernel(uint64_t seed, int64_t step, std::vector<int> stream) {
  return kernel_of(seed, step, std::move(stream), {});
}

std::map<std::string, Kernel> random_kernels(uint64_t seed, int64_t step) {
  return for_all_random(kernel_of(seed, step, {}, {}));
}

std::map<std::string, Kernel> random_kernels(uint64_t seed, int64_t step, const MicroBatch& part,
                                             int64_t micro_batch) {
  std::vector<int> stream;
  std::vector<InWhole> in_whole;
  for (size_t n = 0; n < part.node_of.size(); ++n) {
    stream.push_back(part.node_of[n].index);
    in_whole.emplace_back(part.random[n], part.parts, micro_batch);
  }
  return for_all_random(kernel_of(seed, step, std::move(stream), std::move(in_whole)));
}

}  // namespace motley
