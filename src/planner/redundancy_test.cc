// State kept twice (--redundancy 1): who keeps it, and that memory and time of plans count it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "cluster/second_holders.h"
#include "core/error.h"
#include "planner/planner.h"
#include "planner/program_plan.h"
#include "sim/simulate.h"
#include "tiny_models.h"

namespace motley::planner {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(SecondHolders, EveryDeviceKeepsOneOthersOnAnotherMachine) {
  const Cluster cluster = tiny_cluster(1e9);  // machines of two devices
  EXPECT_EQ(second_holders(cluster), (std::vector<int>{2, 3, 4, 5, 0, 1}));
  EXPECT_EQ(first_holders(cluster), (std::vector<int>{4, 5, 0, 1, 2, 3}));
  const Cluster flat = flat_cluster({device_catalogue()[0]}, {3}, {LinkKind::switched, 1e9, 1e-5});
  EXPECT_EQ(second_holders(flat), (std::vector<int>{1, 2, 0}));
  const Cluster one = flat_cluster({device_catalogue()[0]}, {1}, {LinkKind::switched, 1e9, 1e-5});
  EXPECT_EQ(second_holders(one), (std::vector<int>{0}));
}

Plan zero_plan(int redundancy, const Cluster& cluster) {
  ProgramRequest request;
  request.model = "tiny";
  request.batch = 16;
  request.strategy = "zero";
  request.baselines = false;
  request.alternation.redundancy = redundancy;
  request.alternation.certify = false;
  ProgramResult result = plan_program(tiny_gpt(16), cluster, request);
  MOTLEY_CHECK(result.feasible, "{}", result.reason);
  return std::move(result.plan);
}

TEST(Redundancy, MemoryAndTimeAreCounted) {
  const Cluster cluster = tiny_cluster(1e9);
  const Plan once = zero_plan(0, cluster), twice = zero_plan(1, cluster);
  ASSERT_EQ(once.program.steps, twice.program.steps);
  EXPECT_EQ(once.ratios, twice.ratios);
  EXPECT_THAT(check(twice), IsEmpty());
  // By hand: with even shares a device keeps as much again of parameters and two states, and its
  // gradients are sent once: a sixth of the bytes out of each device, a third out of each machine.
  const std::vector<Placement> stored = stored_placements(*twice.theory, twice.program);
  Bytes state = 0, largest = 0;
  Seconds sent = 0;
  const CostModel model(cluster);
  for (const Parameter& p : twice.graph->parameters) {
    if (!stored[p.value.index].is_shard()) continue;
    const auto bytes = static_cast<Bytes>(twice.graph->spec(p.value).bytes());
    const Cut cut = twice.theory->cut(p.value, stored[p.value.index]);
    const Shares shares(twice.ratios);
    const std::vector<int64_t>& pieces = shares.of(cut);
    int64_t out = 0;
    for (int m = 0; m < 3; ++m) out = std::max(out, pieces[2 * m] + pieces[2 * m + 1]);
    sent += bytes * static_cast<double>(out) / static_cast<double>(cut.size) / 1e9;
    const Bytes piece = bytes *
                        static_cast<double>(*std::max_element(pieces.begin(), pieces.end())) /
                        static_cast<double>(cut.size);
    state += 3 * piece;
    largest = std::max(largest, piece);
  }
  ASSERT_GT(state, 0);
  for (int d = 0; d < cluster.size(); ++d) {
    const Bytes more = twice.peak_memory_bytes[d] - once.peak_memory_bytes[d];
    EXPECT_GE(more, state * (1 - 1e-9)) << d;
    EXPECT_LE(more, state * 5 / 3 + 4 * largest)
        << d;  // gradients as they come and as they are sent
  }
  const Seconds more = twice.predicted_step_s - once.predicted_step_s;
  EXPECT_GE(more, sent);
  EXPECT_LE(more, 1.2 * sent + 1e-3);  // latency, and the optimizer on the copies
  EXPECT_NEAR(simulate(twice).step - simulate(once).step, more, 0.05 * more);
  EXPECT_EQ(simulate(twice).devices[0].peak_memory, twice.peak_memory_bytes[0]);
  EXPECT_THAT(describe(twice), HasSubstr("on a second device each"));
}

TEST(Redundancy, MemoryLimitsPlansAndFiles) {
  Cluster cluster = tiny_cluster(1e9);
  const Plan once = zero_plan(0, cluster), twice = zero_plan(1, cluster);
  Plan read = parse_plan(to_json(twice).dump(), "plan.json");
  EXPECT_EQ(read.redundancy, 1);
  EXPECT_EQ(to_json(read).dump(), to_json(twice).dump());
  EXPECT_EQ(to_json(once).count("redundancy"), 0U);
  for (DeviceType& type : read.cluster.types)
    type.memory = 0.5 * (once.peak_memory_bytes[0] + twice.peak_memory_bytes[0]);
  ASSERT_FALSE(check(read).empty());
  EXPECT_THAT(check(read)[0], HasSubstr("needs"));
  read.redundancy = 0;
  EXPECT_THAT(check(read), IsEmpty());
}

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const UserError& e) {
    return e.what();
  }
  return "";
}

TEST(Redundancy, WhatIsNotSupportedIsRefused) {
  const Cluster cluster = tiny_cluster(1e9);
  const Plan twice = zero_plan(1, cluster);
  for (const auto& [value, says] : std::map<std::string, std::string>{
           {"2", "'redundancy' is 2; give 0, or 1"}, {"-1", "'redundancy' is -1; give 0, or 1"}}) {
    Json json = to_json(twice);
    json["redundancy"] = std::stoi(value);
    EXPECT_THAT(refusal([&] { parse_plan(json.dump(), "plan.json"); }), HasSubstr(says));
  }
  const auto plan_with = [&](const std::function<void(PlanOptions*)>& change, const Cluster& on) {
    PlanOptions options;
    options.batch = 16;
    options.redundancy = 1;
    options.limits.deadline = Deadline::in(5);
    change(&options);
    return refusal([&] { plan([](int64_t n) { return tiny_gpt(n); }, on, options); });
  };
  EXPECT_THAT(plan_with([](PlanOptions* o) { o->redundancy = 3; }, cluster),
              HasSubstr("--redundancy is 3; give 0 or 1"));
  EXPECT_THAT(plan_with([](PlanOptions* o) { o->engine = "pipeline"; }, cluster),
              HasSubstr("leave out other engines"));
  const Cluster one = flat_cluster({device_catalogue()[0]}, {1}, {LinkKind::switched, 1e9, 1e-5});
  EXPECT_THAT(plan_with([](PlanOptions*) {}, one), HasSubstr("has one device; give 0"));
}

// The whole planner: one program alone, which keeps what it cuts twice.
TEST(Redundancy, ThePlannerCountsIt) {
  const Cluster cluster = tiny_cluster(1e8);
  PlanOptions options;
  options.batch = 16;
  options.redundancy = 1;
  options.baselines = false;
  const PlanReport report = plan([](int64_t n) { return tiny_gpt(n); }, cluster, options);
  ASSERT_FALSE(report.candidates.empty());
  for (const Candidate& c : report.candidates) {
    EXPECT_EQ(c.plan->redundancy, 1);
    EXPECT_EQ(c.plan->pipeline, nullptr);
    EXPECT_GT(c.plan->cluster.size(), 1);
    EXPECT_THAT(check(*c.plan), IsEmpty());
    EXPECT_NEAR(c.plan->predicted_step_s, c.simulated_s, 0.1 * c.simulated_s);
    EXPECT_LE(c.plan->lower_bound_s, c.plan->predicted_step_s * (1 + 1e-9));
  }
}

}  // namespace
}  // namespace motley::planner
