#include "spmd/recompute.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"
#include "graph/owner.h"
#include "graph/segment.h"

namespace motley::spmd {

namespace {

// "block3" of "block3.up.weight", "layers.3" of "layers.3.up.weight": up to the first part that
// ends in a digit; empty: no part before the last does.
std::string layer_of(const std::string& parameter) {
  size_t start = 0;
  for (size_t dot; (dot = parameter.find('.', start)) != std::string::npos; start = dot + 1)
    if (dot > start && std::isdigit(static_cast<unsigned char>(parameter[dot - 1])))
      return parameter.substr(0, dot);
  return {};
}

// Times an all-reduce, what scattering and gathering may take in its place.
constexpr double kAsLong = 1.02;
// Times the room that there is, what a block saves that cannot be given back.
constexpr double kSurely = 2;

using Made = std::pair<ValueId, Placement>;

void made_by(const Theory& theory, const Step& step, std::vector<Made>* out) {
  out->clear();
  if (!step.is_compute()) {
    out->push_back({step.value, step.to});
    return;
  }
  const auto& outputs = theory.graph().node(step.node).outputs;
  const Triple& triple = theory.triples(step.node)[step.triple];
  for (size_t o = 0; o < outputs.size(); ++o)
    if (outputs[o].valid()) out->push_back({outputs[o], triple.out[o]});
}

void read_by(const Theory& theory, const Step& step, std::vector<Made>* out) {
  out->clear();
  if (!step.is_compute()) {
    out->push_back({step.value, step.from});
    return;
  }
  const Triple& triple = theory.triples(step.node)[step.triple];
  size_t i = 0;
  for (ValueId v : theory.graph().inputs_of(theory.graph().node(step.node)))
    out->push_back({v, triple.in[i++]});
}

// [node] Bytes that the forward pass hands from the nodes in front of it to it and those behind.
std::vector<double> passed_on(const Graph& graph, const std::vector<bool>& own) {
  std::vector<int> last(graph.values.size(), -1);  // of the forward pass that reads it
  for (size_t n = 0; n < graph.nodes.size(); ++n)
    if (graph.nodes[n].phase != Phase::backward && !own[n])
      for (ValueId v : graph.inputs_of(graph.nodes[n])) last[v.index] = static_cast<int>(n);
  std::vector<double> bytes(graph.nodes.size() + 1);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (graph.nodes[n].phase == Phase::backward || own[n]) continue;
    for (ValueId v : graph.nodes[n].outputs)
      if (v.valid() && last[v.index] >= 0) {
        bytes[n + 1] += static_cast<double>(graph.spec(v).bytes());
        bytes[last[v.index] + 1] -= static_cast<double>(graph.spec(v).bytes());
      }
  }
  std::partial_sum(bytes.begin(), bytes.end(), bytes.begin());
  return bytes;
}

// What lies between the last parameter of a block and the first of the next is of either: the next
// one begins where the least is passed on, such as in front of a normalisation whose factors are
// read when all else is done.
void begin_where_least_passes(const Graph& graph, const std::vector<int>& owner,
                              std::vector<int>* block) {
  const std::vector<bool> own = made_by_readers(graph);
  const std::vector<double> bytes = passed_on(graph, own);
  std::vector<size_t> between;  // since a parameter was read
  int now = -1, most = -1;      // blocks
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (graph.nodes[n].phase == Phase::backward || own[n]) continue;
    const int b = (*block)[n];
    if (now >= 0 && b > most && !between.empty()) {
      size_t best = n;
      for (size_t i = between.size(); i-- > 0;)
        if (bytes[between[i]] < bytes[best]) best = between[i];
      for (const size_t m : between)
        if (m >= best) (*block)[m] = b;
    }
    const ValueList inputs = graph.inputs_of(graph.nodes[n]);
    const bool reads = std::any_of(inputs.begin(), inputs.end(), [&](ValueId v) {
      const size_t producer = graph.value(v).producer.index;
      return own[producer] && owner[producer] >= 0;
    });
    if (reads || b != now) between.clear();
    if (!reads) between.push_back(n);
    now = b;
    most = std::max(most, b);
  }
}

}  // namespace

std::vector<int> blocks_of(const Graph& graph) {
  const std::vector<int> owner = owners(graph);
  std::vector<int> block(graph.nodes.size(), -1);
  std::map<std::string, int> numbers;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (owner[n] < 0) continue;
    const std::string layer = layer_of(graph.parameters[owner[n]].name);
    if (layer.empty()) continue;
    block[n] = numbers.try_emplace(layer, static_cast<int>(numbers.size())).first->second;
  }
  begin_where_least_passes(graph, owner, &block);
  return block;
}

Recomputation::Recomputation(const Theory& theory, const Program& program,
                             const std::vector<int>& block_of)
    : graph_(theory.graph()), program_(program), backward_(phases_of(theory, program).backward) {
  const Graph& graph = theory.graph();
  const int steps = static_cast<int>(program.steps.size());
  for (int b : block_of) later_.resize(std::max(later_.size(), static_cast<size_t>(b + 1)));
  block_.assign(steps, -1);
  for (int s = 0; s < backward_; ++s) {
    const Step& step = program.steps[s];
    block_[s] = block_of[(step.is_compute() ? step.node : graph.value(step.value).producer).index];
  }
  // Who made what in the forward pass, and which of it stays: what the rest of the forward pass
  // reads of a block, outputs of the graph, and what is needed at the end of the step.
  std::vector<bool> needed(graph.values.size());
  for (ValueId v : graph.outputs) needed[v.index] = true;
  for (const Buffer& b : graph.buffers)
    if (b.update.valid()) needed[b.update.index] = true;
  if (graph.loss.valid()) needed[graph.loss.index] = true;
  struct Known {
    Placement placement;
    int maker;
    bool stays;
  };
  std::vector<std::vector<Known>> known(graph.values.size());  // [value]
  const auto find = [&](const Made& m) -> Known* {
    for (Known& k : known[m.first.index])
      if (k.placement == m.second) return &k;
    return nullptr;
  };
  std::vector<Made> list;
  for (int s = 0; s < backward_; ++s) {
    const Step& step = program.steps[s];
    read_by(theory, step, &list);
    for (const Made& m : list)
      if (Known* k = find(m); k && block_[k->maker] != block_[s]) k->stays = true;
    made_by(theory, step, &list);
    bool all = step.is_compute() && is_source(graph.node(step.node));
    for (const Made& m : list) all = all || needed[m.first.index];
    for (const Made& m : list) {
      if (!find(m)) known[m.first.index].push_back({m.second, s, false});
      if (all) find(m)->stays = true;
    }
  }
  // Values of one node stay together: they are made by one step.
  for (int s = 0; s < backward_; ++s) {
    made_by(theory, program.steps[s], &list);
    if (std::any_of(list.begin(), list.end(), [&](const Made& m) { return find(m)->stays; }))
      for (const Made& m : list) find(m)->stays = true;
  }
  first_.assign(steps + 1, 0);
  for (int s = 0; s < steps; ++s) {
    read_by(theory, program.steps[s], &list);
    for (const Made& m : list)
      if (const Known* k = find(m); k && !k->stays && block_[k->maker] >= 0) {
        makers_.push_back(k->maker);
        if (s >= backward_) later_[block_[k->maker]].push_back({s, k->maker});
      }
    first_[s + 1] = static_cast<int>(makers_.size());
  }
}

Program Recomputation::with(const std::vector<bool>& chosen) const {
  const int steps = static_cast<int>(program_.steps.size());
  std::vector<Step> result;
  result.reserve(steps + backward_);
  result.assign(program_.steps.begin(), program_.steps.begin() + backward_);
  std::vector<bool> again(steps);  // forward steps that ran again
  std::vector<int> wanted, batch;  // a stack; what one read asks for
  const auto want = [&](int maker) {
    if (again[maker]) return;
    again[maker] = true;
    wanted.push_back(maker);
  };
  const auto want_read_by = [&](int step) {
    for (int i = first_[step]; i < first_[step + 1]; ++i)
      if (chosen[block_[makers_[i]]]) want(makers_[i]);
  };
  for (int s = backward_; s < steps; ++s) {
    // A block is made again as a whole when the first of it is read.
    batch.clear();
    want_read_by(s);
    if (!wanted.empty())
      for (const Read& read : later_[block_[wanted[0]]])
        if (read.step > s) want(read.maker);
    while (!wanted.empty()) {
      const int made = wanted.back();
      wanted.pop_back();
      batch.push_back(made);
      want_read_by(made);
    }
    std::sort(batch.begin(), batch.end());
    for (int made : batch) {
      result.push_back(program_.steps[made]);
      result.back().again = true;
    }
    result.push_back(program_.steps[s]);
  }
  return {std::move(result), program_.sizes};
}

Program recompute(const Theory& theory, const Program& program, const std::vector<int>& block_of,
                  const std::vector<bool>& chosen) {
  return Recomputation(theory, program, block_of).with(chosen);
}

Program hold_pieces(const Theory& theory, const Program& program) {
  return gathered_again(theory, scattered_in_passes(theory, program));
}

Program gathered_again(const Theory& theory, const Program& program) {
  const Graph& graph = theory.graph();
  const int backward = phases_of(theory, program).backward,
            steps = static_cast<int>(program.steps.size());
  std::vector<bool> stays(graph.values.size());
  for (ValueId v : graph.outputs) stays[v.index] = true;
  if (graph.loss.valid()) stays[graph.loss.index] = true;
  for (const Buffer& b : graph.buffers)
    if (b.update.valid()) stays[b.update.index] = true;
  // What is made of parameters alone, by which step; copies have bytes of their own.
  struct Maker {
    int step = 0;
    bool copy = false;
  };
  std::map<Made, Maker> makers;
  std::vector<Made> reads, made;
  for (int s = 0; s < backward; ++s) {
    const Step& step = program.steps[s];
    made_by(theory, step, &made);
    if (step.is_compute() && is_source(graph.node(step.node))) {
      if (graph.node(step.node).op == "motley::parameter") makers[made[0]] = {s, false};
      continue;
    }
    read_by(theory, step, &reads);
    bool alone = !reads.empty(), copy = !step.is_compute() && step.kind != Collective::slice;
    for (const Made& m : reads) {
      const auto it = makers.find(m);
      alone = alone && it != makers.end();
      copy = copy || (alone && it->second.copy);
    }
    if (step.is_compute()) {
      const Node& node = graph.node(step.node);
      const OpDef* op = find_op(node.op);
      // Views and conversions; more is computed once.
      alone = alone && op && !op->random && !op->flops && !is_boundary(node) &&
              theory.triples(step.node)[step.triple].collectives.empty();
      copy = copy || !op || !op->alias;
    }
    for (const Made& m : made) alone = alone && !stays[m.first.index];
    if (!alone) continue;
    for (const Made& m : made) makers[m] = {s, copy};
  }
  std::vector<Step> result;
  result.assign(program.steps.begin(), program.steps.begin() + backward);
  std::vector<bool> again(steps);
  const std::function<void(const Step&)> want = [&](const Step& step) {
    std::vector<Made> list;
    read_by(theory, step, &list);
    for (const Made& m : list) {
      const auto it = makers.find(m);
      if (it == makers.end() || !it->second.copy || again[it->second.step]) continue;
      again[it->second.step] = true;
      want(program.steps[it->second.step]);
      result.push_back(program.steps[it->second.step]);
      result.back().again = true;
    }
  };
  for (int s = backward; s < steps; ++s) {
    const Step& step = program.steps[s];
    if (step.again) {  // of a block that is computed again
      made_by(theory, step, &made);
      const auto it = makers.find(made[0]);
      if (it != makers.end() && it->second.copy) {
        if (again[it->second.step]) continue;
        again[it->second.step] = true;
      }
    }
    want(step);
    result.push_back(step);
  }
  return {std::move(result), program.sizes};
}

namespace {

// Of a parameter: the steps that make it and its whole gradient, and whether nothing else does or
// reads that.
struct WholeParameter {
  int source = -1, gradient = -1;
  bool possible = true;
  int triple = -1;  // of the source, for pieces
};

// The parameters of whole gradients that collectives make.
std::vector<WholeParameter> whole_parameters(const Theory& theory, const Program& program) {
  const Graph& graph = theory.graph();
  std::map<ValueId, size_t> of_value, of_gradient;
  for (size_t i = 0; i < graph.parameters.size(); ++i) {
    const Parameter& p = graph.parameters[i];
    if (!p.gradient.valid()) continue;
    of_value[p.value] = i;
    of_gradient[p.gradient] = i;
  }
  std::vector<WholeParameter> list(graph.parameters.size());
  for (size_t s = 0; s < program.steps.size(); ++s) {
    const Step& step = program.steps[s];
    for_each_made(theory, step, [&](ValueId v, Placement placement) {
      if (const auto p = of_value.find(v); p != of_value.end()) {
        WholeParameter& w = list[p->second];
        w.possible &= w.source < 0 && step.is_compute() && placement.is_replicated();
        w.source = static_cast<int>(s);
      }
      const auto p = of_gradient.find(v);
      if (p == of_gradient.end() || !placement.is_replicated()) return;
      WholeParameter& w = list[p->second];
      w.possible &= w.gradient < 0 && !step.is_compute() &&
                    (step.kind == Collective::all_gather || step.kind == Collective::all_reduce);
      w.gradient = static_cast<int>(s);
    });
    for_each_read(theory, step, [&](ValueId v, Placement placement) {
      if (const auto p = of_gradient.find(v); p != of_gradient.end() && placement.is_replicated())
        list[p->second].possible = false;
    });
  }
  for (WholeParameter& w : list) w.possible &= w.source >= 0 && w.gradient >= 0;
  return list;
}

// The triple of a parameter's source for the pieces that its gradient is to come in; -1: none.
int triple_for_pieces(const Theory& theory, const Step& source, const Step& gradient,
                      const PiecePrice& price) {
  const Graph& graph = theory.graph();
  const bool gathered = gradient.kind == Collective::all_gather;
  const ValueId parameter = graph.node(source.node).outputs[0];
  Seconds least =
      gathered ? 0 : kAsLong * price(gradient.value, Collective::all_reduce, gradient.to);
  int best = -1;
  const std::vector<Triple>& triples = theory.triples(source.node);
  for (size_t t = 0; t < triples.size(); ++t) {
    const Placement pieces = triples[t].out[0];
    if (!pieces.is_shard() || !triples[t].collectives.empty()) continue;
    if (gathered && pieces == gradient.from) return static_cast<int>(t);
    if (gathered || pieces.factor != 0) continue;
    const Seconds seconds = price(gradient.value, Collective::reduce_scatter, pieces) +
                            price(parameter, Collective::all_gather, pieces);
    if (seconds < least) least = seconds, best = static_cast<int>(t);
  }
  return best;
}

}  // namespace

Program stored_in_pieces(const Theory& theory, const Program& program, const PiecePrice& price) {
  std::vector<WholeParameter> parameters = whole_parameters(theory, program);
  std::map<int, WholeParameter> by_source, by_gradient;
  for (WholeParameter& w : parameters) {
    if (!w.possible) continue;
    w.triple = triple_for_pieces(theory, program.steps[w.source], program.steps[w.gradient], price);
    if (w.triple >= 0) by_source[w.source] = by_gradient[w.gradient] = w;
  }
  std::map<ValueId, Step> waiting;  // gathers, until somebody reads what they make
  std::vector<Step> result;
  for (size_t s = 0; s < program.steps.size(); ++s) {
    Step step = program.steps[s];
    for_each_read(theory, step, [&](ValueId v, Placement) {
      const auto it = waiting.find(v);
      if (it == waiting.end()) return;
      result.push_back(it->second);
      waiting.erase(it);
    });
    if (const auto it = by_gradient.find(static_cast<int>(s)); it != by_gradient.end()) {
      if (step.kind == Collective::all_gather) continue;
      const Step& source = program.steps[it->second.source];
      step.kind = Collective::reduce_scatter;
      step.to = theory.triples(source.node)[it->second.triple].out[0];
    }
    if (const auto it = by_source.find(static_cast<int>(s)); it != by_source.end()) {
      step.triple = it->second.triple;
      Step gather;
      gather.value = theory.graph().node(step.node).outputs[0];
      gather.kind = Collective::all_gather;
      gather.from = theory.triples(step.node)[step.triple].out[0];
      gather.to = Placement::replicated();
      waiting[gather.value] = gather;
    }
    result.push_back(step);
  }
  return {std::move(result), program.sizes};
}

Program once(const Program& program) {
  Program result = program;
  result.steps.change([](std::vector<Step>& steps) {
    std::erase_if(steps, [](const Step& step) { return step.again; });
  });
  return result;
}

std::vector<int> Recomputation::like() const {
  std::vector<std::string> what(later_.size());
  for (int s = 0; s < backward_; ++s) {
    if (block_[s] < 0) continue;
    const Step& step = program_.steps[s];
    std::string& text = what[block_[s]];
    if (step.is_compute())
      text += fmt::format("{} {} {};", graph_.node(step.node).op, step.triple,
                          graph_.spec(graph_.node(step.node).outputs[0]).bytes());
    else
      text += fmt::format("{} {} {} {};", static_cast<int>(step.kind), to_string(step.from),
                          to_string(step.to), graph_.spec(step.value).bytes());
  }
  std::map<std::string, int> first;
  std::vector<int> like(what.size());
  for (size_t b = 0; b < what.size(); ++b) {
    // What is in front of the first and behind the last is not as elsewhere.
    if (b == 0 || b + 1 == what.size()) what[b] += "end";
    like[b] = first.try_emplace(what[b], static_cast<int>(b)).first->second;
  }
  return like;
}

std::vector<bool> choose_blocks(int blocks,
                                const std::function<RecomputeCost(const std::vector<bool>&)>& cost,
                                const std::vector<int>& like) {
  std::vector<bool> none(blocks, false);
  const RecomputeCost before = cost(none);
  if (before.excess <= 0) return none;
  // Blocks that are computed again at once save nothing and may need a little more.
  auto all_but = [&](int last) {
    std::vector<bool> chosen(blocks, true);
    if (last >= 0) chosen[last] = false;
    return chosen;
  };
  if (blocks == 0 || (cost(all_but(-1)).excess > 0 && cost(all_but(blocks - 1)).excess > 0))
    return {};
  // What each does by itself.
  std::vector<double> seconds(blocks), saved(blocks);
  for (int b = 0; b < blocks; ++b) {
    if (!like.empty() && like[b] != b) {
      seconds[b] = seconds[like[b]];
      saved[b] = saved[like[b]];
      continue;
    }
    std::vector<bool> one = none;
    one[b] = true;
    const RecomputeCost c = cost(one);
    seconds[b] = std::max(0.0, c.seconds - before.seconds);
    saved[b] = before.excess - c.excess;
  }
  std::vector<int> by_rate(blocks), in_order(blocks);
  std::iota(in_order.begin(), in_order.end(), 0);
  by_rate = in_order;
  std::vector<double> rate(blocks);
  for (int b = 0; b < blocks; ++b) rate[b] = saved[b] / std::max(seconds[b], 1e-12);
  std::stable_sort(by_rate.begin(), by_rate.end(), [&](int a, int b) { return rate[a] > rate[b]; });
  std::vector<bool> best;
  Seconds best_seconds = 0;
  for (const std::vector<int>& order : {by_rate, in_order}) {
    // The fewest blocks in this order that are enough.
    auto first = [&](int count) {
      std::vector<bool> chosen = none;
      for (int i = 0; i < count; ++i) chosen[order[i]] = true;
      return chosen;
    };
    int low = 0, high = blocks;  // `low` do not fit
    if (cost(first(high)).excess > 0) --high;
    if (cost(first(high)).excess > 0) continue;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (cost(first(middle)).excess > 0 ? low : high) = middle;
    }
    std::vector<bool> chosen = first(high);
    std::vector<int> most_expensive(order.begin(), order.begin() + high);
    std::stable_sort(most_expensive.begin(), most_expensive.end(),
                     [&](int a, int b) { return seconds[a] > seconds[b]; });
    Bytes room = -cost(chosen).excess;
    for (int b : most_expensive) {
      if (room > 0 && saved[b] > kSurely * room) continue;
      chosen[b] = false;
      if (const RecomputeCost without = cost(chosen); without.excess > 0)
        chosen[b] = true;
      else
        room = -without.excess;
    }
    // One for a cheaper one; not of kinds of which another two were not enough.
    const auto kind = [&](int b) { return like.empty() ? b : like[b]; };
    std::set<std::pair<int, int>> too_little;
    for (int out : most_expensive) {
      if (!chosen[out]) continue;
      for (int in = 0; in < blocks; ++in) {
        if (chosen[in] || seconds[in] >= seconds[out]) continue;
        if (too_little.count({kind(out), kind(in)}) > 0) continue;
        chosen[out] = false, chosen[in] = true;
        if (cost(chosen).excess <= 0) break;
        chosen[out] = true, chosen[in] = false;
        too_little.emplace(kind(out), kind(in));
      }
    }
    const Seconds total = cost(chosen).seconds;
    if (best.empty() || total < best_seconds) {
      best = chosen;
      best_seconds = total;
    }
  }
  return best;
}

}  // namespace motley::spmd
