#include "graph/stage.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "core/error.h"
#include "graph/op.h"
#include "graph/owner.h"

namespace motley {

namespace {

class Cutter {
 public:
  Cutter(const Graph& graph, const std::vector<int>& stage_of, int stages, const std::string& where)
      : graph_(graph), stage_of_(stage_of), count_(stages), where_(where) {
    MOTLEY_CHECK(stage_of.size() == graph.nodes.size() && stages >= 1);
    consumers_ = graph.consumers();
    own_ = made_by_readers(graph);
    find_terms();
  }

  Stages run() {
    need_.assign(count_, std::vector<bool>(graph_.nodes.size()));
    reads_.resize(count_);
    for (int s = 0; s < count_; ++s) gather(s);
    result_.graphs.resize(count_);
    result_.parameter_of.resize(count_);
    result_.buffer_of.resize(count_);
    local_.assign(count_, std::vector<ValueId>(graph_.values.size()));
    for (int s = 0; s < count_; ++s) build(s);
    connect();
    return std::move(result_);
  }

 private:
  UserError fail(const std::string& why) const { return user_error("plan", "{}: {}", where_, why); }

  // The terms of every gradient: sums of terms of different stages are taken apart.
  void find_terms() {
    terms_.resize(graph_.parameters.size());
    separate_.assign(graph_.nodes.size(), false);
    for (size_t p = 0; p < graph_.parameters.size(); ++p) {
      const ValueId gradient = graph_.parameters[p].gradient;
      if (!gradient.valid()) continue;
      std::vector<ValueId> open = {gradient};
      while (!open.empty()) {
        const ValueId v = open.back();
        open.pop_back();
        const NodeId id = graph_.value(v).producer;
        const Node& node = graph_.node(id);
        const ValueList in = graph_.inputs_of(node);
        bool sum = node.op == "aten::add.Tensor" && in.size() == 2 && plain_alpha(node) &&
                   graph_.spec(in[0]) == graph_.spec(v) && graph_.spec(in[1]) == graph_.spec(v) &&
                   consumers_[v.index].size() == (v == gradient ? 0u : 1u);
        // A term further up may be of another stage though this sum's operands are not.
        if (sum && mixes(v)) {
          separate_[id.index] = true;
          open.push_back(in[1]);
          open.push_back(in[0]);
        } else {
          terms_[p].push_back(v);
        }
      }
    }
  }
  static bool plain_alpha(const Node& node) {
    if (node.args.size() < 3) return true;
    if (auto i = std::get_if<int64_t>(&node.args[2])) return *i == 1;
    if (auto r = std::get_if<double>(&node.args[2])) return *r == 1;
    return false;
  }
  // Whether a tree of sums has leaves of several stages.
  bool mixes(ValueId v) const {
    std::set<int> stages;
    std::vector<ValueId> open = {v};
    while (!open.empty()) {
      const ValueId x = open.back();
      open.pop_back();
      const NodeId id = graph_.value(x).producer;
      const Node& node = graph_.node(id);
      const ValueList in = graph_.inputs_of(node);
      if (node.op == "aten::add.Tensor" && in.size() == 2 && node.phase == Phase::backward &&
          (x == v || consumers_[x.index].size() == 1)) {
        open.push_back(in[0]);
        open.push_back(in[1]);
      } else {
        stages.insert(stage_of_[id.index]);
      }
    }
    return stages.size() > 1;
  }

  // The nodes of a stage, those it makes for itself included, and what it reads of others.
  void gather(int s) {
    std::vector<NodeId> stack;
    auto want = [&](NodeId id) {
      if (need_[s][id.index]) return;
      need_[s][id.index] = true;
      stack.push_back(id);
    };
    bool any = false;
    for (size_t n = 0; n < graph_.nodes.size(); ++n)
      if (!own_[n] && !separate_[n] && stage_of_[n] == s) {
        any = true;
        want(NodeId(n));
      }
    // A gradient is summed where the parameter is held.
    for (size_t p = 0; p < terms_.size(); ++p)
      for (ValueId term : terms_[p])
        if (stage_of_[graph_.value(term).producer.index] == s)
          want(graph_.value(graph_.parameters[p].value).producer);
    if (!any) throw fail(fmt::format("stage {} has no nodes; give it some", s));
    while (!stack.empty()) {
      const NodeId id = stack.back();
      stack.pop_back();
      for (ValueId v : graph_.inputs_of(graph_.node(id))) {
        const NodeId producer = graph_.value(v).producer;
        if (own_[producer.index]) {
          want(producer);
        } else if (const int other = stage_of_[producer.index]; other != s) {
          if (!separate_[producer.index] && can_view(producer, s)) {
            want(producer);  // what it views comes in
            continue;
          }
          const bool backward = graph_.node(producer).phase == Phase::backward;
          const bool read_backward = graph_.node(id).phase == Phase::backward;
          if (separate_[producer.index])
            throw fail(fmt::format("node {} reads the gradient of a tied parameter", id.index));
          if (!read_backward && (backward || other > s))
            throw fail(fmt::format(
                "node {} of stage {}'s forward pass reads node {} of stage {}, which runs later; "
                "move the boundary",
                id.index, s, producer.index, other));
          if (backward && other < s)
            throw fail(
                fmt::format("node {} of stage {}'s backward pass reads node {} of stage {}, which "
                            "runs later; move the boundary",
                            id.index, s, producer.index, other));
          reads_[s].insert(v);
        }
      }
    }
  }

  // Moves no data and is no smaller than what it views.
  bool is_view(NodeId id) const {
    const Node& node = graph_.node(id);
    const OpDef* op = find_op(node.op);
    if (!op || !op->alias || node.outputs.size() != 1 || !node.outputs[0].valid()) return false;
    return graph_.spec(node.outputs[0]).numel() >= graph_.spec(graph_.inputs_of(node)[0]).numel();
  }

  // Whether a stage can make a view of another stage's for itself: what is viewed is there in time.
  bool can_view(NodeId id, int s) const {
    if (!is_view(id)) return false;
    for (NodeId at = id; is_view(at);) {
      const NodeId next = graph_.value(graph_.inputs_of(graph_.node(at))[0]).producer;
      if (own_[next.index]) return true;
      if (graph_.node(at).phase == Phase::forward && stage_of_[next.index] > s) return false;
      at = next;
    }
    return true;
  }

  void build(int s) {
    StageGraph& stage = result_.graphs[s];
    Graph& g = stage.graph;
    std::vector<ValueId>& local = local_[s];
    g.model = graph_.model;
    auto note = [&](NodeId id, NodeId whole) {
      stage.node_of.push_back(whole);
      const Node& made = g.node(id);
      for (size_t o = 0; o < made.outputs.size(); ++o) {
        if (!made.outputs[o].valid()) continue;
        ValueId v = whole.valid() ? graph_.node(whole).outputs[o] : ValueId();
        stage.value_of.push_back(v);
        if (v.valid()) local[v.index] = made.outputs[o];
      }
    };
    auto copy = [&](NodeId id) {
      const Node& node = graph_.node(id);
      std::vector<Arg> args = node.args;
      auto rename = [&](ValueId* v) {
        if (v->valid()) *v = local[v->index];
      };
      for (Arg& arg : args) {
        if (auto v = std::get_if<ValueId>(&arg)) rename(v);
        if (auto list = std::get_if<std::vector<ValueId>>(&arg))
          for (ValueId& v : *list) rename(&v);
      }
      std::vector<TensorSpec> specs;
      for (ValueId v : node.outputs)
        specs.push_back(v.valid() ? graph_.spec(v) : TensorSpec{DType::f32, {-1}});
      note(g.add(node.op, std::move(args), specs, is_source(node) ? Phase::forward : node.phase),
           id);
    };
    // Only values of earlier stages are there in the forward pass; a later stage's forward value,
    // which only backward nodes can read, comes in with the gradients.
    auto receive = [&](bool backward) {
      for (ValueId v : reads_[s]) {
        if (comes_backward(v, s) != backward) continue;
        const std::string name = fmt::format("%{}", v.index);
        NodeId id = g.add("motley::input", {name}, {graph_.spec(v)},
                          backward ? Phase::backward : Phase::forward);
        local[v.index] = g.node(id).outputs[0];
        g.inputs.push_back({name, local[v.index]});
        stage.node_of.push_back(NodeId());
        stage.value_of.push_back(v);
      }
    };
    for (size_t n = 0; n < graph_.nodes.size(); ++n)
      if (need_[s][n] && is_source(graph_.nodes[n])) copy(NodeId(n));
    receive(false);
    for (size_t n = 0; n < graph_.nodes.size(); ++n)
      if (need_[s][n] && !is_source(graph_.nodes[n]) && graph_.nodes[n].phase == Phase::forward)
        copy(NodeId(n));
    receive(true);
    for (size_t n = 0; n < graph_.nodes.size(); ++n)
      if (need_[s][n] && !is_source(graph_.nodes[n]) && graph_.nodes[n].phase == Phase::backward)
        copy(NodeId(n));

    for (size_t p = 0; p < graph_.parameters.size(); ++p) {
      const Parameter& parameter = graph_.parameters[p];
      ValueId gradient;
      for (ValueId term : terms_[p]) {
        const NodeId producer = graph_.value(term).producer;
        if (stage_of_[producer.index] != s) continue;
        const ValueId mine = local[term.index];
        if (!gradient.valid()) {
          gradient = mine;
          continue;
        }
        NodeId id = g.add("aten::add.Tensor", {gradient, mine, int64_t{1}}, {graph_.spec(term)},
                          Phase::backward);
        note(id, NodeId());
        gradient = g.node(id).outputs[0];
      }
      if (!local[parameter.value.index].valid()) continue;
      g.parameters.push_back({parameter.name, local[parameter.value.index], gradient});
      result_.parameter_of[s].push_back(static_cast<int>(p));
    }
    for (size_t b = 0; b < graph_.buffers.size(); ++b) {
      const Buffer& buffer = graph_.buffers[b];
      const ValueId mine = local[buffer.value.index];
      const bool updates =
          buffer.update.valid() && stage_of_[graph_.value(buffer.update).producer.index] == s;
      if (!mine.valid()) {
        if (updates)
          throw fail(fmt::format("stage {} updates {}, which it does not read", s, buffer.name));
        continue;
      }
      if (!updates && buffer.update.valid())
        throw fail(fmt::format("stage {} reads {}, which another stage updates", s, buffer.name));
      g.buffers.push_back({buffer.name, mine, updates ? local[buffer.update.index] : ValueId()});
      result_.buffer_of[s].push_back(static_cast<int>(b));
    }
    for (const Input& i : graph_.inputs)
      if (local[i.value.index].valid()) g.inputs.push_back({i.name, local[i.value.index]});
    if (graph_.loss.valid() && stage_of_[graph_.value(graph_.loss).producer.index] == s)
      g.loss = local[graph_.loss.index];
  }

  bool comes_backward(ValueId v, int to) const {
    const NodeId producer = graph_.value(v).producer;
    return graph_.node(producer).phase == Phase::backward || stage_of_[producer.index] > to;
  }

  void connect() {
    std::vector<std::set<ValueId>> outputs(count_);
    for (int s = 0; s < count_; ++s)
      for (ValueId v : reads_[s]) {
        const NodeId producer = graph_.value(v).producer;
        const int from = stage_of_[producer.index];
        result_.transfers.push_back(
            {from, s, comes_backward(v, s), v, local_[from][v.index], local_[s][v.index]});
        outputs[from].insert(local_[from][v.index]);
      }
    std::sort(result_.transfers.begin(), result_.transfers.end(),
              [](const Transfer& a, const Transfer& b) {
                return std::tuple(a.backward, a.from, a.to, a.value) <
                       std::tuple(b.backward, b.from, b.to, b.value);
              });
    for (int s = 0; s < count_; ++s)
      result_.graphs[s].graph.outputs.assign(outputs[s].begin(), outputs[s].end());
    std::map<int, std::vector<int>> holders;
    for (int s = 0; s < count_; ++s)
      for (int p : result_.parameter_of[s]) holders[p].push_back(s);
    for (auto& [p, stages] : holders)
      if (stages.size() > 1) result_.tied.push_back({p, stages});
  }

  const Graph& graph_;
  const std::vector<int>& stage_of_;
  const int count_;
  const std::string& where_;
  std::vector<std::vector<NodeId>> consumers_;
  std::vector<bool> own_, separate_;         // [node]
  std::vector<std::vector<ValueId>> terms_;  // [parameter]
  std::vector<std::vector<bool>> need_;      // [stage][node]
  std::vector<std::set<ValueId>> reads_;     // [stage]
  std::vector<std::vector<ValueId>> local_;  // [stage][value]
  Stages result_;
};

}  // namespace

Stages cut_stages(const Graph& graph, const std::vector<int>& stage_of, int stages,
                  const std::string& where) {
  return Cutter(graph, stage_of, stages, where).run();
}

}  // namespace motley
