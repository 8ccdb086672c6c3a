#include "readers/huggingface.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "shard/theory.h"

namespace motley::readers {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

Json table() {
  const std::string path =
      std::string(MOTLEY_SOURCE_DIR) + "/tests/data/huggingface_parameters.json";
  return parse_json(read_file(path), path);
}

int64_t parameters_of(const Graph& graph) {
  int64_t n = 0;
  for (const Parameter& p : graph.parameters) n += graph.spec(p.value).numel();
  return n;
}

// Short sequences; images have as many patches as they have.
int64_t seq_of(const Json& row) { return row["config"]["model_type"] == "vit" ? 0 : 8; }

// Of every family the default sizes, and small ones with features on and off, as transformers
// counts them.
TEST(HuggingFace, HasAsManyParametersAsTransformers) {
  std::set<std::string> seen;
  const Json rows = table()["rows"];
  for (const Json& row : rows) {
    const std::string type = row["config"]["model_type"];
    SCOPED_TRACE(row["config"].dump());
    seen.insert(type);
    const HuggingFaceModel model(row["config"], "config.json", seq_of(row), 0);
    EXPECT_EQ(parameters_of(model.at(2)), row["parameters"].get<int64_t>()) << type;
  }
  EXPECT_EQ(seen.size(), huggingface_families().size());
}

TEST(HuggingFace, StepsAreSoundAndEveryOperatorIsKnown) {
  const Json rows = table()["rows"];
  for (const Json& row : rows) {
    if (row["parameters"].get<int64_t>() > 1000000) continue;
    SCOPED_TRACE(row["config"].dump());
    const Graph graph = HuggingFaceModel(row["config"], "config.json", seq_of(row), 0).at(4);
    EXPECT_THAT(verify(graph), IsEmpty());
    EXPECT_THAT(Theory(graph).unknown_ops(), IsEmpty());
    for (const Parameter& p : graph.parameters) {
      if (p.name == "lm_head.spare_bias") continue;  // which nothing reads
      // Rows of positions that are not reached have zeros, and are there.
      ASSERT_TRUE(p.gradient.valid()) << p.name;
      EXPECT_EQ(graph.spec(p.gradient), graph.spec(p.value)) << p.name;
    }
    EXPECT_EQ(to_text(parse_graph(to_text(graph), "g")), to_text(graph));
  }
}

std::string refusal(const char* json, int64_t seq = 0) {
  try {
    HuggingFaceModel(parse_json(json, "config.json"), "config.json", seq, 0).at(1);
  } catch (const UserError& e) {
    return e.what();
  }
  return "";
}

TEST(HuggingFace, RefusesWhatItCannotBuildInOneLine) {
  EXPECT_THAT(refusal(R"({"model_type": "mamba"})"),
              HasSubstr("config.json: model_type is \"mamba\""));
  EXPECT_THAT(refusal(R"({"model_type": "llama"})"), HasSubstr("hidden_size is missing"));
  const char* llama = R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": %s, "vocab_size": 100, "intermediate_size": 96})";
  const auto with = [&](const char* heads) {
    return refusal(std::string(llama).replace(std::string(llama).find("%s"), 2, heads).c_str());
  };
  EXPECT_EQ(with("4"), "");
  EXPECT_THAT(with("-4"), HasSubstr("num_attention_heads is -4; give a whole number"));
  EXPECT_THAT(with("5"), HasSubstr("hidden_size is 64; give a multiple of 5 heads"));
  EXPECT_THAT(with("\"4\""), HasSubstr("num_attention_heads is \"4\""));
  EXPECT_THAT(with("1e30"), HasSubstr("num_attention_heads is 1e+30"));
}

}  // namespace
}  // namespace motley::readers
