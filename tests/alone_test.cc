// The group of one device does what a group of one thread does.
#include "comm/alone.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace motley {
namespace {

TEST(Alone, IsAGroupOfOneThread) {
  const auto alone = alone_on(at::kCPU);
  run_thread_group(1, [&](Communicator& thread) {
    for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong, at::kBool})
      for (int64_t n : {0, 1, 5}) {
        const at::Tensor x = at::randint(-9, 9, {n, 3}, at::kLong).to(type);
        std::vector<at::Tensor> results[2];
        for (Communicator* group : {static_cast<Communicator*>(&thread), alone.get()}) {
          auto& made = results[group == alone.get()];
          for (Reduction reduction : {Reduction::sum, Reduction::max}) {
            if (type == at::kBool) continue;
            made.push_back(x.clone());
            group->all_reduce(made.back(), reduction);
          }
          std::vector<at::Tensor> pieces{x.clone()};
          group->all_gather(pieces);
          made.push_back(pieces[0]);
          group->all_gather_grouped(pieces);
          made.push_back(pieces[0]);
          made.push_back(group->reduce_scatter({x}));
          made.push_back(group->reduce_scatter_grouped({x}));
          EXPECT_FALSE(made.back().is_alias_of(x) && n > 0);
          std::vector<at::Tensor> receive{at::empty_like(x)};
          group->all_to_all({x}, receive);
          made.push_back(receive[0]);
          group->barrier();
        }
        ASSERT_EQ(results[0].size(), results[1].size());
        for (size_t i = 0; i < results[0].size(); ++i)
          EXPECT_TRUE(results[0][i].equal(results[1][i])) << i << " of " << type;
      }
  });
  EXPECT_EQ(alone->size(), 1);
}

}  // namespace
}  // namespace motley
