#include "sim/overlapped.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "cost/joined.h"
#include "cost/overlap.h"
#include "sim/alike.h"

namespace motley {

namespace {

// When the network is busy, in order.
class Busy {
 public:
  void add(Seconds begin, Seconds end) {
    if (end <= begin) return;
    if (!spans_.empty() && spans_.back().second == begin)
      spans_.back().second = end;
    else
      spans_.emplace_back(begin, end);
  }
  Seconds end() const { return spans_.empty() ? 0 : spans_.back().second; }
  // Seconds of [from, to] in which it is.
  Seconds within(Seconds from, Seconds to) const {
    Seconds sum = 0;
    for (size_t i = spans_.size(); i-- > 0 && spans_[i].second > from;)
      sum += std::max(0.0, std::min(to, spans_[i].second) - std::max(from, spans_[i].first));
    return sum;
  }
  // When so much work, begun then, is done, if it takes 1 + slowdown times as long beside it.
  Seconds done(Seconds begin, Seconds work, double slowdown) const {
    if (slowdown <= 0) return begin + work;
    size_t i = spans_.size();
    while (i > 0 && spans_[i - 1].second > begin) --i;
    Seconds now = begin;
    for (; i < spans_.size() && work > 0; ++i) {
      const Seconds free = std::max(0.0, spans_[i].first - now);
      if (work <= free) return now + work;
      work -= free;
      now += free;
      const Seconds beside = spans_[i].second - now, most = beside / (1 + slowdown);
      if (work <= most) return now + work * (1 + slowdown);
      work -= most;
      now += beside;
    }
    return now + work;
  }

 private:
  std::vector<std::pair<Seconds, Seconds>> spans_;
};

class Walk {
 public:
  Walk(const Theory& theory, const Program& program, const CostModel& model,
       const Fractions& fractions, std::vector<Seconds>* now, Overlapped* overlapped,
       const WalkSink& sink, const WalkOptions& options)
      : theory_(theory),
        graph_(theory.graph()),
        program_(program),
        model_(model),
        fractions_(fractions),
        now_(*now),
        out_(*overlapped),
        sink_(sink),
        options_(options) {}

  std::vector<int> run() {
    const int end = static_cast<int>(program_.steps.size());
    std::vector<Work> works(end);
    std::set<Cut> cuts;
    for (int i = 0; i < end; ++i) {
      const Step& step = program_.steps[i];
      if (!step.is_compute()) continue;
      works[i] = work_of(theory_, step.node, theory_.triples(step.node)[step.triple]);
      if (!works[i].free) cuts.insert(works[i].cut);
    }
    const std::vector<int> like = like_of(model_, fractions_, cuts, now_, options_.each);
    first_ = first_of(like);
    const std::vector<int> bucket = gradient_buckets(theory_, program_);
    const std::vector<JoinedCall> calls = joined_calls(theory_, program_);
    size_t next = 0;
    for (int i = 0; i < end; ++i) {
      if (options_.deadline.over()) throw TimeIsUp();
      if (next < calls.size() && calls[next].begin == i) {
        compute(calls[next]);
        i = calls[next++].end - 1;
        continue;
      }
      const Step& step = program_.steps[i];
      if (step.is_compute()) {
        compute(step, works[i]);
      } else if (moves_nothing(step.kind)) {
        wait_for({step.value, step.from});
      } else {
        const int last = std::max(bucket[i], i + 1);
        communicate(i, last);
        i = last - 1;
      }
    }
    for (int d : first_) wait(d, busy_.end());
    for (size_t d = 0; d < like.size(); ++d) {
      now_[d] = now_[like[d]];
      out_.comm[d] = out_.comm[like[d]];
      out_.exposed[d] = out_.exposed[like[d]];
    }
    return like;
  }

 private:
  using Made = std::pair<ValueId, Placement>;

  void wait(int d, Seconds until) {
    if (until <= now_[d]) return;
    sink_(d, now_[d], until, "wait", WalkKind::wait, {});
    out_.exposed[d] += busy_.within(now_[d], until);
    now_[d] = until;
  }
  void wait_for(const Made& made) {
    const auto it = there_.find(made);
    if (it == there_.end()) return;
    for (int d : first_) wait(d, it->second);
    there_.erase(it);  // from now on it is there
  }

  Seconds transfer(Seconds seconds, const std::string& name) {
    Seconds start = busy_.end();
    for (int d : first_) start = std::max(start, now_[d]);
    busy_.add(start, start + seconds);
    for (int d : first_) {
      out_.comm[d] += seconds;
      if (seconds > 0) sink_(d, start, start + seconds, name, WalkKind::comm, {});
    }
    return start + seconds;
  }

  void communicate(int begin, int end) {
    Bytes bytes = 0;
    Seconds copying = 0;
    for (int i = begin; i < end; ++i) {
      const Step& step = program_.steps[i];
      const TensorSpec& spec = graph_.spec(step.value);
      wait_for({step.value, step.from});
      bytes += model_.moved(step.kind, spec);
      if (end > begin + 1) copying += model_.copying_seconds(spec, program_.sizes);
    }
    const Step& step = program_.steps[begin];
    const Placement cut = step.from.is_shard() ? step.from : step.to;
    const Seconds there = transfer(
        copying + model_.collective(step.kind, bytes,
                                    fractions_.profile(theory_.cut(step.value, cut), model_.net()),
                                    step.form),
        to_string(step.kind));
    for (int i = begin; i < end; ++i)
      there_[{program_.steps[i].value, program_.steps[i].to}] = there;
    if (!model_.backend().hides)
      for (int d : first_) wait(d, there);
  }

  void compute(const Step& step, const Work& work) {
    const Node& node = graph_.node(step.node);
    const Triple& triple = theory_.triples(step.node)[step.triple];
    const ValueList inputs = graph_.inputs_of(node);
    for (size_t i = 0; i < inputs.size(); ++i) wait_for({inputs[i], triple.in[i]});
    for (const InnerCollective& c : triple.collectives) {
      const Seconds end =
          transfer(model_.net().all_reduce(model_.moved(c)), "all_reduce in " + triple.kernel);
      for (int d : first_) wait(d, end);
    }
    if (work.free) return;
    const auto& f = fractions_.by_device(work.cut);
    compute(step.node, [&](int d, int type) { return model_.compute(type, work, f[d]); });
  }

  // Of all parts.
  void compute(const JoinedCall& call) {
    for (int s = call.begin; s < call.begin + call.parts; ++s)
      for_each_read(theory_, program_.steps[s], [&](ValueId v, Placement p) { wait_for({v, p}); });
    const JoinedWork work(theory_, program_, call);
    compute(program_.steps[call.begin].node, [&](int d, int type) {
      return work.seconds(model_, type, [&](Cut cut) { return fractions_.by_device(cut)[d]; });
    });
  }

  template <typename F>
  void compute(NodeId node, F seconds) {
    for (int d : first_) {
      const int type = model_.cluster().devices[d].type;
      const Seconds end =
          busy_.done(now_[d], seconds(d, type), model_.cluster().types[type].interference);
      if (end > now_[d]) sink_(d, now_[d], end, graph_.node(node).op, WalkKind::compute, node);
      now_[d] = end;
    }
  }

  const Theory& theory_;
  const Graph& graph_;
  const Program& program_;
  const CostModel& model_;
  const Fractions& fractions_;
  std::vector<Seconds>& now_;
  Overlapped& out_;
  const WalkSink& sink_;
  const WalkOptions& options_;
  std::vector<int> first_;
  Busy busy_;
  std::map<Made, Seconds> there_;  // of what is on its way: when it arrives
};

}  // namespace

std::vector<int> walk_overlapped(const Theory& theory, const Program& program,
                                 const CostModel& model, const Fractions& fractions,
                                 std::vector<Seconds>* now, Overlapped* overlapped,
                                 const WalkSink& sink, const WalkOptions& options) {
  overlapped->comm.assign(now->size(), 0);
  overlapped->exposed.assign(now->size(), 0);
  return Walk(theory, program, model, fractions, now, overlapped, sink, options).run();
}

}  // namespace motley
