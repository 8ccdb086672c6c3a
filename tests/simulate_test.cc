// The event simulator against simulations of every device by itself, and of every pair of pieces.
#include "sim/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>

#include "random_pipeline.h"
#include "sim/exchange.h"

namespace motley {
namespace {

// What devices do at what times, each by itself or one for all that are alike.
void expect_same_spans(const Simulation& each, const Simulation& alike) {
  using What = std::tuple<Seconds, Seconds, std::string, WalkKind, Seconds>;
  const auto of_devices = [](const Simulation& sim) {
    std::vector<std::vector<What>> all(sim.devices.size());
    for (const Span& s : sim.spans)
      all[s.device].emplace_back(s.begin, s.end, s.name, s.kind, s.comm);
    for (auto& list : all) std::sort(list.begin(), list.end());
    return all;
  };
  const auto wanted = of_devices(each), found = of_devices(alike);
  ASSERT_EQ(alike.like.size(), wanted.size());
  for (size_t d = 0; d < wanted.size(); ++d) {
    EXPECT_EQ(found[alike.like[d]], wanted[d]) << d;
    if (alike.like[d] != static_cast<int>(d)) {
      EXPECT_TRUE(found[d].empty());
    }
  }
}

// Its cluster so many times side by side, with its replicas on each.
void repeat(int times, Plan* plan) {
  const Cluster one = plan->cluster;
  Cluster all{.name = one.name, .types = one.types, .devices = {}, .groups = {}};
  all.groups.push_back({.name = "all",
                        .parent = GroupId(),
                        .link = {LinkKind::switched, 1e9, 1e-5},
                        .device_count = times * one.size()});
  for (int i = 0; i < times; ++i) {
    const auto offset = static_cast<int64_t>(all.groups.size());
    all.groups[0].children.push_back(GroupId(offset));
    for (Group group : one.groups) {
      group.parent = group.parent.valid() ? GroupId(offset + group.parent.index) : GroupId(0);
      for (GroupId& child : group.children) child = GroupId(offset + child.index);
      group.first_device += i * one.size();
      all.groups.push_back(std::move(group));
    }
    for (const Device& device : one.devices)
      all.devices.push_back({device.type, GroupId(offset + device.parent.index)});
  }
  plan->cluster = std::move(all);
  const std::vector<ReplicaPlan> replicas = plan->pipeline->replicas;
  plan->pipeline->replicas.clear();
  for (Division& division : plan->pipeline->zero) division.shares.clear();
  for (int i = 0; i < times; ++i)
    for (ReplicaPlan replica : replicas) {
      for (StagePlan& stage : replica.stages)
        for (int& d : stage.devices) d += i * one.size();
      plan->pipeline->replicas.push_back(std::move(replica));
    }
  fit_batch(plan);
}

// Of replicas that look alike one is simulated for all, and of devices with like pieces one is: what
// every device does is what it does where each is simulated by itself, as for spans.
TEST(Pipeline, WhatIsAlikeIsSimulatedOnce) {
  Rng rng(47);
  for (const char* model :
       {"gpt:layers=3,hidden=16,heads=4,seq=6,vocab=11", "mlp:layers=4,hidden=12,in=10,classes=7",
        "vgg19:width=2,image=32,classes=5"}) {
    RandomPipeline what{.model = model};
    for (int trial = 0; trial < 8; ++trial) {
      what.zero = trial % 2 == 1;
      Plan plan = random_pipeline(what, &rng);
      repeat(static_cast<int>(2 + rng.below(2)), &plan);
      const Simulation once = simulate(plan), each = simulate(plan, Spans::all);
      expect_same_spans(each, simulate(plan, Spans::alike));
      EXPECT_EQ(once.step, each.step);
      EXPECT_NEAR(once.overlap, each.overlap, 1e-9);
      EXPECT_NEAR(once.load_balance, each.load_balance, 1e-9);
      for (int d = 0; d < plan.cluster.size(); ++d) {
        EXPECT_NEAR(once.devices[d].busy, each.devices[d].busy, 1e-9 * each.step);
        EXPECT_NEAR(once.devices[d].comm, each.devices[d].comm, 1e-9 * each.step);
        EXPECT_NEAR(once.devices[d].exposed_comm, each.devices[d].exposed_comm, 1e-9 * each.step);
        EXPECT_NEAR(once.devices[d].idle, each.devices[d].idle, 1e-9 * each.step);
      }
    }
  }
}

// Every piece that a sender has and a receiver takes, pair by pair.
TEST(Pipeline, MessagesArePairsOfPieces) {
  Rng rng(53);
  for (int trial = 0; trial < 300; ++trial) {
    const auto holding = [&](std::vector<int>* devices, std::unique_ptr<Shares>* shares) {
      devices->resize(1 + rng.below(5));
      std::vector<double> ratios;
      for (int& d : *devices) d = static_cast<int>(&d - devices->data());
      for (size_t d = 0; d < devices->size(); ++d)
        ratios.push_back(rng.chance(0.2) && d > 0 ? 0 : 0.1 + rng.uniform());
      const double sum = std::accumulate(ratios.begin(), ratios.end(), 0.0);
      for (double& ratio : ratios) ratio /= sum;
      *shares = std::make_unique<Shares>(ratios);
    };
    std::vector<int> senders, receivers;
    std::unique_ptr<Shares> sent, taken;
    holding(&senders, &sent);
    holding(&receivers, &taken);
    const int64_t size = 1 + rng.below(20);
    std::vector<net::PairMessage> messages;
    add_messages({&senders, sent.get(), Placement::shard(0), size},
                 {&receivers, taken.get(), Placement::shard(0), size}, 1000, &messages);
    std::map<std::pair<int, int>, double> found;
    for (const net::PairMessage& m : messages) {
      EXPECT_GT(m.bytes, 0);
      EXPECT_TRUE(found.emplace(std::pair(m.from, m.to), m.bytes).second);
    }
    for (size_t s = 0; s < senders.size(); ++s)
      for (size_t r = 0; r < receivers.size(); ++r) {
        int both = 0;
        for (int64_t i = 0; i < size; ++i) {
          const auto has = [&](const Shares& of, size_t rank) {
            const int64_t begin = of.begin({size}, static_cast<int>(rank));
            return i >= begin && i < begin + of.of({size})[rank];
          };
          both += has(*sent, s) && has(*taken, r);
        }
        const double bytes = 1000.0 * both / static_cast<double>(size);
        EXPECT_NEAR(found[std::pair(senders[s], receivers[r])], bytes, 1e-9);
      }
  }
}

}  // namespace
}  // namespace motley
