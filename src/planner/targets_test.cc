// Plans that training frameworks can say: none is slower than the framework's own way, whatever that
// is, and each is told once.
#include "planner/targets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "planner/planner.h"
#include "readers/huggingface.h"

namespace motley::planner {
namespace {

constexpr int kBatch = 16;

struct Model {
  const char* name;
  const char* config;
};
const Model kModels[] = {
    {"gpt", R"({"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 200,
                "n_positions": 16})"},
    {"llama", R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4,
                  "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
                  "vocab_size": 200, "max_position_embeddings": 16})"},
    {"moe", R"({"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 4,
                "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
                "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 200,
                "max_position_embeddings": 16})"}};

// Two machines of four: alike, or one of devices that are four times as slow.
Cluster machines(const char* second, const char* bandwidth) {
  return parse_cluster(fmt::format(R"(name: test
device_types:
  - {{name: fast, flops: 4e12, memory: 1 GiB, memory_bandwidth: 100e9, overhead: 1e-6}}
  - {{name: slow, flops: 1e12, memory: 1 GiB, memory_bandwidth: 50e9, overhead: 1e-6}}
link: {{bandwidth: {1}, latency: 10 us}}
groups:
  - {{name: one, link: {{bandwidth: 10 GB/s, latency: 2 us}}, devices: [{{type: fast, count: 4}}]}}
  - {{name: two, link: {{bandwidth: 10 GB/s, latency: 2 us}}, devices: [{{type: {0}, count: 4}}]}}
)",
                                   second, bandwidth),
                       "test");
}

PlanReport plan_for(const std::string& target, const Model& model, const Cluster& cluster,
                    const std::string& fix = "") {
  static std::map<std::string, readers::HuggingFaceModel> known;
  const readers::HuggingFaceModel& built =
      known.try_emplace(model.name, parse_json(model.config, "config.json"), "config.json", 0, 0)
          .first->second;
  PlanOptions options;
  options.model = model.name;
  options.batch = kBatch;
  options.target = target;
  options.fix = fix;
  options.limits.deadline = Deadline::in(60);
  return plan([&](int64_t samples) { return built.at(samples); }, cluster, options);
}

class Targets : public ::testing::TestWithParam<Target> {
 protected:
  static const std::vector<std::pair<const char*, Cluster>>& clusters() {
    static const std::vector<std::pair<const char*, Cluster>> list = {
        {"alike", machines("fast", "1 GB/s")},
        {"mixed", machines("slow", "10 GB/s")},
        {"far", machines("slow", "50 MB/s")}};
    return list;
  }
};

TEST_P(Targets, AreNeverSlowerThanTheirOwnWayAndToldOnce) {
  const Target& target = GetParam();
  for (size_t i = 0; i < std::size(kModels);
       ++i) {  // each on a cluster of its own: all take minutes
    const auto& [where, cluster] = clusters()[i];
    const Model& model = kModels[i];
    SCOPED_TRACE(fmt::format("{} {} {}", target.name, where, model.name));
    const PlanReport report = plan_for(target.name, model, cluster);
    ASSERT_FALSE(report.candidates.empty()) << report.reason;
    const Seconds best = report.best().simulated_s;
    const EngineResult& engine = *report.of("target");
    const StrategyTime& standard = engine.baselines.at(0);
    ASSERT_TRUE(standard.feasible) << standard.reason;
    EXPECT_LE(best, standard.predicted_step_s * (1 + 1e-9)) << standard.knobs;
    for (const Lifted& lifted : engine.lifted) EXPECT_LT(lifted.step_s, best) << lifted.limit;
    std::set<std::string> told;
    for (const Candidate& c : report.candidates) EXPECT_TRUE(told.insert(c.note).second) << c.note;
  }
}

// What a user would write by hand: the same degrees on all devices, and as many layers in each stage.
TEST_P(Targets, AreNeverSlowerThanDegreesByHand) {
  const Target& target = GetParam();
  if (!target.pipelines) GTEST_SKIP() << "it has no degrees";
  int compared = 0;
  const auto& [where, cluster] = clusters()[1];
  const Model& model = kModels[1];
  const Seconds best = plan_for(target.name, model, cluster).best().simulated_s;
  for (const char* fix : {"pp=1,dp=8,tp=1", "pp=2,dp=4,tp=1,layers=2/2", "pp=1,dp=2,tp=4",
                          "pp=2,dp=1,tp=4,layers=2/2", "pp=4,dp=2,tp=1,layers=1/1/1/1"}) {
    SCOPED_TRACE(fmt::format("{} {} {} {}", target.name, where, model.name, fix));
    const PlanReport by_hand = plan_for(target.name, model, cluster, fix);
    if (by_hand.candidates.empty()) continue;
    ++compared;
    EXPECT_LE(best, by_hand.best().simulated_s * (1 + 1e-9)) << by_hand.best().note;
  }
  EXPECT_GT(compared, 1);
}

INSTANTIATE_TEST_SUITE_P(All, Targets, ::testing::ValuesIn(targets()),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace motley::planner
