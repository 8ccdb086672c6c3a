#include "pipeline/layers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "core/error.h"
#include "core/file.h"
#include "core/rng.h"
#include "graph/op.h"
#include "graph/precision.h"
#include "graph/stage.h"
#include "pipeline/runs.h"

namespace motley::pipeline {
namespace {

// Every (start, period), extended as far as it goes; kept if no smaller period explains it.
std::vector<Repetition> obvious_runs(const std::vector<int>& s) {
  int n = static_cast<int>(s.size());
  std::set<Repetition> runs;
  std::set<std::pair<int, int>> seen;
  for (int period = 1; 2 * period <= n; ++period)
    for (int first = 0; first + 2 * period <= n; ++first) {
      int end = first + period;
      while (end < n && s[end] == s[end - period]) ++end;
      if (end - first < 2 * period) continue;
      if (first > 0 && s[first - 1] == s[first - 1 + period]) continue;  // not maximal
      if (seen.insert({first, end}).second) runs.insert({first, end, period});
    }
  return {runs.begin(), runs.end()};
}

TEST(Runs, EqualTheObviousTwin) {
  Rng rng(1);
  size_t found = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<int> s(rng.between(0, 24));
    int alphabet = static_cast<int>(rng.between(1, 4));
    for (int& x : s) x = static_cast<int>(rng.below(alphabet));
    if (rng.chance(0.3) && s.size() > 4) {  // a planted tandem repeat
      size_t period = static_cast<size_t>(rng.between(2, static_cast<int64_t>(s.size() / 2)));
      for (size_t i = period; i < s.size(); ++i) s[i] = s[i - period];
    }
    std::vector<Repetition> runs = find_runs(s);
    ASSERT_EQ(runs, obvious_runs(s)) << ::testing::PrintToString(s);
    found += runs.size();
  }
  EXPECT_GT(found, 50000u);
}

TEST(Runs, LongRepeatsAreFast) {
  std::vector<int> s;
  for (int block = 0; block < 2000; ++block)
    for (int i = 0; i < 37; ++i) s.push_back(i * 7 % 11);
  std::vector<Repetition> runs = find_runs(s);
  EXPECT_THAT(runs, ::testing::Contains(Repetition{0, 74000, 37}));
}

Graph load(const char* name) {
  std::string path = std::string(MOTLEY_SOURCE_DIR) + "/tests/data/hapt/" + name;
  return parse_graph(read_file(path), path);
}

// Every node in one layer, forward and backward; forward values flow down the layers, gradients up.
void check(const Graph& graph, const Layers& layers) {
  std::map<int, int> home;
  for (size_t l = 0; l < layers.layers.size(); ++l) {
    EXPECT_FALSE(layers.layers[l].forward.empty());
    for (const auto* nodes : {&layers.layers[l].forward, &layers.layers[l].backward})
      for (NodeId id : *nodes) EXPECT_TRUE(home.insert({id.index, static_cast<int>(l)}).second);
  }
  Bytes parameters = 0;
  for (const Layer& layer : layers.layers) parameters += layer.parameters;
  EXPECT_EQ(parameters, static_cast<Bytes>(graph.parameter_bytes()));
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (is_source(node)) continue;
    ASSERT_TRUE(home.count(static_cast<int>(i)));
    for (ValueId v : graph.inputs_of(node)) {
      NodeId producer = graph.value(v).producer;
      if (is_source(graph.node(producer))) continue;
      int from = home[producer.index], to = home[static_cast<int>(i)];
      if (node.phase == Phase::forward) {
        EXPECT_LE(from, to);
      }
      bool gradient = graph.node(producer).phase == Phase::backward;
      if (node.phase == Phase::backward && gradient) {
        EXPECT_GE(from, to);
      }
    }
  }
}

TEST(Layers, FindsTransformerBlocks) {
  Graph graph = load("gpt.graph");
  for (int wanted : {0, 3, 6, 12, 20, 30, 60}) {
    Layers layers = find_layers(graph, {wanted});
    check(graph, layers);
    auto repeated = std::find_if(layers.modules.begin(), layers.modules.end(),
                                 [](const Module& m) { return m.repeats > 1; });
    ASSERT_NE(repeated, layers.modules.end());
    EXPECT_GE(repeated->repeats, 5) << to_text(layers);
    EXPECT_LE(repeated->repeats, 6);
    // The same layers in every repeat: equal classes at least inside the stretch of repeats.
    std::vector<int> classes;
    for (const Layer& layer : layers.layers)
      if (layer.module == repeated - layers.modules.begin()) classes.push_back(layer.layer_class);
    size_t period = classes.size() / repeated->repeats;
    ASSERT_EQ(classes.size(), period * repeated->repeats);
    for (size_t i = period; i + 2 * period < classes.size(); ++i)
      EXPECT_EQ(classes[i], classes[i + period]) << to_text(layers);
  }
}

TEST(Layers, ManyRepeatsArePutTogether) {
  Graph graph;
  const TensorSpec square{DType::f32, {16, 16}};
  ValueId x = graph.add_input("x", square);
  for (int block = 0; block < 400; ++block) {
    for (const char* half : {"up", "down"}) {
      const ValueId w = graph.add_parameter(fmt::format("block{}.{}", block, half), square);
      x = graph.node(graph.add("aten::mm", {x, w}, {square})).outputs[0];
    }
    x = graph.node(graph.add("aten::relu", {x}, {square})).outputs[0];
  }
  for (const auto& [wanted, count] : {std::pair(0, 100), {48, 100}, {400, 400}}) {
    const Layers layers = find_layers(graph, {.layers = wanted});
    check(graph, layers);
    EXPECT_EQ(static_cast<int>(layers.layers.size()), count);
    for (size_t l = 1; l + 1 < layers.layers.size(); ++l)
      EXPECT_EQ(layers.layers[l].layer_class, layers.layers[1].layer_class) << l;
  }
}

TEST(Layers, AtMostSoMany) {
  const Graph graph = load("gpt.graph");
  const Layers finest = find_layers(graph, {});
  const auto all = static_cast<int>(finest.layers.size());
  for (int most : {1, 8, 20, all - 1, all, all + 1, 1000}) {
    const Layers layers = find_layers(graph, {.most = most});
    EXPECT_EQ(layers.coarser, most < all);
    EXPECT_EQ(to_text(layers), to_text(most < all ? find_layers(graph, {.layers = most}) : finest));
  }
}

// All that reads a parameter or a view of it, forward or backward, is in one layer, so that stages
// share no parameters but those that the model uses in several places.
TEST(Layers, ParametersAreInOnePlace) {
  Graph graph = load("gpt.graph");
  for (int wanted : {0, 6, 12, 20, 30}) {
    Layers layers = find_layers(graph, {wanted});
    std::map<int, int> home;
    for (size_t l = 0; l < layers.layers.size(); ++l)
      for (const auto* nodes : {&layers.layers[l].forward, &layers.layers[l].backward})
        for (NodeId id : *nodes) home[id.index] = static_cast<int>(l);
    std::vector<int> root(graph.values.size());
    std::map<int, std::set<int>> forward, all;  // by parameter
    for (size_t v = 0; v < root.size(); ++v) root[v] = static_cast<int>(v);
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      const Node& node = graph.nodes[i];
      if (is_source(node)) continue;
      const OpDef* op = find_op(node.op);
      const auto inputs = graph.inputs_of(node);
      if (op && op->alias && node.outputs[0].valid()) {
        root[node.outputs[0].index] = root[inputs[0].index];
        continue;
      }
      for (ValueId v : inputs) {
        if (node.phase == Phase::forward) forward[root[v.index]].insert(home[static_cast<int>(i)]);
        all[root[v.index]].insert(home[static_cast<int>(i)]);
      }
    }
    int checked = 0;
    for (const Parameter& p : graph.parameters) {
      if (forward[p.value.index].size() != 1) continue;
      EXPECT_EQ(all[p.value.index].size(), 1U) << p.name << " at " << wanted << " layers";
      ++checked;
    }
    EXPECT_GT(checked, 20);
  }
}

TEST(Layers, ResidualNetwork) {
  Graph graph = load("resnet50.graph");
  for (int wanted : {0, 8, 16, 50}) {
    Layers layers = find_layers(graph, {wanted});
    check(graph, layers);
    EXPECT_GE(layers.layers.size(), static_cast<size_t>(wanted / 2));
    EXPECT_GT(std::count_if(layers.modules.begin(), layers.modules.end(),
                            [](const Module& m) { return m.repeats > 1; }),
              2)
        << to_text(layers);
  }
}

// A matrix product has two of its size behind it, one for each gradient: with forward and backward
// together, every layer of a block does twice its forward work again (the first needs no gradient
// of tokens, and elementwise work differs a little).
TEST(Layers, BackwardFollowsForward) {
  Graph graph = load("gpt.graph");
  for (int wanted : {6, 12, 20}) {
    Layers layers = find_layers(graph, {wanted});
    for (const Layer& layer : layers.layers)
      if (layer.forward_flops > 1e5) {
        EXPECT_GT(layer.backward_flops, 1.6 * layer.forward_flops) << to_text(layers);
        EXPECT_LT(layer.backward_flops, 2.5 * layer.forward_flops) << to_text(layers);
      }
  }
}

// What goes over each cut is what two stages cut there hand to each other.
TEST(Layers, CutsCarryWhatStagesHandOn) {
  for (const char* name : {"gpt.graph", "resnet50.graph"}) {
    const Graph graph = load(name);
    for (int wanted : {0, 6, 12, 30}) {
      const Layers layers = find_layers(graph, {wanted});
      for (size_t cut = 1; cut < layers.layers.size(); ++cut) {
        std::vector<int> stage(graph.nodes.size(), 0);
        for (size_t l = cut; l < layers.layers.size(); ++l)
          for (const auto* nodes : {&layers.layers[l].forward, &layers.layers[l].backward})
            for (NodeId id : *nodes) stage[id.index] = 1;
        Bytes forward = 0, backward = 0;
        for (const Transfer& t : cut_stages(graph, stage, 2, "test").transfers) {
          const auto bytes = static_cast<Bytes>(graph.spec(t.value).bytes());
          EXPECT_EQ(t.from, t.backward ? 1 : 0);
          (t.backward ? backward : forward) += bytes;
        }
        EXPECT_EQ(layers.layers[cut].gradients, backward) << name << " " << wanted << " " << cut;
        // Masks that the backward pass alone reads come on top.
        EXPECT_LE(layers.layers[cut].boundary, forward) << name << " " << wanted << " " << cut;
        EXPECT_GE(1.1 * layers.layers[cut].boundary, forward) << name << " " << cut;
      }
    }
  }
}

// No layer is there for views alone.
TEST(Layers, AllDoSomeWork) {
  for (const char* name : {"gpt.graph", "resnet50.graph"}) {
    const Graph graph = load(name);
    for (int wanted : {0, 6, 20}) {
      const Layers layers = find_layers(graph, {wanted});
      for (const Layer& layer : layers.layers) EXPECT_GT(layer.forward_flops, 0) << to_text(layers);
    }
  }
}

TEST(Layers, BoundariesAreOneActivation) {
  Graph graph = load("gpt.graph");
  Layers layers = find_layers(graph, {6});
  // Between blocks a transformer carries one activation: 4 x 16 x 32 floats, and the targets and
  // masks are sources, which are not carried.
  for (size_t l = 1; l < layers.layers.size(); ++l)
    EXPECT_LE(layers.layers[l].boundary, 2 * 4 * 16 * 32 * 4.0) << to_text(layers);
}

// The embedding that the first and the last layer read, converted, is in front of no other layer.
TEST(Layers, ConvertedParametersAreNotCarried) {
  const Graph graph = with_precision(load("gpt.graph"), DType::bf16);
  const Layers layers = find_layers(graph, {6});
  check(graph, layers);
  for (size_t l = 1; l < layers.layers.size(); ++l)
    EXPECT_LE(layers.layers[l].boundary, 2 * 4 * 16 * 32 * 2.0) << to_text(layers);
}

TEST(Layers, RefusesAnEmptyGraph) { EXPECT_THROW(find_layers(Graph(), {}), UserError); }

}  // namespace
}  // namespace motley::pipeline
