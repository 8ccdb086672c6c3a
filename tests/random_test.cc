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

// A kernel of set_numbers_kernel(), as a loop.
at::Tensor loop(const at::Tensor& rows, const at::Tensor& columns, const NumbersAsked& asked) {
  EXPECT_EQ(rows.dim(), 2);
  EXPECT_EQ(rows.size(1), 1);
  EXPECT_EQ(columns.size(0), 1);
  EXPECT_LE(rows.numel(), 1 << 24);
  EXPECT_LE(columns.numel(), 1 << 24);
  const std::vector<int64_t>& numbers = asked.numbers;
  EXPECT_EQ(numbers.size(), asked.masked ? 12u : 11u);
  at::Tensor made = at::empty({rows.size(0), columns.size(1)}, rows.options());
  at::Tensor exact = at::empty(made.sizes(), at::kDouble);
  const at::Tensor row = rows.to(at::kDouble), column = columns.to(at::kDouble);
  for (int64_t r = 0; r < made.size(0); ++r) {
    for (int64_t c = 0; c < made.size(1); ++c) {
      int64_t index = numbers[1] + static_cast<int64_t>(row.data_ptr<double>()[r]) * numbers[2] +
                      static_cast<int64_t>(column.data_ptr<double>()[c]);
      for (size_t map : {3, 7})
        index = in_whole(
            InWhole(numbers[map], numbers[map + 1], numbers[map + 2], numbers[map + 3]), index);
      const uint64_t bits =
          mix64(static_cast<uint64_t>(numbers[0]) ^ mix64(static_cast<uint64_t>(index))) >> 11;
      exact.data_ptr<double>()[r * made.size(1) + c] =
          !asked.masked                                  ? static_cast<double>(bits) * 0x1p-53
          : bits < static_cast<uint64_t>(numbers.back()) ? 1
                                                         : 0;
    }
  }
  return made.copy_(exact);
}

// While it lives `kernel` makes the numbers of the CPU.
struct Installed {
  explicit Installed(NumbersKernel kernel) { set_numbers_kernel(at::kCPU, std::move(kernel)); }
  ~Installed() { set_numbers_kernel(at::kCUDA, {}); }
};

// One kernel makes what the operators of tensors make, whatever the number of elements and of maps.
TEST(Random, OneKernelMakesTheSame) {
  Rng rng(6);
  int64_t by_kernel = 0;
  for (const Case& c : kCases) {
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
      for (const int64_t n :
           {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{1024}, int64_t{1025}, int64_t{4096},
            int64_t{64 * 33}, int64_t{5003}, rng.between(1, 9999)}) {
        std::vector<InWhole> where;
        const int64_t depth = rng.below(4);  // of three maps there is none
        for (int64_t i = 0; i < depth; ++i) {
          const int64_t length = rng.between(1, 40);
          where.emplace_back(length + rng.below(5), length, rng.between(1, 300), rng.below(3));
        }
        if (rng.chance(.3)) where.emplace_back();
        Graph graph;
        TensorSpec spec;
        spec.shape = {n};
        std::vector<double> arguments = c.arguments;
        if (c.op == "aten::bernoulli.p" && rng.chance(.5))
          arguments[1] = rng.chance(.5) ? rng.uniform() : static_cast<double>(rng.below(2));
        const NodeId node = graph.add(c.op, {arguments.begin(), arguments.end()}, {spec});
        const uint64_t seed = rng.next();
        const auto drawn = [&] {
          return draw(graph.node(node), spec.shape, dtype, seed, 7, 3, where, at::kCPU);
        };
        const at::Tensor expected = drawn();
        int64_t calls = 0;
        const Installed kernel([&](const auto& rows, const auto& columns, const auto& asked) {
          ++calls;
          return loop(rows, columns, asked);
        });
        const at::Tensor got = drawn();
        EXPECT_EQ(got.scalar_type(), expected.scalar_type());
        EXPECT_TRUE(at::equal(got, expected)) << c.op << " " << to_string(dtype) << " " << n;
        EXPECT_EQ(static_cast<int64_t>(got.storage().nbytes()), got.numel() * got.element_size());
        EXPECT_EQ(calls > 0, n > 0 && depth <= 2);
        by_kernel += calls;
      }
    }
  }
  EXPECT_GT(by_kernel, 100);
}

// A probability of which the 53 bits of a random number are just below or not.
TEST(Random, MasksAreExactAtTheirProbability) {
  for (int64_t i = 0; i < 200; ++i) {
    const double u = random_element(11, 2, 3, i);
    for (const double p : {std::nextafter(u, 0.), u, std::nextafter(u, 1.), -1., 2.}) {
      Graph graph;
      TensorSpec spec;
      spec.shape = {1};
      const NodeId node = graph.add("aten::bernoulli.p", {0., p}, {spec});
      const Installed kernel(loop);
      const InWhole at_i(1 << 20, 1, 1, i);
      const at::Tensor got = draw(graph.node(node), {1}, DType::f32, 11, 2, 3, {at_i}, at::kCPU);
      EXPECT_EQ(got.item<float>(), u < p ? 1.f : 0.f) << i << " " << p;
    }
  }
}

// A kernel that does not work is asked once, and the numbers stay the same; also after a part of
// them was made.
TEST(Random, KernelsThatFail) {
  Graph graph;
  TensorSpec spec;
  spec.shape = {9 * kDrawnAtOnce + 5};
  const NodeId node = graph.add("aten::bernoulli.p", {0., .25}, {spec});
  const auto drawn = [&] {
    return draw(graph.node(node), spec.shape, DType::bf16, 1, 2, 3, {}, at::kCPU);
  };
  const at::Tensor expected = drawn();
  for (const int works : {0, 1, 9}) {
    int calls = 0;
    const Installed kernel([&](const auto& rows, const auto& columns, const auto& asked) {
      return calls++ < works ? loop(rows, columns, asked) : at::Tensor();
    });
    EXPECT_TRUE(at::equal(drawn(), expected)) << works;
    EXPECT_EQ(calls, std::min(works + 1, 2));  // two parts
    EXPECT_TRUE(at::equal(drawn(), expected)) << works;
    EXPECT_EQ(calls, works < 2 ? works + 1 : 4);
  }
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
