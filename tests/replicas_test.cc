// Many replicas of a pipeline of which some are alike: what they sum, and what that takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>

#include "counted.h"
#include "planner/alternation.h"
#include "random_pipeline.h"
#include "runtime/verify.h"

namespace motley {
namespace {

const RandomPipeline kCases[] = {
    {"gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11,dropout=0.2", 3},
    {"bert:layers=2,hidden=16,heads=4,seq=6,vocab=11", 2},
    {"mlp:layers=4,hidden=12,in=10,classes=7", 5},
    {"vit:layers=2,hidden=16,heads=4,image=8,patch=4,classes=5", 3},
    {"llama:layers=2,hidden=16,heads=4,kv_heads=2,ffn=24,seq=6,vocab=11", 2},
    {"convnet:width=4,image=8,classes=5", 4},
};

// Replicas of a few kinds sum gradients among those that hold them alike, then the kinds exchange
// sums: exact, and in no more memory than planned, which does not grow with the replicas of a kind.
TEST(Replicas, OfFewKindsEqualOneDevice) {
  int of_several = 0;
  for (size_t c = 0; c < std::size(kCases); ++c) {
    Rng rng(900 + c);
    for (int trial = 0; trial < 2; ++trial) {
      RandomPipeline what = kCases[c];
      what.kinds = 2 + trial % 2;
      what.reductions = trial == 1;
      const Plan plan = random_pipeline(what, &rng);
      ASSERT_TRUE(check(plan, false).empty()) << what.model << ": " << check(plan, false)[0];
      const Verification v = verify_plan(plan, DType::f64, 3 + trial);
      EXPECT_LT(v.loss_error, 1e-9) << what.model << " trial " << trial;
      EXPECT_LT(v.gradient_error, 1e-9)
          << what.model << " trial " << trial << " at " << v.worst_parameter;
      for (int s = 0; s < plan.pipeline->stages(); ++s) {
        const int groups = exchanged_among(*plan.pipeline, s);
        EXPECT_LE(groups, std::max(what.kinds, tied_among(*plan.pipeline, s)));
        of_several += groups > 1 && groups < static_cast<int>(plan.pipeline->replicas.size());
      }
    }
  }
  EXPECT_GT(of_several, 10);
}

TEST(Replicas, SumsOfManyReplicasTakeNoMoreMemoryThanOfTwo) {
  RandomPipeline what = {"mlp:layers=4,hidden=256,in=64,classes=16", 4};
  what.plain = true;
  Rng rng(5);
  Plan plan = random_pipeline(what, &rng);
  PipelinePlan& pipeline = *plan.pipeline;
  const int stages = pipeline.stages();
  for (ReplicaPlan& replica : pipeline.replicas) replica.micro_batches = 2;
  std::vector<double> planned;
  for (const int replicas : {2, 6}) {
    while (static_cast<int>(pipeline.replicas.size()) < replicas) {
      ReplicaPlan next = pipeline.replicas[0];
      for (int s = 0; s < stages; ++s)
        next.stages[s].devices = {static_cast<int>(pipeline.replicas.size()) * stages + s};
      pipeline.replicas.push_back(std::move(next));
    }
    for (int s = 0; s < stages; ++s) pipeline.replicas[0].stages[s].devices = {s};
    plan.cluster = flat_cluster({device_catalogue().back()}, {replicas * stages},
                                {LinkKind::switched, 1e9, 1e-5});
    fit_batch(&plan);
    ASSERT_TRUE(check(plan, false).empty()) << check(plan, false)[0];
    const std::vector<double> memory = pipeline_memory(pipeline, plan.cluster, plan.optimizer);
    const std::vector<HeldBytes> held = held_by_workers(plan);
    for (size_t d = 0; d < memory.size(); ++d)
      EXPECT_LE(held[d].most, memory[d]) << replicas << " replicas, device " << d;
    planned.push_back(*std::max_element(memory.begin(), memory.end()) - whole_batch(pipeline));
  }
  EXPECT_NEAR(planned[1] / planned[0], 1, 1e-6);
}

}  // namespace
}  // namespace motley
