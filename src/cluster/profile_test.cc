#include "cluster/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace motley {
namespace {

using ::testing::HasSubstr;

Profile example() {
  Profile p;
  p.cluster = "pair";
  p.emulated = "network namespaces";
  p.seconds = 3;
  FitQuality fit{0.99, 0.02, {{1, 2}, {3, 4}}};
  ProfiledDevice fast;
  fast.type = "fast";
  fast.flops = 2e9, fast.half_flops = 3e9, fast.memory_bandwidth = 4e9, fast.overhead = 5e-6;
  fast.classes = {{"matmul", "f32", 1e-6, 2e9, fit}};
  fast.ops = {{{"aten::mm", 1e-6, 2e9, 0}, fit}, {{"motley::sgd", 1e-6, 0, 1e9, 2e6, 5e8}, fit}};
  ProfiledDevice slow = fast;
  slow.type = "slow";
  slow.flops = 1e9;
  slow.interference = 0.25;
  p.devices = {fast, slow};
  p.stages = {{"0123", "mlp", "fast", 4, 1e-3, 2e-3, 1e4},
              {"0123", "mlp", "slow", 4, 2e-3, 4e-3, 1e4},
              {"0123", "mlp", "slow", 4, 1e-3, 2e-3, 1e4, 4, 2}};
  p.groups = {{{}, {"fast", "slow"}, {{Collective::all_gather, 1e-3, 5e6}}, {fit}}};
  return p;
}

const char* kPair = R"(
name: pair
link: {bandwidth: 1 Gbps, latency: 1 us}
devices: [{type: fast}, {type: slow}]
device_types: [{name: fast, like: cpu-core}, {name: slow, like: cpu-core}]
)";

std::string message_of(const std::string& text) {
  try {
    parse_profile(text, "p.yaml");
  } catch (const UserError& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST(Profile, PrintsAndParsesBack) {
  const std::string text = to_json(example()).dump();
  EXPECT_EQ(to_json(parse_profile(text, "p")).dump(), text);
}

TEST(Profile, ReplacesTheNumbersOfACluster) {
  Cluster cluster = parse_cluster(kPair, "pair");
  apply(example(), "p.yaml", &cluster);
  EXPECT_EQ(cluster.types[1].flops, 1e9);
  EXPECT_EQ(cluster.types[1].interference, 0.25);
  ASSERT_EQ(cluster.types[0].ops.size(), 2U);
  EXPECT_EQ(cluster.types[0].ops[0].op, "aten::mm");
  ASSERT_EQ(cluster.groups[0].measured.size(), 1U);
  EXPECT_EQ(cluster.groups[0].measured[0].bandwidth, 5e6);
  // A cluster with measured numbers prints and parses back too.
  const Cluster again = parse_cluster(to_yaml(cluster), "again");
  EXPECT_EQ(again.types[0], cluster.types[0]);
  EXPECT_EQ(again.groups[0].measured, cluster.groups[0].measured);
}

TEST(Profile, OfOtherDevicesIsRefusedOrLeftAside) {
  Profile profile = example();
  Cluster cluster = parse_cluster(kPair, "pair");
  profile.groups[0].types = {"slow", "fast"};
  apply(profile, "p.yaml", &cluster);
  EXPECT_TRUE(cluster.groups[0].measured.empty());
  profile.devices.pop_back();
  try {
    apply(profile, "p.yaml", &cluster);
    FAIL();
  } catch (const UserError& e) {
    EXPECT_THAT(e.what(), HasSubstr("p.yaml: devices has no type slow"));
  }
}

TEST(Profile, MistakesAreNamed) {
  EXPECT_THAT(message_of("{"), HasSubstr("p.yaml"));
  EXPECT_THAT(message_of("[]"), HasSubstr("p.yaml"));
  Json json = to_json(example());
  json["motley_profile"] = 9;
  EXPECT_THAT(message_of(json.dump()), HasSubstr("motley_profile"));
  json = to_json(example());
  json["devices"][1]["flops"] = -1;
  EXPECT_THAT(message_of(json.dump()), HasSubstr("p.yaml.devices[1]: field 'flops' is -1"));
  json = to_json(example());
  json["devices"][1]["interference"] = 101;
  EXPECT_THAT(message_of(json.dump()), HasSubstr("field 'interference' is 101; give at most 100"));
  json = to_json(example());
  json["groups"][0]["collectives"][0]["form"] = "gossip";
  EXPECT_THAT(message_of(json.dump()), HasSubstr("gossip"));
  json = to_json(example());
  json["groups"][0]["collectives"][0]["fit"]["points"] = {1, 2};
  EXPECT_THAT(message_of(json.dump()), HasSubstr("points"));
  const auto stage_with = [](const char* field, const Json& value) {
    Json j = to_json(example());
    j["stages"][1][field] = value;
    return message_of(j.dump());
  };
  EXPECT_THAT(stage_with("forward_s", -1),
              HasSubstr("p.yaml.stages[1]: field 'forward_s' is -1; give a number from 0"));
  EXPECT_THAT(stage_with("backward_s", "x"), HasSubstr("p.yaml.stages[1]: field 'backward_s'"));
  EXPECT_THAT(stage_with("backward_s", nullptr), HasSubstr("p.yaml.stages[1]: field 'backward_s'"));
  EXPECT_THAT(stage_with("micro_batch", 0), HasSubstr("field 'micro_batch' is 0"));
  EXPECT_THAT(stage_with("shape", ""), HasSubstr("field 'shape' is empty"));
  EXPECT_THAT(stage_with("type", "fast"), HasSubstr("is 0123 again for fast"));
  EXPECT_THAT(stage_with("nodes", 0), HasSubstr("field 'nodes' is 0; give 1 to"));
  EXPECT_THAT(stage_with("nodes", 2),
              HasSubstr("field 'devices' is 1; give at least one per node, of 2"));
  json = to_json(example());
  json["stages"][1]["devices"] = 4;
  json["stages"][1]["nodes"] = 2;
  EXPECT_THAT(message_of(json.dump()), HasSubstr("is 0123 again for slow"));
  json = to_json(example());
  json["stages"] = 7;
  EXPECT_THAT(message_of(json.dump()), HasSubstr("p.yaml: field 'stages'"));
}

TEST(ScaledDown, KeepsKindsAndProportions) {
  const Cluster whole = load_cluster("hap-64");
  const Cluster small = scaled_down(whole, 4);
  ASSERT_EQ(small.size(), 4);
  EXPECT_EQ(small.types.size(), whole.types.size());
  double cores = 0;
  for (int d = 0; d < small.size(); ++d) cores += small.type_of(d).speed;
  EXPECT_NEAR(cores, 1.1, 1e-9);
  // Speeds keep their proportion.
  EXPECT_NEAR(small.types[0].flops / small.types[1].flops,
              whole.types[0].flops / whole.types[1].flops, 1e-9);
  // One device is left of the eight that shared a machine's port: an eighth of the port, slowed
  // down as the device is.
  const double slower = whole.types[0].flops / small.types[0].flops;
  EXPECT_NEAR(small.groups[0].link.bandwidth / (whole.groups[0].link.bandwidth / 8 / slower), 1,
              1e-9);
}

}  // namespace
}  // namespace motley
