#include "sim/exchange.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "cluster/part.h"

namespace motley {

namespace {

bool alike(const Holding& a, const Holding& b) {
  return a.devices->size() == b.devices->size() && a.placement == b.placement && a.cut == b.cut &&
         (a.cut == 0 || a.shares->of(a.cut) == b.shares->of(b.cut));
}

Bytes sum_of(const std::vector<net::PairMessage>& messages) {
  Bytes sum = 0;
  for (const net::PairMessage& m : messages) sum += m.bytes;
  return sum;
}

}  // namespace

void add_messages(const Holding& from, const Holding& to, Bytes bytes,
                  std::vector<net::PairMessage>* messages) {
  const int senders = static_cast<int>(from.devices->size()),
            receivers = static_cast<int>(to.devices->size());
  const auto piece = [](const Holding& h, int rank) {
    return h.cut == 0 ? 1.0
                      : static_cast<double>(h.shares->of(h.cut)[rank]) / static_cast<double>(h.cut);
  };
  const auto add = [&](int s, int r, double part) {
    if (part > 0) messages->push_back({(*from.devices)[s], (*to.devices)[r], bytes * part});
  };
  if (from.cut == 0) {
    for (int r = 0; r < receivers; ++r)
      add(static_cast<int>(static_cast<int64_t>(r) * senders / receivers), r, piece(to, r));
    return;
  }
  if (to.cut != from.cut || to.placement != from.placement) {
    for (int r = 0; r < receivers; ++r)
      for (int s = 0; s < senders; ++s) add(s, r, piece(from, s) * piece(to, r));
    return;
  }
  // Both are cut alike: from the first sender whose piece ends behind where the receiver's begins.
  const std::vector<int64_t>&sent = from.shares->of(from.cut), &taken = to.shares->of(to.cut);
  int64_t a = 0, b = 0;
  for (int r = 0, s = 0; r < receivers; b += taken[r++]) {
    while (s < senders && a + sent[s] <= b) a += sent[s++];
    int64_t begin = a;
    for (int t = s; t < senders && begin < b + taken[r]; begin += sent[t++]) {
      const int64_t low = std::max(begin, b), high = std::min(begin + sent[t], b + taken[r]);
      add(t, r,
          static_cast<double>(std::max<int64_t>(high - low, 0)) / static_cast<double>(to.cut));
    }
  }
}

Exchanges::Exchanges(const Plan& plan, const Deadline& deadline)
    : plan_(plan),
      pipeline_(*plan.pipeline),
      deadline_(deadline),
      topology_(plan.cluster),
      divided_(divided_states(pipeline_)) {
  for (int s = 0; s < pipeline_.stages(); ++s)
    joint_.push_back(joint_gradients(pipeline_, s, plan.reductions, plan.cluster.size()));
}

Seconds Exchanges::time_of(const std::vector<net::PairMessage>& messages) const {
  if (on_messages) on_messages(messages);
  return net::messages_time(topology_, messages);
}

std::vector<Bytes> Exchanges::divided_bytes(int s, const std::vector<bool>& which,
                                            Pieces pieces) const {
  const StagePlan& plan = planned(0, s);
  const Theory& theory = pipeline_.theory(s);
  const Shares shares(plan.ratios);
  const std::vector<Placement> stored = stored_placements(theory, plan.program);
  std::vector<Bytes> bytes(plan.devices.size(), 0);
  const auto& parameters = pipeline_.graph(s).parameters;
  for (size_t i = 0; i < which.size(); ++i) {
    if (!which[i]) continue;
    const Parameter& p = parameters[i];
    const TensorSpec& spec =
        pipeline_.graph(s).spec(pieces == Pieces::parameters ? p.value : p.gradient);
    const Bytes all = static_cast<Bytes>(spec.bytes()) *
                      (pieces == Pieces::scattered ? wide(s, Collective::reduce_scatter, spec) : 1);
    const Placement placement = stored[p.value.index];
    const Cut cut = theory.cut(p.value, placement);
    for (size_t d = 0; d < bytes.size(); ++d)
      bytes[d] += placement.is_shard()
                      ? all * static_cast<double>(shares.of(cut)[d]) / static_cast<double>(cut.size)
                      : all;
  }
  return bytes;
}

double Exchanges::wide(int s, Collective kind, const TensorSpec& spec) const {
  return widening(backend_among(plan_.cluster, devices_of(pipeline_, s)), kind,
                  is_half(spec.dtype));
}

Seconds Exchanges::around(int s, const std::vector<Bytes>& by_rank) const {
  const auto replicas = pipeline_.replicas.size();
  const std::vector<double>& shares = divided_[s].shares;
  const double largest = *std::max_element(shares.begin(), shares.end()),
               rounds = static_cast<double>(replicas) - 1;
  std::vector<net::PairMessage> ring;
  Seconds latency = 0;
  for (size_t i = 0; i < by_rank.size(); ++i)
    for (size_t r = 0; r < replicas && by_rank[i] > 0; ++r) {
      const int from = planned(r, s).devices[i], to = planned((r + 1) % replicas, s).devices[i];
      ring.push_back({from, to, rounds * largest * by_rank[i]});
      latency = std::max(latency, topology_.latency(from, to));
    }
  return ring.empty() ? 0 : time_of(ring) + (rounds - 1) * latency;
}

Holding Exchanges::holding(size_t r, int s, ValueId v, Placement p) const {
  return {&planned(r, s).devices, sites[r][s]->shares.get(), p,
          p.is_shard() ? pipeline_.theory(s).cut_size(v, p) : 0};
}

Holding Exchanges::gradient_of(size_t r, int s, size_t parameter) const {
  const ValueId v = pipeline_.graph(s).parameters[parameter].value;
  return holding(r, s, v, sites[r][s]->stored[v.index]);
}

std::vector<Way> Exchanges::ways() const {
  std::map<std::tuple<int, int, bool>, std::vector<net::PairMessage>> messages;
  for (const Transfer& t : pipeline_.parts().transfers) {
    const Theory& from = pipeline_.theory(t.from);
    std::map<const StageSite*, Placement> made;
    for (size_t r = 0; r < pipeline_.replicas.size(); ++r) {
      if (deadline_.over()) throw TimeIsUp();
      const auto [it, fresh] = made.try_emplace(sites[r][t.from].get());
      if (fresh) it->second = output_placement(from, planned(r, t.from).program, t.made);
      add_messages(holding(r, t.from, t.made, it->second),
                   holding(r, t.to, t.taken, sites[r][t.to]->stored[t.taken.index]),
                   static_cast<Bytes>(pipeline_.part().graph.spec(t.value).bytes()),
                   &messages[{t.from, t.to, t.backward}]);
    }
  }
  std::vector<Way> ways;
  for (const auto& [way, list] : messages) {
    Way w;
    std::tie(w.from, w.to, w.backward) = way;
    w.sent.seconds = time_of(list);
    // A later stage's forward value that an earlier one reads in its backward pass.
    const Transfer* first = nullptr;
    for (const Transfer& t : pipeline_.parts().transfers)
      if (std::tuple(t.from, t.to, t.backward) == way) first = &t;
    const Graph& maker = pipeline_.graph(w.from);
    w.made_backward = maker.node(maker.value(first->made).producer).phase == Phase::backward;
    w.sent.bytes = sum_of(list) / static_cast<double>(pipeline_.replicas.size());
    ways.push_back(w);
  }
  return ways;
}

Sent Exchanges::in_pass(int s) const {
  const std::vector<Bytes> by_rank = divided_bytes(s, divided_[s].gradient, Pieces::scattered);
  Sent sent{0, around(s, by_rank)};
  for (Bytes b : by_rank) sent.bytes += static_cast<double>(pipeline_.replicas.size() - 1) * b;
  return sent;
}

Sent Exchanges::parameters(int s) const {
  const std::vector<Bytes> by_rank = divided_bytes(s, divided_[s].optimizer, Pieces::parameters);
  Sent sent{0, around(s, by_rank)};
  for (Bytes b : by_rank) sent.bytes += static_cast<double>(pipeline_.replicas.size() - 1) * b;
  return sent;
}

// The messages by which groups that hold the sums of their classes, each in its pieces, have that of
// all. One that holds it whole takes even pieces, so that a slow link carries everything once, and
// gathers them: returns the seconds of the slowest.
Seconds Exchanges::exchange_sums(const std::vector<Holding>& held,
                                 const std::vector<const CostModel*>& models,
                                 const Classes& classes, const TensorSpec& spec,
                                 std::vector<net::PairMessage>* messages) const {
  const auto bytes = static_cast<Bytes>(spec.bytes());
  Seconds gathered = 0;
  const auto exchange = [&](size_t to, size_t its_class, size_t place) {
    Holding taken = held[to];
    const size_t ranks = taken.devices->size();
    const Shares even(std::vector<double>(ranks, 1.0 / static_cast<double>(ranks)));
    if (taken.cut == 0 && ranks > 1) {
      taken.shares = &even;
      taken.cut = spec.numel();
      for (const Holding& other : held)
        if (other.cut > 0) {  // cut alike, as the pieces of others are
          taken.cut = other.cut;
          taken.placement = other.placement;
          break;
        }
      const CostModel& model = *models[to];
      const Fractions fractions(model.cluster(), even);
      gathered = std::max(gathered, model.collective(Collective::all_gather, bytes,
                                                     fractions.profile(taken.cut, model.net())));
      if (on_messages) {
        std::vector<net::PairMessage> ring;
        const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
        for (size_t i = 0; i < ranks; ++i)
          ring.push_back({(*taken.devices)[i], (*taken.devices)[(i + 1) % ranks], bytes * others});
        on_messages(ring);
      }
    }
    if (deadline_.over()) throw TimeIsUp();
    for (size_t c = 0; c < classes.size(); ++c)
      if (c != its_class) add_messages(held[met_by(place, classes[c])], taken, bytes, messages);
  };
  for (size_t c = 0; c < classes.size(); ++c)
    for (size_t k = 0; k < classes[c].size(); ++k) exchange(classes[c][k], c, k);
  return gathered;
}

// Of a tied parameter every part goes straight to its owner.
void Exchanges::add_tied_parts(int s, size_t parameter,
                               std::vector<net::PairMessage>* messages) const {
  const size_t replicas = pipeline_.replicas.size();
  std::vector<bool> one(pipeline_.graph(s).parameters.size(), false);
  one[parameter] = true;
  const std::vector<Bytes> by_rank = divided_bytes(s, one, Pieces::gradients);
  for (size_t i = 0; i < by_rank.size(); ++i)
    for (size_t r = 0; r < replicas; ++r)
      for (size_t q = 0; q < replicas; ++q)
        if (q != r)
          messages->push_back({planned(r, s).devices[i], planned(q, s).devices[i],
                               by_rank[i] * divided_[s].shares[q]});
}

Exchanges::Sums Exchanges::sums_of(int s) const {
  Sums sums;
  sums.scattered = divided_[s].optimizer;
  const Graph& graph = pipeline_.graph(s);
  for (size_t p = 0; p < graph.parameters.size(); ++p) {
    if (!graph.parameters[p].gradient.valid()) continue;
    const TensorSpec& spec = graph.spec(graph.parameters[p].gradient);
    const auto bytes = static_cast<Bytes>(spec.bytes());
    if (joint_[s].gradient[p]) {
      sums.jointly += bytes * wide(s, Collective::all_reduce, spec);
      continue;
    }
    if (in_every_pass(s) && divided_[s].gradient[p]) {
      sums.scattered[p] = false;
      continue;
    }
    if (!sums.scattered.empty() && sums.scattered[p]) {
      if (!divided_[s].tied[p]) continue;
      sums.scattered[p] = false;
      add_tied_parts(s, p, &sums.others);
      continue;
    }
    std::vector<Holding> held;
    std::vector<const CostModel*> models;
    for (size_t r = 0; r < pipeline_.replicas.size(); ++r) {
      held.push_back(gradient_of(r, s, p));
      models.push_back(sites[r][s]->model.get());
    }
    const Classes classes = classes_of(static_cast<int>(held.size()),
                                       [&](int a, int b) { return alike(held[a], held[b]); });
    if (classes.size() > 1)
      sums.gathered += exchange_sums(held, models, classes, spec, &sums.others);
    const Bytes moved = bytes * wide(s, Collective::all_reduce, spec);
    std::vector<std::vector<Bytes>>& reduced = sums.reduced[classes];
    reduced.resize(classes.size());
    for (size_t c = 0; c < classes.size(); ++c) {
      const Holding& of = held[classes[c].front()];
      reduced[c].resize(of.devices->size(), 0);
      for (size_t i = 0; i < reduced[c].size(); ++i)
        reduced[c][i] += of.cut == 0 ? moved
                                     : moved * static_cast<double>(of.shares->of(of.cut)[i]) /
                                           static_cast<double>(of.cut);
    }
  }
  return sums;
}

// All ranks of all classes together, by programs or on rings.
Seconds Exchanges::reduced_seconds(int s, const Classes& classes,
                                   const std::vector<std::vector<Bytes>>& reduced) const {
  std::vector<net::PairMessage> ring;
  Seconds seconds = 0, latency = 0;
  for (size_t c = 0; c < classes.size(); ++c) {
    const auto replicas = static_cast<double>(classes[c].size());
    for (size_t i = 0; i < reduced[c].size() && replicas > 1; ++i) {
      const Bytes bytes = reduced[c][i];
      std::vector<int> ranks;
      for (size_t r = 0; r < classes[c].size() && bytes > 0; ++r)
        ranks.push_back(planned(classes[c][r], s).devices[i]);
      const auto programs = programs_for(plan_.reductions, ranks, plan_.cluster.size());
      const auto program = std::find_if(programs.rbegin(), programs.rend(),
                                        [&](const auto& p) { return bytes >= p.from; });
      if (program != programs.rend()) {
        if (on_reduction) on_reduction(ranks, &*program, bytes);
        seconds = std::max(seconds, program->seconds(bytes));
        continue;
      }
      for (size_t r = 0; r < ranks.size(); ++r) {
        const net::PairMessage m = {ranks[r], ranks[(r + 1) % ranks.size()],
                                    2.0 * (replicas - 1) / replicas * bytes};
        latency = std::max(latency, (2.0 * (replicas - 1) - 1) * topology_.latency(m.from, m.to));
        ring.push_back(m);
      }
    }
  }
  return ring.empty() ? seconds : seconds + time_of(ring) + latency;
}

Sent Exchanges::over_replicas(int s) const {
  const Sums sums = sums_of(s);
  const std::vector<Bytes> parts = divided_bytes(s, sums.scattered, Pieces::scattered);
  Sent sent{sum_of(sums.others), sums.gathered};
  if (!sums.others.empty()) sent.seconds += time_of(sums.others);
  sent.seconds += around(s, parts);
  if (sums.jointly > 0) {
    const std::vector<int> devices = devices_of(pipeline_, s);
    const auto programs = programs_for(plan_.reductions, devices, plan_.cluster.size());
    sent.seconds +=
        CollectiveModel(part_of(plan_.cluster, devices), programs).all_reduce(sums.jointly);
    if (on_reduction) {
      const auto program = std::find_if(programs.rbegin(), programs.rend(),
                                        [&](const auto& p) { return sums.jointly >= p.from; });
      on_reduction(devices, program == programs.rend() ? nullptr : &*program, sums.jointly);
    }
  }
  for (const auto& [classes, reduced] : sums.reduced) {
    sent.seconds += reduced_seconds(s, classes, reduced);
    for (size_t c = 0; c < classes.size(); ++c)
      for (Bytes b : reduced[c]) sent.bytes += 2 * static_cast<double>(classes[c].size() - 1) * b;
  }
  for (Bytes b : parts) sent.bytes += static_cast<double>(pipeline_.replicas.size() - 1) * b;
  return sent;
}

Sent Exchanges::tied(const Tied& tied) const {
  const TensorSpec& spec = plan_.graph->spec(plan_.graph->parameters[tied.parameter].gradient);
  std::vector<net::PairMessage> messages;
  Seconds gathered = 0;
  for (size_t r = 0; r < pipeline_.replicas.size(); ++r) {
    std::vector<Holding> held;
    std::vector<const CostModel*> models;
    for (int t : tied.stages) {
      models.push_back(sites[r][t]->model.get());
      const auto& list = pipeline_.parts().parameter_of[t];
      held.push_back(
          gradient_of(r, t, std::find(list.begin(), list.end(), tied.parameter) - list.begin()));
    }
    const Classes each = classes_of(static_cast<int>(held.size()), [](int, int) { return false; });
    gathered = std::max(gathered, exchange_sums(held, models, each, spec, &messages));
  }
  return {sum_of(messages), time_of(messages) + gathered};
}

}  // namespace motley
