#include "runtime/random.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <cmath>

#include "core/rng.h"
#include "graph/ops/builder.h"
#include "interpret/dispatch.h"

namespace motley {

double random_element(uint64_t seed, int64_t step, int node, int64_t index) {
  uint64_t stream =
      mix64(mix64(mix64(seed) ^ static_cast<uint64_t>(step)) ^ static_cast<uint64_t>(node));
  return static_cast<double>(mix64(stream ^ mix64(static_cast<uint64_t>(index))) >> 11) * 0x1p-53;
}

namespace {

// Significant bits of a type's numbers.
int digits_of(DType dtype) {
  return dtype == DType::f32 ? 24 : dtype == DType::f16 ? 11 : dtype == DType::bf16 ? 8 : 53;
}

// The largest number of so many bits that is not above x >= 0: a random number below p stays so.
double cut_off(double x, int digits) {
  int exponent = 0;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::floor(std::ldexp(mantissa, digits)), exponent - digits);
}

// Element of the given uniform numbers in [0, 1) as a random operator draws it, in double precision
// whatever the type of the result: what is drawn in 16 bits must be as likely as in 64.
double drawn(const Node& node, double u, double v, int digits) {
  const std::string& op = node.op;
  if (op == "aten::bernoulli.p") return u < ops::real_arg(node, 1, 0.5) ? 1 : 0;
  if (op == "aten::exponential") return -std::log1p(-u) / ops::real_arg(node, 1, 1);
  if (op == "aten::randn" || op == "aten::randn_like" || op == "aten::normal_functional") {
    const double normal =
        std::sqrt(-2 * std::log1p(-u)) * std::cos(2 * M_PI * v);  // Box and Muller
    return op == "aten::normal_functional"
               ? ops::real_arg(node, 1, 0) + ops::real_arg(node, 2, 1) * normal
               : normal;
  }
  if (op == "aten::rand" || op == "aten::rand_like") return cut_off(u, digits);
  double low = 0, high = 1;
  if (op == "aten::uniform") {
    low = ops::real_arg(node, 1, 0), high = ops::real_arg(node, 2, 1);
    const double x = low + u * (high - low);
    return x < 0 ? x : cut_off(x, digits);  // below `high` also when it is rounded
  }
  const size_t first = op == "aten::randint_like" || op == "aten::randint_like.low_dtype" ? 1 : 0;
  if (op.ends_with(".low") || op.ends_with(".low_dtype"))
    low = ops::real_arg(node, first), high = ops::real_arg(node, first + 1);
  else
    high = ops::real_arg(node, first);
  return std::floor(low + u * (high - low));
}

}  // namespace

at::Tensor draw(const Node& node, const Shape& local, DType dtype, uint64_t seed, int64_t step,
                int id, const std::function<int64_t(int64_t)>& global_index) {
  at::Tensor out = at::empty(local, at::TensorOptions().dtype(to_torch(dtype)));
  const int digits = digits_of(dtype);
  const bool normal =
      node.op.find("norm") != std::string::npos || node.op.starts_with("aten::randn");
  AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, out.scalar_type(), "draw", [&] {
    auto* data = out.data_ptr<scalar_t>();
    for (int64_t i = 0, n = out.numel(); i < n; ++i) {
      const int64_t index = global_index(i);
      data[i] =
          static_cast<scalar_t>(drawn(node, random_element(seed, step, id, index),
                                      normal ? random_element(~seed, step, id, index) : 0, digits));
    }
  });
  return out;
}

namespace {

Kernel kernel_of(uint64_t seed, int64_t step, std::vector<int> stream, std::vector<InWhole> part) {
  return [=](const Graph& graph, const Node& node, const std::vector<at::Tensor>&) {
    const int id = graph.value(node.outputs[0]).producer.index;
    const TensorSpec& spec = graph.spec(node.outputs[0]);
    return std::vector<at::Tensor>{draw(node, spec.shape, spec.dtype, seed, step,
                                        stream.empty() ? id : stream[id],
                                        part.empty() ? InWhole() : part[id])};
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
