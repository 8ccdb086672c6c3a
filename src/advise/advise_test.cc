#include "advise/advise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "bounds/compute_bound.h"
#include "core/rng.h"
#include "sim/simulate.h"
#include "tiny_models.h"

namespace motley::advise {
namespace {

using testing::HasSubstr;

Question question(const Cluster& cluster, double seconds = 5) {
  Question q;
  q.graph_of = tiny_gpt;
  q.options.model = "tiny";
  q.options.batch = 16;
  q.options.baselines = false;
  q.options.limits.deadline = Deadline::in(seconds);
  q.cluster = cluster;
  return q;
}

Variant after(const Cluster& cluster, const std::string& edit) {
  int64_t next = cluster.size();
  return edited(unchanged(cluster), edit, &next);
}

TEST(Edits, ChangeTheClusterAsTheySay) {
  const Cluster c = tiny_cluster(1e9);
  const auto types = [](const Variant& v) {
    std::string text;
    for (const Device& d : v.cluster.devices) text += v.cluster.types[d.type].name[0];
    return text;
  };
  EXPECT_EQ(types(after(c, "add 2 fast")), "ffffssff");
  EXPECT_EQ(after(c, "add 3 fast").cluster.groups.size(), 6u);  // a machine of two and one of one
  EXPECT_EQ(types(after(c, "Add 1 h100-80gb")), "ffffssH");
  EXPECT_EQ(types(after(c, "drop slow")), "ffff");
  EXPECT_EQ(types(after(c, "drop OLD")), "ffff");
  EXPECT_EQ(types(after(c, "drop 1 slow")), "ffffs");
  EXPECT_EQ(types(after(c, "drop new")), "ss");
  EXPECT_EQ(types(after(c, "replace slow with fast")), "ffffff");
  EXPECT_EQ(types(after(c, "drop slow; add 2 fast and drop 1 fast")), "fffff");
  EXPECT_EQ(after(c, "cross-link 100 Gbps").cluster.groups[0].link.bandwidth, 12.5e9);
  EXPECT_EQ(after(c, "cross-link latency 3 us").cluster.groups[0].link.latency, 3e-6);
  const Variant link = after(c, "link new 20 GB/s");
  EXPECT_EQ(link.cluster.groups[1].link.bandwidth, 20e9);
  EXPECT_EQ(link.cluster.groups[2].link.bandwidth, 20e9);
  EXPECT_EQ(link.cluster.groups[3].link.bandwidth, 5e9);
  EXPECT_EQ(after(c, "memory slow 2 GiB").cluster.type_of(4).memory, 2147483648.);
  EXPECT_EQ(after(c, "speed slow 2").cluster.type_of(4).flops, 2e12);
  // Who stays is who it was; who comes is new.
  const Variant v = after(c, "drop 1 fast; add 2 slow");
  EXPECT_EQ(v.ids, (std::vector<int64_t>{0, 1, 2, 4, 5, 6, 7}));
  EXPECT_EQ(parse_cluster(to_yaml(v.cluster), "v").size(), v.cluster.size());
}

TEST(Edits, AreRefusedInOneLine) {
  const Cluster c = tiny_cluster(1e9);
  const std::pair<const char*, const char*> cases[] = {
      {"", "is empty"},
      {"buy 8 fast", "begins with 'buy'"},
      {"add fast", "has 'fast' for a number of devices"},
      {"add 0 fast", "number of devices"},
      {"add 4", "lacks a device type"},
      {"add 4 B300", "'B300', which is no known device type"},
      {"add 999999 fast", "adds 999999 devices"},
      {"drop blue", "'blue', which is no device type and no group"},
      {"drop 9 slow", "drops 9 of 2 devices"},
      {"drop fast; drop slow", "leaves no device"},
      {"cross-link fast", "'fast'"},
      {"cross-link 0 Gbps", "0"},
      {"cross-link 1e40 Gbps", "1e40"},
      {"link blue 5 Gbps", "no group"},
      {"replace slow by fast", "has 'by' for 'with'"},
      {"memory slow -1 GiB", "-1 GiB"},
      {"speed slow fast", "'fast'"},
  };
  for (const auto& [edit, what] : cases) {
    try {
      after(c, edit);
      ADD_FAILURE() << edit;
    } catch (const UserError& e) {
      EXPECT_THAT(e.what(), HasSubstr(what)) << edit;
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
    }
  }
}

// A cluster that has more of something is never worse, and one that has less is never better.
TEST(Advice, IsMonotone) {
  Rng rng(11);
  const std::vector<std::string> more = {"add 2 fast",
                                         "add 1 slow",
                                         "cross-link 20 Gbps",
                                         "link new 20 GB/s",
                                         "cross-link latency 1 us",
                                         "memory slow 2 GiB",
                                         "speed slow 2",
                                         "speed fast 1.3",
                                         "add 2 H100-80GB",
                                         "add 1 fast; cross-link 40 Gbps"},
                                 less = {"drop slow",      "drop 1 fast",
                                         "drop 3 fast",    "cross-link 0.1 Gbps",
                                         "speed fast 0.5", "link old 1 GB/s"};
  for (int round = 0; round < 2; ++round) {
    Question q = question(tiny_cluster(1e8 * (1 + static_cast<double>(rng.below(20)))), 6);
    q.edits = more;
    q.edits.insert(q.edits.end(), less.begin(), less.end());
    q.groups = round % 2 == 0;
    const Advice advice = advise(q);
    ASSERT_TRUE(advice.now.found) << advice.now.reason;
    for (size_t i = 0; i < q.edits.size(); ++i) {
      const Answer& a = advice.edits[i];
      if (i < more.size()) {
        ASSERT_TRUE(a.found) << a.name;
        EXPECT_LE(a.cost.step, advice.now.cost.step * (1 + 1e-9)) << a.name;
      } else if (a.found && q.edits[i].starts_with("drop")) {
        EXPECT_GE(a.cost.step, advice.now.cost.step * (1 - 1e-9)) << a.name;
      }
    }
    for (const Worth& w : advice.groups) {
      if (w.without.found) {
        EXPECT_GE(w.without.cost.step, advice.now.cost.step * (1 - 1e-9)) << w.group;
      }
      if (w.lending.found) {
        EXPECT_GE(w.lending.cost.step, advice.now.cost.step * (1 - 1e-9)) << w.group;
      }
    }
  }
}

// The plan that is handed out is for the devices that it says, sound, and takes what it says.
TEST(Advice, HandsOutThePlan) {
  Question q = question(tiny_cluster(2e8));
  const Advice advice = advise(q);
  ASSERT_TRUE(advice.plan);
  EXPECT_TRUE(check(*advice.plan).empty()) << check(*advice.plan)[0];
  EXPECT_NEAR(simulate(*advice.plan).step, advice.now.cost.step, 1e-12);
  int devices = 0;
  for (const auto& [type, count] : advice.now.uses) devices += count;
  EXPECT_EQ(advice.plan->cluster.size(), devices);
}

TEST(Advice, SaysWhatDoesNotFitAndWhatWould) {
  Question q = question(tiny_cluster(1e9), 15);
  q.groups = false;
  for (DeviceType& t : q.cluster.types) t.memory = 200e3;
  q.edits = {"memory fast 1 GiB", "add 1 A100-40GB"};
  const Advice advice = advise(q);
  EXPECT_FALSE(advice.now.found);
  EXPECT_THAT(advice.now.reason, HasSubstr("lack"));
  EXPECT_TRUE(advice.edits[0].found) << advice.edits[0].reason;
  EXPECT_TRUE(advice.edits[1].found) << advice.edits[1].reason;
  EXPECT_THAT(to_text(q, advice), HasSubstr("it does not fit"));
}

// Of all parts of whole machines, each planned for by itself, none that is fast enough is cheaper.
TEST(Advice, TheCheapestDevicesAreThoseOfBruteForce) {
  const Cluster cluster = tiny_cluster(1e9);
  for (const double slow_price : {0.1, 3.}) {
    Question q = question(cluster, 60);
    q.tariffs = {{"fast", {3, 300, 100}}, {"slow", {slow_price, 100, 50}}};
    q.groups = false;
    const Variant all = unchanged(cluster);
    // Parts by machines: none, one or two new ones, the old one or not.
    std::vector<std::pair<Seconds, double>> costs;
    for (const std::vector<int>& part : std::vector<std::vector<int>>{
             {0, 1}, {0, 1, 2, 3}, {4, 5}, {0, 1, 4, 5}, {0, 1, 2, 3, 4, 5}}) {
      Question of_part = q;
      of_part.cluster = part_of(all, part, "").cluster;
      of_part.options.limits.deadline = Deadline::in(4);
      const Advice a = advise(of_part);
      ASSERT_TRUE(a.now.found);
      costs.emplace_back(a.now.cost.step, a.now.cost.money);
    }
    std::vector<Seconds> steps;
    for (const auto& [step, money] : costs) steps.push_back(step);
    std::sort(steps.begin(), steps.end());
    for (const Seconds deadline : {steps[0] * 1.001, steps[2] * 1.001, steps[4] * 1.001}) {
      double least = 1e300;
      for (const auto& [step, money] : costs)
        if (step <= deadline) least = std::min(least, money);
      q.deadline = deadline;
      q.options.limits.deadline = Deadline::in(8);
      const Advice a = advise(q);
      ASSERT_TRUE(a.cheapest && a.cheapest->found);
      EXPECT_LE(a.cheapest->cost.step, deadline);
      EXPECT_LE(a.cheapest->cost.money, least * (1 + 1e-9)) << deadline;
    }
    q.deadline = 1e-9;
    q.options.limits.deadline = Deadline::in(10);
    const Advice none = advise(q);
    EXPECT_FALSE(none.cheapest->found);
    EXPECT_EQ(none.parts_planned, 0);  // the bound says so
  }
}

TEST(Advice, MoneyAndEnergyAreOfTheDevicesThatWork) {
  Question q = question(tiny_cluster(1e9));
  q.tariffs = {{"fast", {3600, 300, 300}}, {"slow", {7200, 100, 100}}};
  q.objective = Objective::money;
  const Advice advice = advise(q);
  double rate = 0, watts = 0;
  for (const auto& [type, count] : advice.now.uses) {
    rate += count * (type == "fast" ? 1 : 2);
    watts += count * (type == "fast" ? 300 : 100);
  }
  EXPECT_NEAR(advice.now.cost.money, rate * advice.now.cost.step, 1e-12);
  EXPECT_NEAR(advice.now.cost.joules, watts * advice.now.cost.step, 1e-9);
  const Advice fastest = advise(question(tiny_cluster(1e9)));
  EXPECT_LE(fastest.now.cost.step, advice.now.cost.step * (1 + 1e-9));
}

// A type without a price is not free: it is refused where money is to be least, and else its price is
// said to be not given.
TEST(Advice, WhatIsNotGivenIsNotFree) {
  Question q = question(tiny_cluster(1e9));
  q.tariffs = {{"fast", {3600, 300, 300}}, {"slow", {7200, 100, 100}}};
  q.edits = {"add 8 H100-80GB"};
  const Advice advice = advise(q);
  EXPECT_TRUE(advice.now.cost.money_known && advice.now.cost.joules_known);
  ASSERT_TRUE(advice.edits[0].found);
  for (const auto& [type, count] : advice.edits[0].uses)
    if (type == "H100-80GB") {
      EXPECT_FALSE(advice.edits[0].cost.money_known);
      EXPECT_TRUE(to_json(q, advice)["what_if"][0]["money"].is_null());
      EXPECT_THAT(to_text(q, advice), HasSubstr("price not given"));
    }
  for (const Objective objective : {Objective::money, Objective::energy}) {
    q.objective = objective;
    q.edits = {"add 8 H100-80GB"};
    try {
      advise(q);
      ADD_FAILURE();
    } catch (const UserError& e) {
      EXPECT_THAT(e.what(), HasSubstr("add 8 H100-80GB"));
      EXPECT_THAT(e.what(), HasSubstr("of H100-80GB is not given"));
    }
    q.edits.clear();
    q.options.limits.deadline = Deadline::in(5);
    for (const Worth& w : advise(q).groups)
      EXPECT_TRUE(w.replacement.empty() || w.replacement == "fast") << w.replacement;
  }
  q.tariffs.erase("slow");
  EXPECT_THROW(advise(q), UserError);
}

TEST(Tariffs, AreReadAndChecked) {
  const std::string text = to_yaml(tiny_cluster(1e9, ", price: 2.5, watts: 400, idle_watts: 80"));
  EXPECT_TRUE(parse_tariffs(text, "t").empty());  // a cluster's text has none
  const char* with = R"(link: {bandwidth: 1e9}
devices: [{type: a, count: 1}, {type: b, count: 1}]
device_types:
  - {name: a, like: T4, price: 0.35, watts: 70}
  - {name: b, like: a, watts: 90, idle_watts: 10}
)";
  const Tariffs tariffs = parse_tariffs(with, "t.yaml");
  EXPECT_EQ(tariffs.at("a").price, 0.35);
  EXPECT_EQ(tariffs.at("a").idle_watts, 70);
  EXPECT_EQ(tariffs.at("b").price, 0.35);
  EXPECT_EQ(tariffs.at("b").idle_watts, 10);
  for (const auto& [field, what] : {std::pair("price: -1", "price"),
                                    {"watts: x", "watts"},
                                    {"idle_watts: 5", "idle_watts is more than watts"},
                                    {"price: 1e30", "price is 1e30"}}) {
    try {
      parse_tariffs(fmt::format("link: {{bandwidth: 1e9}}\ndevices: [{{type: a}}]\ndevice_types: "
                                "[{{name: a, like: T4, {}}}]\n",
                                field),
                    "t.yaml");
      ADD_FAILURE() << field;
    } catch (const UserError& e) {
      EXPECT_THAT(e.what(), HasSubstr(what));
    }
  }
}

}  // namespace
}  // namespace motley::advise
