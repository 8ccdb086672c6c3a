#include "interpret/dispatch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "core/error.h"

namespace motley {
namespace {

const at::Tensor kX = at::arange(6, at::kFloat).view({2, 3});

at::Tensor x(ValueId) { return kX; }

std::string error_of(const char* op, const std::vector<Arg>& args) {
  try {
    call(find_operator(op), args, x);
  } catch (const UserError& e) {
    return e.what();
  }
  return "no error";
}

TEST(Dispatch, NumbersStandForTensorsAndDoNotPromote) {
  const at::Tensor y = call(find_operator("aten::mul.Tensor"), {ValueId(0), 0.5}, x)[0];
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  EXPECT_TRUE(y.equal(kX * 0.5));
  const at::Tensor z = call(find_operator("aten::add.Tensor"), {ValueId(0), int64_t{2}}, x)[0];
  EXPECT_TRUE(z.equal(kX + 2));
}

TEST(Dispatch, AnIntegerIsAListOfOne) {
  const at::Tensor y =
      call(find_operator("aten::sum.dim_IntList"), {ValueId(0), int64_t{1}, true}, x)[0];
  EXPECT_TRUE(y.equal(kX.sum(1, true)));
}

TEST(Dispatch, NoneReducesOverEverything) {
  const at::Tensor y =
      call(find_operator("aten::sum.dim_IntList"), {ValueId(0), Arg(), false}, x)[0];
  EXPECT_EQ(y.item<float>(), 15);
}

TEST(Dispatch, DTypeIsKeptAndDeviceFilledIn) {
  const std::vector<int64_t> shape = {2, 2};
  const at::Tensor y =
      call(find_operator("aten::full"), {shape, 1.5, DType::f64, {}, {}, {}}, x)[0];
  EXPECT_TRUE(y.equal(at::full({2, 2}, 1.5, at::kDouble)));
}

TEST(Dispatch, ListsMayHaveHoles) {
  auto tensor_of = [](ValueId v) { return v.index == 0 ? kX : at::tensor({2, 0}, at::kLong); };
  const at::Tensor y =
      call(find_operator("aten::index.Tensor"),
           {ValueId(0), std::vector<ValueId>{ValueId(), ValueId(1)}}, tensor_of)[0];
  EXPECT_TRUE(y.equal(at::tensor({2.f, 0.f, 5.f, 3.f}).view({2, 2})));
}

TEST(Dispatch, ListsOfResultsAreFlat) {
  const auto parts =
      call(find_operator("aten::split.Tensor"), {ValueId(0), int64_t{2}, int64_t{1}}, x);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_TRUE(parts[1].equal(kX.slice(1, 2, 3)));
}

TEST(Dispatch, ViewsReadElementsInOrder) {
  auto transposed = [](ValueId) { return kX.t(); };
  const std::vector<int64_t> shape = {6};
  const at::Tensor y = call(find_operator("aten::view"), {ValueId(0), shape}, transposed)[0];
  EXPECT_TRUE(y.equal(kX.t().contiguous().view({6})));
  EXPECT_TRUE(call(find_operator("aten::clone"), {ValueId(0), {}}, transposed)[0].is_contiguous());
}

TEST(Dispatch, ResultsNeedNoGradient) {
  auto leaf = [](ValueId) { return kX.clone().requires_grad_(); };
  EXPECT_FALSE(call(find_operator("aten::relu"), {ValueId(0)}, leaf)[0].requires_grad());
}

TEST(Dispatch, ThreadsMultiplyAtTheSameTime) {
  const at::Tensor a = at::randn({37, 53}, at::kDouble), b = at::randn({53, 41}, at::kDouble);
  const auto operand = [&](ValueId v) { return v.index == 0 ? a : b; };
  const Operator& mm = find_operator("aten::mm");
  const at::Tensor expected = call(mm, {ValueId(0), ValueId(1)}, operand)[0];
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i)
        wrong += !call(mm, {ValueId(0), ValueId(1)}, operand)[0].allclose(expected, 1e-12, 1e-12);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(DispatchErrors, NameTheMistake) {
  EXPECT_EQ(error_of("aten::no_such_op", {}),
            "[torch] this libtorch has no operator 'aten::no_such_op'");
  EXPECT_EQ(error_of("aten::relu", {ValueId(0), true}),
            "[torch] aten::relu takes 1 arguments, not 2");
  EXPECT_EQ(
      error_of("aten::sum.dim_IntList", {ValueId(0), 1.5}),
      "[torch] aten::sum.dim_IntList: argument 'dim' has a value that its schema does not take");
}

}  // namespace
}  // namespace motley
