#include "runtime/random.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

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

// What a random operator draws, in double precision whatever the type of the result: what is drawn
// in 16 bits must be as likely as in 64. `numbers(seed)` are uniform in [0, 1).
at::Tensor drawn(const Node& node, uint64_t seed, int digits,
                 const std::function<at::Tensor(uint64_t)>& numbers) {
  const std::string& op = node.op;
  at::Tensor u = numbers(seed);
  if (op == "aten::bernoulli.p") return u.lt(ops::real_arg(node, 1, 0.5));
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

at::Tensor draw(const Node& node, const Shape& local, DType dtype, uint64_t seed, int64_t step,
                int id, const std::vector<InWhole>& where, at::Device device) {
  int64_t n = 1;
  for (int64_t size : local) n *= size;
  const at::TensorOptions options(device);
  at::Tensor result = at::empty({n}, options.dtype(to_torch(dtype)));
  for (int64_t first = 0; first < n; first += kDrawnAtOnce) {
    const int64_t end = std::min(n, first + kDrawnAtOnce);
    at::Tensor index = at::arange(first, end, options.dtype(at::kLong));
    for (const InWhole& in : where) index = in.of(index);
    const at::Tensor numbers = drawn(node, seed, digits_of(dtype),
                                     [&](uint64_t of) { return uniform(of, step, id, index); });
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
