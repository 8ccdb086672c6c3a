#include "pipeline/chain.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "pipeline/track.h"

namespace motley::pipeline {

namespace {

constexpr double kClose = 0.02;  // of periods, between which no incumbent is looked for

// Some orders of sub-clusters, one family of meshes.
class Chain {
  using Next = Track::Next;
  using Block = Track::Block;

 public:
  Chain(const ChainProblem& chain, CostTable* table, Shared* shared, Pool* pool,
        SearchResult* result)
      : problem_(chain.problem),
        options_(chain.options),
        table_(table),
        shared_(*shared),
        micro_batch_(chain.micro_batch),
        micro_batches_(chain.micro_batches),
        pipelines_(chain.pipelines),
        layers_(chain.problem.layers),
        pool_(pool),
        result_(result),
        track_(chain, table, shared) {
    reset();
    for (int c : chain.orders[0]) {
      const auto& devices = shared->moves.at({chain.shapes, c});
      starts_.push_back(&devices[0]);
      for (const auto& moves : devices)
        for (const Move& move : moves) meshes_ = std::max(meshes_, move.mesh + 1);
    }
    if (problem_.tied_cost) {
      for (int root : roots_)
        blocks_[root].extra =
            problem_.tied_cost(blocks_[root].cluster, chain.orders[0].back(), pipelines_);
      constant_ = kInfinity;
      for (int root : roots_) constant_ = std::min(constant_, blocks_[root].extra);
      for (int root : roots_) blocks_[root].extra -= constant_;
    }
    suffix_.resize(std::max(suffix_.size(), positions_.size()));
    prefix_.resize(suffix_.size());
  }

  // search_chain().
  bool run() {
    single_stage();
    double more = micro_batches_ - 1;
    if (micro_batches_ == 1) {
      Solution s;
      if (solve(kLongest, pool_->best() - constant_, &s)) offer(s);
      return true;
    }
    if (std::isfinite(pool_->best()) && !reachable((pool_->best() - constant_) / micro_batches_))
      return true;
    // No plan has a period below `least`: the least with t <= p, ignoring all else, to a part in a
    // thousand or to half of one period in all. Other orders can do about the same.
    const double part = std::min(0.001, 0.5 / micro_batches_);
    const bool known = shared_.reach > 0;
    Seconds reach = known ? shared_.reach : estimate(), least = 0;
    const double first = known ? 1 + part : 1.02;
    for (double step = first; !reachable(reach); step *= step) {
      least = reach;
      reach *= step;
      if (reach > kLongest) return true;  // some layer fits nowhere
    }
    for (double step = first; least == 0; step *= step) {
      Seconds lower = reach / step;
      if (lower < 1e-200)
        least = 1e-200;
      else
        (reachable(lower) ? reach : least) = lower;
    }
    while (reach > least * (1 + 1.01 * part)) {
      if (expired()) return stop(0);
      Seconds middle = least + (reach - least) / 2;
      (reachable(middle) ? reach : least) = middle;
    }
    least_ = least;
    shared_.reach = reach;
    // Incumbents from periods near the least one: the first that can be reached, and some above. Of
    // many orders the first finds them.
    const int wanted = shared_.incumbents && problem_.clusters.size() > 2 ? 0 : 3;
    shared_.incumbents = true;
    int found = 0;
    Seconds missed = 0, met = 0;  // longest period without a plan, the shortest with one
    for (double excess = 0; found < wanted; excess = excess == 0 ? 0.001 : 2 * excess) {
      if (expired()) return stop(micro_batches_ * least);
      Seconds bound = reach * (1 + excess);
      if (bound * micro_batches_ >= pool_->best()) break;
      Solution s;
      reset();
      if (solve(bound, pool_->best() - constant_ - more * least, &s)) {
        const Seconds period = offer(s);
        met = found == 0 ? std::min(period, bound) : met;
        ++found;
      } else if (found == 0) {
        missed = bound;
      }
      if (excess > 1e6) break;
    }
    // Where memory is short the first may be far above: between.
    while (missed > 0 && met > (1 + kClose) * missed) {
      if (expired()) return stop(micro_batches_ * least);
      const Seconds middle = missed + (met - missed) / 2;
      Solution s;
      reset();
      if (solve(middle, pool_->best() - constant_ - more * least, &s))
        met = std::min(offer(s), middle);
      else
        missed = middle;
    }
    reset();
    Seconds bound =
        std::isfinite(pool_->best()) ? (pool_->best() - constant_) / micro_batches_ : kLongest;
    Seconds latency = least;
    while (bound >= least) {
      if (expired()) return stop(latency + more * least);
      Solution s;
      if (!solve(bound, pool_->best() - constant_ - more * least, &s)) return true;
      Seconds period = offer(s);
      latency = s.latency;
      // Below the slack of launch counts, which let this plan pass for slightly faster ones.
      bound = std::min(std::min(period, bound) * (1 - 4 * kCountSlack),
                       (pool_->best() * (1 - kSlack) - constant_ - latency) / more);
    }
    return true;
  }

 private:
  struct Step {
    int first, end, mesh;
  };
  struct Solution {
    Seconds latency = 0;  // sum of t, cF, cB, and the longest reduce
    std::vector<Step> steps;
  };
  struct Label {
    Seconds latency;
    Launch launch;
    Seconds reduce;
    int move, next, behind, parent;  // parent: label of the state (next, behind)
  };
  bool expired() const {
    options_.deadline.spend(layers_);
    return options_.deadline.over();
  }

  // The period if every sub-cluster ran stages of its best mesh without loss: where to start
  // looking, no bound.
  Seconds estimate() {
    double rate = 0;  // models per second
    for (const std::vector<Move>* moves : starts_) {
      double best = 0;
      for (const Move& move : *moves)
        for (int end = layers_; end > 0; end /= 2) {
          Seconds t = table_->time(move.mesh, 0, end);
          if (t == kInfinity) continue;
          const Mesh& mesh = table_->mesh(move.mesh);
          double meshes = static_cast<double>(problem_.clusters[mesh.cluster].size()) / mesh.size();
          best = std::max(best, end * meshes / (t * layers_));
          break;
        }
      rate += best;
    }
    return rate > 0 ? 1 / rate : 1e-12;
  }

  // Time ran out; no plan of this chain is below `bound`.
  bool stop(Seconds bound) {
    result_->lower_bound = std::min(result_->lower_bound, constant_ + bound);
    return false;
  }

  void reset() {
    low_.assign(positions_.size(), 0);
    high_.assign(positions_.size(), layers_);
    for (int root : roots_) high_[blocks_[root].begin] = 0;
    for (const Block& block : blocks_)
      if (block.next.empty()) low_[block.end] = layers_;
  }

  // The only stage that holds both ends of the model pays no tied reduction.
  void single_stage() {
    for (int root : roots_)
      for (const Move& move : *positions_[blocks_[root].begin].moves) {
        if (track_.last(track_.behind(blocks_[root].begin, move)) &&
            table_->time(move.mesh, 0, layers_) < kInfinity)
          offer({0, {{0, layers_, move.mesh}}});
      }
  }

  // reach_[position]: a lower bound on k such that the devices from there on can take the layers
  // k.. with t <= p and links of at most p; layers + 1 if they cannot. False: no plan has a period
  // of p.
  bool reachable(Seconds p) {
    track_.allow(p);
    reach_.assign(positions_.size(), layers_ + 1);
    struct Known {
      int row = -2, behind_row = -2, end = -1, first = -1, length = 0;
    };
    std::vector<Known> memo(meshes_);
    for (int at = track_.size() - 1; at >= 0; --at) {
      if (const std::vector<Next>* next = track_.next_of(at)) {
        if (next->empty()) reach_[at] = layers_;
        for (const Next& n : *next)
          if (const int k = reach_[blocks_[n.block].begin]; k < layers_)
            if (const int first = track_.allowed_up[n.row][k]; first < layers_)
              reach_[at] = std::min(reach_[at], first);
        continue;
      }
      const int row = positions_[at].row;
      for (const Move& move : *positions_[at].moves) {
        const int to = track_.behind(at, move), end = reach_[to];
        if (end > layers_) continue;
        const bool to_last = track_.last(to);
        const int behind_row = to_last ? -1 - layers_ : positions_[to].row;
        Known& known = memo[move.mesh];
        if (known.end != end || known.row != row || known.behind_row != behind_row) {
          known = {row, behind_row, end, layers_ + 1, known.length};
          // The least end that leaves a layer for this stage; the first layer grows with it.
          for (int e = std::max(1, end); e <= layers_; e = track_.up(e + 1, to)) {
            int first = table_->leftmost(move.mesh, e, p, known.length);
            known.length = e - first;
            first = track_.up(first, at);
            if (first < e) known.first = first;
            if (first < e || to_last || e == layers_) break;
          }
        }
        reach_[at] = std::min(reach_[at], known.first);
      }
    }
    return std::any_of(roots_.begin(), roots_.end(),
                       [&](int root) { return reach_[blocks_[root].begin] == 0; });
  }

  // Narrows [low_[at], high_[at]], the first layers that a stage starting there may have. False: no
  // plan.
  bool narrow(Seconds p) {
    if (!reachable(p)) return false;
    for (int at = 0; at < track_.size(); ++at) low_[at] = std::max(low_[at], reach_[at]);
    std::vector<int> most(positions_.size(), -1);  // layers before, the mirror image
    for (int root : roots_) most[blocks_[root].begin] = 0;
    std::vector<std::pair<int, int>> memo(meshes_, {-1, -1});  // [mesh] (first, rightmost)
    for (int at = 0; at < track_.size(); ++at) {
      if (const std::vector<Next>* next = track_.next_of(at)) {
        for (const Next& n : *next)
          if (most[at] > 0) {
            int& there = most[blocks_[n.block].begin];
            if (const int k = track_.allowed_down[n.row][most[at]]; k > 0)
              there = std::max(there, k);
          }
        continue;
      }
      for (const Move& move : *positions_[at].moves) {
        const int to = track_.behind(at, move);
        for (int first = std::min(most[at], layers_ - 1); first >= 0;
             first = track_.down(first - 1, at)) {
          auto& [known_first, known] = memo[move.mesh];
          if (known_first != first) {
            known_first = first;
            known = table_->rightmost(move.mesh, first, p);
          }
          int end = track_.down(known, to);
          if (end > first) most[to] = std::max(most[to], end);
          if (end > first || first == 0) break;
        }
      }
    }
    for (int at = 0; at < track_.size(); ++at) {
      high_[at] = std::min(high_[at], most[at]);
      if (track_.last(at)) continue;
      high_[at] = std::min(high_[at], layers_ - 1);
      if (most[at] != 0) low_[at] = std::max(low_[at], 1);
    }
    return true;
  }

  // First phase: fills suffix_[at][k - low] with the least latency of the layers k.. on the devices
  // from there on.
  void solve_suffix(Seconds p) {
    for (int at = track_.size() - 1; at >= 0; --at) {
      int low = low_[at], high = high_[at];
      suffix_[at].assign(std::max(0, high - low + 1), Cell());
      if (low > high) continue;
      Cell* cells = suffix_[at].data();
      if (const std::vector<Next>* next = track_.next_of(at)) {
        if (next->empty()) cells[layers_ - low] = {0, -1, layers_};
        for (size_t i = 0; i < next->size(); ++i) {
          const int to = blocks_[(*next)[i].block].begin, row = (*next)[i].row;
          for (int k = std::max(low, low_[to]); k <= std::min(high, high_[to]); ++k) {
            if (link_worst_[row][k] > p) continue;
            const Seconds latency = suffix_[to][k - low_[to]].latency + link_total_[row][k];
            if (latency < cells[k - low].latency)
              cells[k - low] = {latency, static_cast<int>(i), k};
          }
        }
        continue;
      }
      const std::vector<Move>& moves = *positions_[at].moves;
      for (size_t m = 0; m < moves.size(); ++m) {
        const Move& move = moves[m];
        const int to = track_.behind(at, move);
        const auto& from = suffix_[to];
        for (int end = std::max(low_[to], low + 1); end <= high_[to]; ++end) {
          Seconds tail = from[end - low_[to]].latency;
          if (tail == kInfinity || track_.slow(end, to, p)) continue;
          tail += track_.gap(end, to);
          const CostTable::Row row = table_->row(move.mesh, end);
          for (int k = std::min(high, end - 1); k >= low; --k) {
            Seconds t = end - k <= row.lengths ? row.times[end - k - 1] : 0;
            if (t == 0) t = table_->time(move.mesh, k, end);
            if (t > p) break;  // longer stages take longer
            if (t + tail < cells[k - low].latency)
              cells[k - low] = {t + tail, static_cast<int>(m), end};
          }
        }
      }
    }
  }

  // prefix_[at][k - low]: the least latency of the layers before k on the devices before, without
  // the link between, inside a block.
  void solve_prefix(Seconds p) {
    for (int at = 0; at < track_.size(); ++at)
      prefix_[at].assign(std::max(0, high_[at] - low_[at] + 1), kInfinity);
    for (int root : roots_)
      if (auto& first = prefix_[blocks_[root].begin]; !first.empty())
        first[0] = blocks_[root].extra;
    for (int at = 0; at < track_.size(); ++at) {
      if (low_[at] > high_[at]) continue;
      if (const std::vector<Next>* next = track_.next_of(at)) {
        for (const Next& n : *next) {
          const int to = blocks_[n.block].begin;
          for (int k = std::max(low_[at], low_[to]); k <= std::min(high_[at], high_[to]); ++k) {
            if (link_worst_[n.row][k] > p) continue;
            Seconds& best = prefix_[to][k - low_[to]];
            best = std::min(best, prefix_[at][k - low_[at]] + link_total_[n.row][k]);
          }
        }
        continue;
      }
      for (const Move& move : *positions_[at].moves) {
        const int to = track_.behind(at, move);
        for (int end = low_[to]; end <= high_[to]; ++end) {
          Seconds& best = prefix_[to][end - low_[to]];
          const CostTable::Row row = table_->row(move.mesh, end);
          for (int k = std::min(high_[at], end - 1); k >= low_[at]; --k) {
            Seconds t = end - k <= row.lengths ? row.times[end - k - 1] : 0;
            if (t == 0) t = table_->time(move.mesh, k, end);
            if (t > p) break;
            if (track_.slow(k, at, p)) continue;
            best = std::min(best, prefix_[at][k - low_[at]] + track_.gap(k, at) + t);
          }
        }
      }
    }
  }

  // Drops states that no plan below the cutoff passes through.
  void tighten(Seconds cutoff) {
    for (int at = 0; at < track_.size(); ++at) {
      int low = low_[at], high = high_[at];
      auto dead = [&](int k) {
        return suffix_[at][k - low_[at]].latency + track_.gap(k, at) + prefix_[at][k - low_[at]] >
               cutoff;
      };
      while (low <= high && dead(low)) ++low;
      while (low <= high && dead(high)) --high;
      const auto trim = [&](auto& cells) {
        if (low > high) return cells.clear();
        cells.erase(cells.begin() + (high + 1 - low_[at]), cells.end());
        cells.erase(cells.begin(), cells.begin() + (low - low_[at]));
      };
      trim(suffix_[at]), trim(prefix_[at]);
      low_[at] = low;
      high_[at] = high;
    }
  }

  // The plan of least latency among those with a period of at most p and a latency of at most
  // `cutoff`. False: there is none.
  bool solve(Seconds p, Seconds cutoff, Solution* solution) {
    ++result_->solves;
    if (!narrow(p)) return false;
    solve_suffix(p);
    solution->latency = kInfinity;
    int at = 0;
    for (int root : roots_) {
      const Block& block = blocks_[root];
      if (suffix_[block.begin].empty()) continue;
      const Seconds latency = suffix_[block.begin][0].latency + block.extra;
      if (latency < solution->latency) solution->latency = latency, at = block.begin;
    }
    if (solution->latency == kInfinity || solution->latency > cutoff * (1 + kSlack)) return false;
    solution->steps.clear();
    for (int k = 0; !track_.last(at);) {
      const Cell& cell = suffix_[at][k - low_[at]];
      if (const std::vector<Next>* next = track_.next_of(at)) {
        at = blocks_[(*next)[cell.move].block].begin;
        continue;
      }
      const Move& move = (*positions_[at].moves)[cell.move];
      solution->steps.push_back({k, cell.next, move.mesh});
      k = cell.next;
      at = track_.behind(at, move);
    }
    if (pipelines_ == 1 && launches(*solution, p)) {
      solve_prefix(p);
      tighten(cutoff * (1 + kSlack));
      return true;
    }
    // Slower than p under its memory, but a plan.
    offer(*solution);
    cutoff = std::min(cutoff, pool_->best() - constant_ - (micro_batches_ - 1) * least_);
    solve_prefix(p);
    tighten(cutoff * (1 + kSlack));
    return solve_labels(p, cutoff, solution);
  }

  // Whether the exact counts for period p fit into the stages' memory.
  bool launches(const Solution& s, Seconds p) {
    Launch launch;
    const auto cluster = [&](size_t i) { return table_->mesh(s.steps[i].mesh).cluster; };
    for (size_t i = s.steps.size(); i-- > 0;) {
      const Step& step = s.steps[i];
      Seconds t = table_->time(step.mesh, step.first, step.end);
      if (i + 1 == s.steps.size())
        launch = launch_last(t);
      else
        launch =
            launch_before(launch, t, table_->link(step.end, cluster(i), cluster(i + 1)).total(), p);
      if (launch.count > table_->limit(step.mesh, step.first, step.end)) return false;
    }
    return true;
  }

  // Adds a label to those that no other is as fast as and launches as little, by latency, if it is
  // one; for one pipeline, whose labels reduce nothing.
  static void keep(const Label& label, std::vector<Label>* kept) {
    const auto at = std::lower_bound(
        kept->begin(), kept->end(), label.latency,
        [](const Label& other, Seconds latency) { return other.latency < latency; });
    const auto dominates = [&](const Label& other) {
      return other.latency <= label.latency && other.launch.state <= label.launch.state;
    };
    if (at != kept->begin() && dominates(*(at - 1))) return;
    if (at != kept->end() && dominates(*at)) return;
    auto end = at;
    while (end != kept->end() && end->launch.state >= label.launch.state) ++end;
    if (end == at) {
      kept->insert(at, label);
      return;
    }
    *at = label;
    kept->erase(at + 1, end);
  }

  // Second phase: Pareto labels in the states that the first phase left.
  bool solve_labels(Seconds p, Seconds cutoff, Solution* solution) {
    ++result_->label_solves;
    std::vector<std::vector<std::vector<Label>>> labels(positions_.size());
    Seconds limit = cutoff * (1 + kSlack);
    std::vector<Label> fresh;
    for (int at = track_.size() - 1; at >= 0; --at) {
      int low = low_[at], high = high_[at];
      labels[at].resize(std::max(0, high - low + 1));
      if (track_.last(at) && low <= high) labels[at][0].push_back({0, {0, 0}, 0, -1, 0, -1, -1});
      if (positions_[at].moves == nullptr) continue;
      const std::vector<Move>& moves = *positions_[at].moves;
      for (int k = low; k <= high; ++k) {
        Seconds rest = prefix_[at][k - low] + track_.gap(k, at);
        if (!(suffix_[at][k - low].latency + rest <= limit)) continue;
        fresh.clear();
        std::vector<Label>& kept = labels[at][k - low];
        for (size_t m = 0; m < moves.size(); ++m) {
          const Move& move = moves[m];
          const int to = track_.behind(at, move);
          // Behind a sub-cluster the next stage starts in any that may follow.
          const std::vector<Next>* next = track_.next_of(to);
          const bool inside = next == nullptr || next->empty();
          const size_t ways = inside ? 1 : next->size();
          for (size_t way = 0; way < ways; ++way) {
            const int tail_at = inside ? to : blocks_[(*next)[way].block].begin;
            const int row = inside ? positions_[to].row : (*next)[way].row;
            for (int end = std::max(low_[tail_at], k + 1); end <= high_[tail_at]; ++end) {
              Seconds t = table_->time(move.mesh, k, end);
              if (t > p) break;
              const auto& tails = labels[tail_at][end - low_[tail_at]];
              if (tails.empty() || (row >= 0 && link_worst_[row][end] > p)) continue;
              Seconds link = row >= 0 ? link_total_[row][end] : 0;
              int room = table_->limit(move.mesh, k, end);
              Seconds reduce = table_->reduce(move.mesh, k, end);
              for (size_t i = 0; i < tails.size(); ++i) {
                const Label& tail = tails[i];
                Seconds latency = tail.latency + link + t;
                if (latency + rest > limit) break;
                Seconds most = std::max(reduce, tail.reduce);
                if (latency + rest + most > limit) continue;
                Launch launch =
                    track_.last(to) ? launch_last(t) : launch_before(tail.launch, t, link, p);
                if (launch.count > room) continue;
                const Label label{
                    latency, launch, most, static_cast<int>(m), end, tail_at, static_cast<int>(i)};
                if (pipelines_ == 1)
                  keep(label, &kept);
                else
                  fresh.push_back(label);
              }
            }
          }
        }
        std::sort(fresh.begin(), fresh.end(), [](const Label& a, const Label& b) {
          return std::tie(a.latency, a.launch.state, a.reduce) <
                 std::tie(b.latency, b.launch.state, b.reduce);
        });
        for (const Label& label : fresh) {  // all kept so far are as fast
          const auto dominates = [&](const Label& other) {
            return other.launch.state <= label.launch.state && other.reduce <= label.reduce;
          };
          if (std::none_of(kept.rbegin(), kept.rend(), dominates)) kept.push_back(label);
        }
        result_->labels += static_cast<int64_t>(kept.size());
      }
    }
    const Label* best = nullptr;
    int at = 0;
    solution->latency = kInfinity;
    for (int root : roots_) {
      const Block& block = blocks_[root];
      if (labels[block.begin].empty()) continue;
      for (const Label& label : labels[block.begin][0])
        if (const Seconds latency = label.latency + label.reduce + block.extra;
            latency < solution->latency)
          solution->latency = latency, best = &label, at = block.begin;
    }
    if (best == nullptr) return false;
    solution->steps.clear();
    for (int k = 0; !track_.last(at);) {
      solution->steps.push_back({k, best->next, (*positions_[at].moves)[best->move].mesh});
      k = best->next;
      at = best->behind;
      best = &labels[at][k - low_[at]][best->parent];
    }
    return true;
  }

  // Enters a plan into the pool; returns its period.
  Seconds offer(const Solution& solution) {
    std::vector<Stage> stages;
    for (const Step& step : solution.steps)
      stages.push_back({step.first, step.end - 1, table_->mesh(step.mesh),
                        table_->profile(step.mesh, step.first, step.end)});
    PipelinePlan plan =
        evaluate(problem_, stages, micro_batch_, micro_batches_, pipelines_, options_.memory_limit);
    const Seconds period = plan.period;
    pool_->offer(std::move(plan));
    return period;
  }

  const SearchProblem& problem_;
  const SearchOptions& options_;
  CostTable* table_;
  Shared& shared_;
  int64_t micro_batch_;
  int micro_batches_, pipelines_, layers_;
  Pool* pool_;
  SearchResult* result_;
  int meshes_ = 0;
  Seconds least_ = 0;     // no plan has a shorter period
  Seconds constant_ = 0;  // tied reduction, the least
  Track track_;
  std::vector<Block>& blocks_ = track_.blocks;
  const std::vector<int>& roots_ = track_.roots;
  const std::vector<Track::Position>& positions_ = track_.positions;
  std::vector<const std::vector<Move>*> starts_;  // of the first device of each cluster
  const std::vector<std::vector<Seconds>>& link_total_ = track_.link_total;
  const std::vector<std::vector<Seconds>>& link_worst_ = track_.link_worst;
  std::vector<int> low_, high_, reach_;                      // [position]
  std::vector<std::vector<Cell>>& suffix_ = shared_.suffix;  // [position][k - low]
  std::vector<std::vector<Seconds>>& prefix_ = shared_.prefix;
};

}  // namespace

bool search_chain(const ChainProblem& chain, CostTable* table, Shared* shared, Pool* pool,
                  SearchResult* result) {
  return Chain(chain, table, shared, pool, result).run();
}

}  // namespace motley::pipeline
