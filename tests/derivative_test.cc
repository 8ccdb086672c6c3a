#include "runtime/derivative.h"

#include <gtest/gtest.h>

#include "capture/capture.h"
#include "graph/canonical.h"
#include "readers/huggingface.h"

namespace motley {
namespace {

Graph graph_of(const std::string& model, int64_t batch) {
  return canonicalize(capture(model, batch).graph);
}

bool refused(const Graph& graph) { return !check_derivative(graph).problems.empty(); }

const std::vector<std::pair<const char*, int64_t>>& models() {
  static const std::vector<std::pair<const char*, int64_t>> list = {
      {"mlp:layers=3,hidden=16,in=12,classes=8", 6},
      {"gpt:layers=1,hidden=16,heads=2,seq=6,vocab=11", 3},
      {"convnet:width=4,image=8,classes=5", 4}};
  return list;
}

TEST(Derivative, CapturedStepsAreTheDerivativeOfTheirLoss) {
  for (const auto& [model, batch] : models()) {
    const Derivative derivative = check_derivative(graph_of(model, batch));
    EXPECT_TRUE(derivative.problems.empty()) << model << ": " << derivative.problems.at(0);
    EXPECT_EQ(derivative.unchecked, "") << model;
  }
}

// Steps of Hugging Face models are written down by hand (readers/tape.h).
TEST(Derivative, StepsOfHuggingFaceModelsAreTheDerivativeOfTheirLoss) {
  const std::string path = MOTLEY_SOURCE_DIR "/tests/data/huggingface_parameters.json";
  const Json rows = parse_json(read_file(path), path)["rows"];
  int checked = 0;
  for (const Json& row : rows) {
    if (row["parameters"].get<int64_t>() > 1000000) continue;
    const bool image = row["config"]["model_type"] == "vit";
    const readers::HuggingFaceModel model(row["config"], "config.json", image ? 0 : 6, 0);
    const Derivative derivative = check_derivative(model.at(2));
    const std::string config = row["config"].dump();
    EXPECT_TRUE(derivative.problems.empty()) << config << ": " << derivative.problems.at(0);
    EXPECT_EQ(derivative.unchecked, "") << config;
    ++checked;
  }
  EXPECT_GT(checked, 80);
}

TEST(Derivative, RolesThatWereMovedAreFound) {
  for (const auto& [model, batch] : models()) {
    const Graph graph = graph_of(model, batch);
    int tried = 0;
    for (size_t i = 0; i < graph.parameters.size(); ++i) {
      Graph changed = graph;
      changed.parameters[i].gradient = ValueId();
      EXPECT_TRUE(refused(changed)) << model << " without the gradient of " << i;
      remove_dead(&changed);
      EXPECT_TRUE(refused(changed)) << model << " without the gradient of " << i << ", cleaned";
      for (size_t v = 0; v < graph.values.size(); ++v) {
        const ValueId other(v);
        changed = graph;
        if (other == graph.parameters[i].gradient ||
            graph.spec(other) != graph.spec(graph.parameters[i].value))
          continue;
        changed.parameters[i].gradient = other;
        remove_dead(&changed);
        ++tried;
        // Unless it is the same by other means: a view, or a conversion.
        if (!refused(changed)) {
          const Graph exact = in_type(graph, DType::f64);
          at::Tensor mine, theirs;
          InterpretOptions options;
          options.observe = [&](ValueId id, const at::Tensor& t) {
            if (id == other) theirs = t.clone();
            if (id == graph.parameters[i].gradient) mine = t.clone();
          };
          interpret(exact, drawn(exact, 0), options);
          EXPECT_TRUE(mine.allclose(theirs, 1e-9, 1e-12))
              << model << ": the gradient of " << graph.parameters[i].name << " was %" << v;
        }
      }
    }
    EXPECT_GT(tried, 5) << model;
    for (size_t v = 0; v < graph.values.size(); ++v) {
      if (graph.spec(ValueId(v)) != graph.spec(graph.loss) || ValueId(v) == graph.loss) continue;
      Graph changed = graph;
      changed.loss = ValueId(v);
      EXPECT_TRUE(refused(changed)) << model << ", the loss moved to %" << v;
    }
  }
}

TEST(Derivative, FrozenParametersAreSaidToBe) {
  Graph graph = graph_of(models()[0].first, 6);
  graph.parameters[0].gradient = ValueId();
  graph.parameters[0].frozen = true;
  remove_dead(&graph);
  EXPECT_FALSE(refused(graph));
  const Graph again = parse_graph(to_text(graph), "again");
  EXPECT_TRUE(again.parameters[0].frozen);
  EXPECT_EQ(to_text(again), to_text(graph));
}

}  // namespace
}  // namespace motley
