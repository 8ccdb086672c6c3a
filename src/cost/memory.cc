#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "cost/overlap.h"
#include "cost/storage.h"
#include "graph/stage.h"
#include "shard/joined.h"

namespace motley {

namespace {

// What comes in: two messages are posted ahead each way, are put together from several senders, and
// stay until the end of the pass.
constexpr double kComing = 4;

// Adds up what a program holds at every step, and after the last one, where the optimizer is.
class Account {
 public:
  Account(const Theory& theory, const Program& program, const Fractions& fractions, int types,
          Optimizer optimizer, bool phased, const ZeroShare& kept)
      : theory_(theory),
        graph_(theory.graph()),
        program_(program),
        fractions_(fractions),
        types_(types),
        optimizer_(optimizer),
        phased_(phased),
        kept_(kept),
        stored_(stored_placements(theory, program)),
        messages_(gradient_messages(theory, program, fractions.shares())),
        segments_(theory.segments()),
        end_(static_cast<int>(program.steps.size())),
        local_(static_cast<size_t>(end_ + 2) * static_cast<size_t>(types)),
        cut_(static_cast<size_t>(end_ + 2) * segments_),
        whole_(end_ + 2),
        unmade_(local_.size()),
        state_cut_(segments_, 0) {
    memory_.state.assign(types, 0);
    memory_.held.assign(types, 0);
    memory_.held_inputs.assign(types, 0);
    memory_.sums.assign(types, 0);
    memory_.waiting.assign(types, 0);
    memory_.sent.assign(types, 0);
    memory_.sent_back.assign(types, 0);
  }

  MemoryCost run() {
    add_state();
    add_update();
    add_second_copies();
    hold({phased_ ? kSmallChange : held_throughout(graph_), {}}, 0, end_);
    if (phased_) add_sums();
    if (phased_) add_messages();
    add_storages();
    add_workspace();
    find_peaks();
    return std::move(memory_);
  }

 private:
  Amount amount(ValueId v, Placement p, double factor = 1) const {
    return {factor * static_cast<Bytes>(graph_.spec(v).bytes()), theory_.cut(v, p)};
  }
  // Of what is placed as a parameter.
  Amount as_parameter(const Parameter& p, Bytes bytes) const {
    return {bytes, theory_.cut(p.value, stored_[p.value.index])};
  }
  void add(const Amount& a, std::vector<Bytes>* bytes) {
    local_bytes(a, fractions_, &one_);
    for (int t = 0; t < types_; ++t) (*bytes)[t] += one_[t];
  }
  // From before the first step to behind the last.
  void hold(const Amount& a, int first, int last, double sign = 1) {
    local_bytes(a, fractions_, &one_);
    for (const auto& [at, change] : {std::pair(first, sign), {last + 1, -sign}}) {
      for (int t = 0; t < types_; ++t)
        local_[static_cast<size_t>(at) * types_ + t] += change * one_[t];
      (a.cut.size > 0 ? cut_[static_cast<size_t>(at) * segments_ + a.cut.segment] : whole_[at]) +=
          change * a.bytes;
    }
  }

  // Of what is counted as state, and is not there before step `made`.
  void make_later(const Amount& a, int made) {
    local_bytes(a, fractions_, &one_);
    for (int t = 0; t < types_; ++t) {
      unmade_[t] += one_[t];
      unmade_[static_cast<size_t>(made) * types_ + t] -= one_[t];
    }
  }

  void add_state() {
    persistent_.resize(graph_.values.size());
    auto keep = [&](const Amount& a) {
      add(a, &memory_.state);
      (a.cut.size > 0 ? state_cut_[a.cut.segment] : state_whole_) += a.bytes;
    };
    for (size_t i = 0; i < graph_.parameters.size(); ++i) {
      const Parameter& p = graph_.parameters[i];
      auto bytes = static_cast<Bytes>(graph_.spec(p.value).bytes());
      if (p.gradient.valid()) {
        const TensorSpec& gradient = graph_.spec(p.gradient);
        // A divided gradient is there whole from where the backward pass makes it; its sum has 32
        // bits.
        const bool divided = kept_.of_gradient(i) < 1;
        if (!divided) persistent_[p.gradient.index] = &p;
        bytes *= 1 + state_factor(optimizer_) * kept_.of_optimizer(i);
        bytes += static_cast<Bytes>(gradient.bytes()) * kept_.of_gradient(i) *
                 (divided && is_half(gradient.dtype) ? 2 : 1);
      }
      keep(as_parameter(p, bytes));
    }
  }

  // Gradients that the optimizer has in the type of their parameters, beside their own, and its
  // temporaries, of one parameter at a time.
  void add_update() {
    Amount most;
    Bytes most_bytes = 0, scattered = 0;
    for (size_t i = 0; i < graph_.parameters.size(); ++i) {
      const Parameter& p = graph_.parameters[i];
      if (!p.gradient.valid()) continue;
      const Amount piece =
          as_parameter(p, static_cast<Bytes>(graph_.spec(p.value).bytes()) * kept_.of_optimizer(i));
      if (graph_.spec(p.gradient).dtype != graph_.spec(p.value).dtype) hold(piece, end_, end_);
      if (kept_.of_gradient(i) < 1)  // as they are summed, in 32 bits
        scattered += static_cast<Bytes>(graph_.spec(p.gradient).bytes()) *
                     (is_half(graph_.spec(p.gradient).dtype) ? 2 : 1);
      const auto& f = fractions_.by_type(piece.cut);
      const Bytes largest = piece.bytes * *std::max_element(f.begin(), f.end());
      if (largest > most_bytes) most = piece, most_bytes = largest;
    }
    const double copies = update_workspace(optimizer_);
    // What replicas reduce in a pass travels in buckets.
    hold({bucket_workspace(scattered, std::max(copies, 1.0) * most.bytes), {}}, end_, end_);
    most.bytes *= copies;
    hold(most, end_, end_);
  }

  // What devices keep of others' pieces (second_copy() in cost.h): parameters and optimizer state
  // for the whole step; gradients as they are sent and as they come, while the optimizer runs; and
  // what its temporaries take more where a kept piece is larger than the own one. Shares near these
  // are counted as if a device kept as much as it has.
  void add_second_copies() {
    if (!fractions_.twice()) return;
    std::vector<Bytes> larger(types_, 0);
    const auto at_end = [&](int type, Bytes bytes) {
      local_[static_cast<size_t>(end_) * types_ + type] += bytes;
      local_[static_cast<size_t>(end_ + 1) * types_ + type] -= bytes;
    };
    const auto add_one = [&](ValueId v, Bytes kept, Bytes sent) {
      const Cut cut = theory_.cut(v, stored_[v.index]);
      if (!stored_[v.index].is_shard()) return;
      const std::vector<double>&own = fractions_.by_type(cut),
            &second = fractions_.second_by_type(cut);
      for (int t = 0; t < types_; ++t) {
        memory_.state[t] += kept * second[t];
        at_end(t, sent * (own[t] + second[t]));
        larger[t] = std::max(larger[t], sent * (second[t] - own[t]));
      }
      state_cut_[cut.segment] += kept;
      cut_[static_cast<size_t>(end_) * segments_ + cut.segment] += 2 * sent;
      cut_[static_cast<size_t>(end_ + 1) * segments_ + cut.segment] -= 2 * sent;
    };
    for (const Parameter& p : graph_.parameters) {
      const auto bytes = static_cast<Bytes>(graph_.spec(p.value).bytes());
      const bool trained = p.gradient.valid();
      add_one(p.value, trained ? bytes * (1 + state_factor(optimizer_)) : bytes,
              trained ? bytes : 0);
    }
    for (const Buffer& b : graph_.buffers) {
      const auto bytes = static_cast<Bytes>(graph_.spec(b.value).bytes());
      add_one(b.value, bytes, bytes);
    }
    for (int t = 0; t < types_; ++t) at_end(t, update_workspace(optimizer_) * larger[t]);
  }

  // Sums over micro-batches; those of 16-bit gradients have 32 bits.
  void add_sums() {
    auto wide = [&](ValueId v) { return is_half(graph_.spec(v).dtype) ? 2 : 1; };
    if (!kept_.gradient.empty()) {
      // Reduced in every pass, they are summed in the placement of their parameters.
      for (size_t i = 0; i < graph_.parameters.size(); ++i) {
        const Parameter& p = graph_.parameters[i];
        if (p.gradient.valid() && kept_.of_gradient(i) == 1)
          add(as_parameter(p,
                           wide(p.gradient) * static_cast<Bytes>(graph_.spec(p.gradient).bytes())),
              &memory_.sums);
      }
      return;
    }
    // A gradient is there as a sum first, then as its parameter is placed, which is counted as
    // state.
    for (const auto& [v, p] : accumulated(theory_, program_)) {
      summed_.insert({v, p});
      add(amount(v, p, wide(v)), &memory_.sums);
      if (const Parameter* of = persistent_[v.index])
        add(as_parameter(*of, -static_cast<Bytes>(graph_.spec(v).bytes())), &memory_.sums);
    }
  }

  // Of sums of gradients where they start.
  void add_workspace() {
    std::vector<int> start(end_);
    std::iota(start.begin(), start.end(), 0);
    for (const GradientMessage& m : messages_)
      for (int s : m.steps) {
        start[s] = phased_ ? m.steps[0] : m.ready;
        // A message of several beside their sums over micro-batches.
        const Step& step = program_.steps[s];
        if (phased_ && m.steps.size() > 1) hold(amount(step.value, step.to), start[s], start[s]);
      }
    // One call on the rows of all parts takes what the calls of all do, and copies of rows.
    for (const JoinedCall& call : joined_calls(theory_, program_))
      for (int s = call.begin; s < call.begin + call.parts; ++s) {
        start[s] = call.begin;
        size_t i = 0;
        for_each_read(theory_, program_.steps[s], [&](ValueId v, Placement p) {
          if (call.copied[i++]) hold(amount(v, p), call.begin, call.end - 1);
        });
      }
    for (int s = 0; s < end_; ++s)
      for (const Amount& a : workspace_of(theory_, program_.steps[s], fractions_))
        hold(a, start[s], start[s]);
  }

  // What comes in for the passes to come, and what is on its way out.
  void add_messages() {
    for (const Input& i : graph_.inputs)
      hold(amount(i.value, stored_[i.value.index], is_received(i) ? kComing : 1), 0, end_);
    for (ValueId v : graph_.outputs) {
      const Amount a = amount(v, output_placement(theory_, program_, v));
      add(a, &memory_.sent);
      if (graph_.node(graph_.value(v).producer).phase == Phase::backward)
        add(a, &memory_.sent_back);
      hold(a, 0, end_);
    }
  }

  void add_storages() {
    const Phases phases = phased_ ? phases_of(theory_, program_) : Phases{};
    const int boundary = phased_ ? phases.backward : -1;
    const bool splits = phased_ && phases.weights < phases.reduction;
    std::vector<bool> inputs(graph_.values.size()), parameters(graph_.values.size());
    for (const Input& i : graph_.inputs)
      if (is_received(i)) inputs[i.value.index] = true;
    for (const Parameter& p : graph_.parameters) parameters[p.value.index] = true;
    for (const Storage& x : storages(theory_, program_, fractions_, phased_, messages_)) {
      const auto state = [&](const auto& what) { return bool(parameters[what.first.index]); };
      if (std::any_of(x.to_end.begin(), x.to_end.end(), state)) continue;
      const Amount a = amount(x.value, x.placement);
      if (x.made < boundary && x.last >= boundary) add(a, &memory_.held);
      if (x.made < boundary && inputs[x.value.index]) add(a, &memory_.held_inputs);
      // Added to its sum when it is there; where passes are split, in the last one.
      const bool is_summed = summed_.count({x.value, x.placement}) > 0;
      const int until = splits && x.made < phases.weights ? phases.reduction - 1 : x.made;
      hold(a, x.made, is_summed ? until : x.last);
      if (splits && x.made < phases.weights && x.last >= phases.weights) add(a, &memory_.waiting);
      // Gradients are counted as state.
      for (const auto& [v, p] : x.to_end)
        if (const Parameter* of = persistent_[v.index];
            of != nullptr && p == stored_[of->value.index] && !is_summed) {
          const Amount gradient = as_parameter(*of, static_cast<Bytes>(graph_.spec(v).bytes()));
          hold(gradient, x.made, end_, -1);
          if (!phased_) make_later(gradient, x.made);
        }
    }
  }

  void find_peaks() {
    memory_.peak.assign(types_, 0);
    memory_.allocated.assign(types_, 0);
    memory_.cut.assign(segments_ * types_, 0);
    for (size_t s = 0; s < segments_; ++s)
      for (int t = 0; t < types_; ++t) memory_.cut[s * types_ + t] = state_cut_[s];
    memory_.whole.assign(types_, state_whole_);
    std::vector<Bytes> now(types_, 0), unmade(types_, 0);
    std::vector<Bytes> cut = state_cut_;
    Bytes whole = 0;
    for (int at = 0; at < end_ + 2; ++at) {
      for (size_t s = 0; s < segments_; ++s)
        cut[s] += cut_[static_cast<size_t>(at) * segments_ + s];
      whole += whole_[at];
      for (int t = 0; t < types_; ++t) {
        now[t] += local_[static_cast<size_t>(at) * types_ + t];
        unmade[t] += unmade_[static_cast<size_t>(at) * types_ + t];
        memory_.allocated[t] =
            std::max(memory_.allocated[t], now[t] + memory_.state[t] - unmade[t]);
        if (now[t] <= memory_.peak[t]) continue;
        memory_.peak[t] = now[t];
        for (size_t s = 0; s < segments_; ++s) memory_.cut[s * types_ + t] = cut[s];
        memory_.whole[t] = state_whole_ + whole;
      }
    }
    for (int t = 0; t < types_; ++t) memory_.peak[t] += memory_.state[t];
  }

  const Theory& theory_;
  const Graph& graph_;
  const Program& program_;
  const Fractions& fractions_;
  const int types_;
  const Optimizer optimizer_;
  const bool phased_;
  const ZeroShare& kept_;
  const std::vector<Placement> stored_;
  const std::vector<GradientMessage> messages_;
  const size_t segments_;
  const int end_;
  // What is made (positive) and freed (negative) before each step: local bytes, [step][type], and
  // whole sizes cut, [step][segment], and uncut.
  std::vector<Bytes> local_, cut_, whole_;
  std::vector<Bytes> unmade_;     // like local_, of what is counted as state before it is made
  std::vector<Bytes> state_cut_;  // [segment]
  Bytes state_whole_ = 0;
  std::vector<const Parameter*> persistent_;  // [value] whose gradient it is, counted as state
  std::set<std::pair<ValueId, Placement>> summed_;
  std::vector<Bytes> one_;  // [type] local bytes of what is added
  MemoryCost memory_;
};

}  // namespace

MemoryCost memory_of(const Theory& theory, const Program& program, const Fractions& fractions,
                     int types, Optimizer optimizer, bool phases, const ZeroShare& kept) {
  return Account(theory, program, fractions, types, optimizer, phases, kept).run();
}

}  // namespace motley
