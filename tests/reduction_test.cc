// Reduction programs against the plain all-reduce: every synthesised program of small hierarchies
// and the programs of clusters, on threads.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "comm/reducing.h"
#include "reduce/cluster.h"
#include "reduce/synthesis.h"

namespace motley {
namespace {

// Sums of random tensors of several types and sizes, some too small for a chunk each.
void expect_sums(const std::vector<ReductionStep>& steps, int devices, uint64_t seed) {
  const std::vector<ReductionProgram> programs = {{{}, steps, 0, 0, 0}};
  ASSERT_EQ(check(steps, devices), "");
  for (const int64_t elements : {1L, 5L, 24L, 1001L}) {
    for (const at::ScalarType type :
         {at::kLong, at::kInt, at::kBool, at::kDouble, at::kFloat, at::kBFloat16}) {
      std::vector<at::Tensor> inputs;
      at::Generator generator = at::detail::createCPUGenerator(seed);
      for (int d = 0; d < devices; ++d) {
        at::Tensor whole = at::randint(0, 100, {elements}, generator, at::kLong);
        inputs.push_back(type == at::kBool          ? (whole == 7).to(type)
                         : at::isFloatingType(type) ? (whole.to(at::kDouble) / 7).to(type)
                                                    : whole.to(type));
      }
      run_thread_group(devices, [&](Communicator& group) {
        const auto communicator = reducing(group, programs);
        at::Tensor expected = inputs[group.rank()].clone(), got = expected.clone();
        group.all_reduce(expected);
        communicator->all_reduce(got);
        if (at::isFloatingType(type)) {
          const double rounding = type == at::kDouble ? 1e-14 : type == at::kFloat ? 1e-6 : 4e-2;
          EXPECT_TRUE(at::allclose(got, expected, rounding, 0)) << c10::toString(type);
        } else {
          EXPECT_TRUE(at::equal(got, expected)) << c10::toString(type) << " x " << elements;
        }
      });
    }
  }
}

TEST(Reducing, SynthesisedProgramsEqualTheAllReduce) {
  int programs = 0;
  for (const std::vector<int>& levels :
       {std::vector<int>{1, 2, 2}, {1, 3, 2}, {1, 2, 3}, {1, 2, 2, 2}}) {
    const int depth = static_cast<int>(levels.size()) - 1;
    const auto all = reduce::programs_of(reduce::program_space(depth, depth == 3 ? 4 : 5));
    // Every one of the small spaces, every tenth of the large one.
    for (size_t i = 0; i<all.size(); i += all.size()> 100 ? all.size() / 40 : 1, ++programs) {
      std::vector<ReductionStep> steps;
      for (const reduce::Step& step : all[i])
        steps.push_back({step.collective, reduce::groups_of(step.form, levels)});
      SCOPED_TRACE(testing::Message() << "program " << i << " of " << depth << " levels");
      expect_sums(steps, static_cast<int>(reduce::size_of(levels)), i);
      if (testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(programs, 60);
}

TEST(Reducing, UnequalGroupsToo) {
  expect_sums({{Collective::reduce, {{0, 1, 2}, {4, 5}}},
               {Collective::all_reduce, {{0, 3, 4}}},
               {Collective::broadcast, {{0, 1, 2}, {4, 5}}}},
              6, 1);
}

TEST(Reducing, StartedSumsGoOnBesideOtherCollectives) {
  const std::vector<ReductionProgram> programs = {{{},
                                                   {{Collective::reduce_scatter, {{0, 1}, {2, 3}}},
                                                    {Collective::all_reduce, {{0, 2}, {1, 3}}},
                                                    {Collective::all_gather, {{0, 1}, {2, 3}}}},
                                                   1000,
                                                   0,
                                                   0}};
  run_thread_group(4, [&](Communicator& group) {
    const auto communicator = reducing(group, programs);
    std::vector<at::Tensor> sums;
    std::vector<std::unique_ptr<Message>> messages;
    for (const int64_t elements : {4096L, 3L, 1001L, 50000L, 0L, 2000L}) {
      sums.push_back(at::arange(elements, at::kLong) * (group.rank() + 1));
      messages.push_back(communicator->start_all_reduce(sums.back()));
    }
    // The plain collectives and a program that is waited for at once.
    at::Tensor largest = at::full({4096}, group.rank(), at::kDouble);
    communicator->all_reduce(largest, Reduction::max);
    EXPECT_EQ(largest.max().item<double>(), 3);
    at::Tensor blocking = at::full({4096}, group.rank(), at::kLong);
    communicator->all_reduce(blocking);
    EXPECT_EQ(blocking[4095].item<int64_t>(), 6);
    for (size_t i = 0; i < sums.size(); ++i) {
      if (messages[i]) messages[i]->wait();
      EXPECT_TRUE(at::equal(sums[i], at::arange(sums[i].numel(), at::kLong) * 10)) << i;
    }
  });
}

TEST(Reducing, SmallTensorsAndMaximaTakeThePlainCollective) {
  // A program that would be wrong for maxima.
  const std::vector<ReductionProgram> programs = {
      {{},
       {{Collective::all_reduce, {{0, 1}, {2, 3}}}, {Collective::all_reduce, {{0, 2}, {1, 3}}}},
       1000,
       0,
       0}};
  run_thread_group(4, [&](Communicator& group) {
    const auto communicator = reducing(group, programs);
    at::Tensor largest = at::full({4096}, group.rank(), at::kDouble);
    communicator->all_reduce(largest, Reduction::max);
    EXPECT_EQ(largest.max().item<double>(), 3);
    at::Tensor small = at::ones({3}, at::kLong);
    communicator->all_reduce(small);
    EXPECT_EQ(small[0].item<int64_t>(), 4);
  });
}

}  // namespace
}  // namespace motley
