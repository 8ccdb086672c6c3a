// Random operators: the tensors that are drawn are those of a loop over elements.
#include "runtime/random.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/rng.h"
#include "cost/storage.h"
#include "graph/graph.h"

namespace motley {
namespace {

// The largest number of so many bits that is not above x >= 0.
double cut_off(double x, int digits) {
  int exponent = 0;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::floor(std::ldexp(mantissa, digits)), exponent - digits);
}

struct Case {
  std::string op;
  std::vector<double> arguments;  // after the input that `inputs` stands for
  double (*element)(double u, double v, int digits);
};

const Case kCases[] = {
    {"aten::bernoulli.p", {0, .3}, [](double u, double, int) { return u < .3 ? 1. : 0; }},
    {"aten::exponential", {0, 2.5}, [](double u, double, int) { return -std::log1p(-u) / 2.5; }},
    {"aten::rand", {}, [](double u, double, int digits) { return cut_off(u, digits); }},
    {"aten::uniform",
     {0, -.5, 1.5},
     [](double u, double, int digits) {
       const double x = -.5 + u * 2;
       return x < 0 ? x : cut_off(x, digits);
     }},
    {"aten::randn",
     {},
     [](double u, double v, int) {
       return std::sqrt(-2 * std::log1p(-u)) * std::cos(2 * M_PI * v);
     }},
    {"aten::normal_functional",
     {0, 3, .5},
     [](double u, double v, int) {
       return 3 + .5 * (std::sqrt(-2 * std::log1p(-u)) * std::cos(2 * M_PI * v));
     }},
    {"aten::randint.low", {-3, 9}, [](double u, double, int) { return std::floor(-3 + u * 12); }},
};

// Element i of a part that is rows [begin, begin + length) of an axis of `size`.
int64_t in_whole(const InWhole& in, int64_t i) {
  if (in.size == 0) return i;
  return ((i / (in.inner * in.length)) * in.size + in.begin + i / in.inner % in.length) * in.inner +
         i % in.inner;
}

TEST(Random, TensorsAreThoseOfALoop) {
  Rng rng(5);
  for (const Case& c : kCases) {
    for (const auto& [dtype, digits] :
         {std::pair{DType::f64, 53}, {DType::f32, 24}, {DType::f16, 11}, {DType::bf16, 8}}) {
      for (int trial = 0; trial < 4; ++trial) {
        const Shape local{rng.between(0, 3), rng.between(1, 5), rng.between(1, 7)};
        std::vector<InWhole> where;
        for (int64_t depth = rng.below(3); depth > 0; --depth) {
          const int64_t length = rng.between(1, 4);
          where.emplace_back(length + rng.below(5), length, rng.between(1, 3), rng.below(3));
        }
        Graph graph;
        TensorSpec spec;
        spec.shape = local;
        const NodeId node = graph.add(c.op, {c.arguments.begin(), c.arguments.end()}, {spec});
        const uint64_t seed = rng.next();
        const int64_t step = rng.below(1000);
        const int id = static_cast<int>(rng.below(50));
        const at::Tensor got =
            draw(graph.node(node), local, dtype, seed, step, id, where, at::kCPU);
        ASSERT_EQ(got.sizes(), at::IntArrayRef(local));
        const at::Tensor flat = got.to(at::kDouble).flatten();
        for (int64_t i = 0; i < flat.numel(); ++i) {
          int64_t index = i;
          for (const InWhole& in : where) index = in_whole(in, index);
          const double wanted = c.element(random_element(seed, step, id, index),
                                          random_element(~seed, step, id, index), digits);
          const double rounded =
              at::scalar_tensor(wanted, at::kDouble).to(got.scalar_type()).item<double>();
          // Logarithms and cosines of vectors may differ from those of numbers in the last bits.
          ASSERT_NEAR(flat[i].item<double>(), rounded, std::abs(wanted) * std::ldexp(4, -digits))
              << c.op << " " << to_string(dtype) << " " << i;
        }
      }
    }
  }
}

// Indices beyond 32 bits, and streams with the highest bit set, are as in unsigned arithmetic.
TEST(Random, LargeIndices) {
  Graph graph;
  TensorSpec spec;
  spec.shape = {4};
  const NodeId node = graph.add("aten::rand", {}, {spec});
  for (const uint64_t seed : {uint64_t{0}, ~uint64_t{0}, uint64_t{1} << 63}) {
    const InWhole far(int64_t{1} << 61, 4, 1, (int64_t{1} << 60) + 7);
    const at::Tensor got = draw(graph.node(node), {4}, DType::f64, seed, -1, 3, {far}, at::kCPU);
    for (int64_t i = 0; i < 4; ++i)
      EXPECT_EQ(got[i].item<double>(), random_element(seed, -1, 3, far.begin + i));
  }
}

// What is made in several parts is as what is made at once.
TEST(Random, LargeResults) {
  Graph graph;
  TensorSpec spec;
  spec.shape = {3, kDrawnAtOnce};
  const NodeId node = graph.add("aten::rand", {}, {spec});
  const at::Tensor got = draw(graph.node(node), spec.shape, DType::f64, 5, 2, 1, {}, at::kCPU);
  for (int64_t i :
       {int64_t{0}, kDrawnAtOnce - 1, kDrawnAtOnce, 2 * kDrawnAtOnce + 77, 3 * kDrawnAtOnce - 1})
    EXPECT_EQ(got.view({-1})[i].item<double>(), random_element(5, 2, 1, i)) << i;
}

}  // namespace
}  // namespace motley
