#include "pipeline/search.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <tuple>
#include <unordered_map>

#include "core/error.h"
#include "pipeline/schedules.h"

namespace motley::pipeline {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Seconds kLongest = 1e30;  // a period that bounds nothing
constexpr int kUnlimited = 1 << 30;
constexpr double kSlack = 1e-12;
constexpr double kClose = 0.02;     // of periods, between which no incumbent is looked for
constexpr double kMostCells = 4e7;  // states of orders that are searched at once
constexpr int kSizeBits = 20;       // of sub-clusters' sizes

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Micro-batches that fit beside the state of a stage, up to rounding; all of them: no limit.
int in_flight_limit(const StageProfile& profile, Bytes memory, int micro_batches, bool limited) {
  if (!limited) return kUnlimited;
  Bytes left = memory * (1 + kSlack) - profile.state;
  if (left < 0) return 0;
  if (profile.activation * micro_batches <= left) return kUnlimited;
  return static_cast<int>(std::floor(left / profile.activation));
}

// Zero-filled memory; if it is large, its pages cost nothing until they are touched. (What calloc()
// takes from the heap, it clears.)
template <typename T>
class Sparse {
 public:
  T* allocate(size_t n) {
    const size_t bytes = n * sizeof(T), mapped = bytes < kHeap ? 0 : bytes;
    void* memory = mapped == 0 ? std::calloc(n, sizeof(T))
                               : mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MOTLEY_CHECK(memory != nullptr && memory != MAP_FAILED, "out of memory");
    data_ = {static_cast<T*>(memory), Free{mapped}};
    return data_.get();
  }
  T* get() const { return data_.get(); }

 private:
  static constexpr size_t kHeap = size_t{1} << 16;  // bytes
  struct Free {
    size_t mapped = 0;
    void operator()(T* p) const { mapped > 0 ? void(munmap(p, mapped)) : std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
};

// Stage costs of one micro-batch size and number of pipelines, by mesh and (last layer, length).
// Where the layers before one end are those before a later one, as in a model of equal blocks, both
// ends share a row, so that the rows in use stay in the caches.
class CostTable {
 public:
  CostTable(const SearchProblem& problem, const SearchOptions& options, int64_t micro_batch,
            int micro_batches, int pipelines)
      : problem_(problem),
        options_(options),
        micro_batch_(micro_batch),
        micro_batches_(micro_batches),
        pipelines_(pipelines),
        layers_(problem.layers) {
    // same_[end][other]: layers that the sequences ending there have in common, going back; kept
    // only as the least end whose sequence of a length is equal.
    if (!problem.layer_class.empty()) {
      size_t n = static_cast<size_t>(layers_);
      least_end_.assign(n * n, 0);
      std::vector<int> common(n * n, 0);
      for (int a = 0; a < layers_; ++a)
        for (int b = 0; b <= a; ++b)
          if (problem.layer_class[a] == problem.layer_class[b])
            common[a * n + b] = 1 + (b > 0 ? common[(a - 1) * n + b - 1] : 0);
      for (int a = 0; a < layers_; ++a) {
        int length = 0;
        for (int b = 0; b <= a; ++b)
          for (; length < common[a * n + b]; ++length) least_end_[a * n + length] = b;
      }
      share_rows(common);
    } else {
      row_of_.resize(layers_);
      std::iota(row_of_.begin(), row_of_.end(), 0);
      shared_.assign(layers_, layers_);
    }
  }

  // Number of a mesh in this table.
  int mesh(const Mesh& mesh) {
    uint64_t key = static_cast<uint64_t>(mesh.cluster);
    for (int part : {mesh.at, mesh.nodes, mesh.devices})
      key = key << kSizeBits | static_cast<uint64_t>(part);
    key = key << 1 | static_cast<uint64_t>(mesh.recompute);
    auto [it, fresh] = numbers_.try_emplace(key, static_cast<int>(meshes_.size()));
    if (!fresh) return it->second;
    meshes_.push_back(mesh);
    useful_.push_back(-1);
    time_.emplace_back();
    limit_.emplace_back();
    reduce_.emplace_back();
    return static_cast<int>(meshes_.size()) - 1;
  }
  const Mesh& mesh(int m) const { return meshes_[m]; }
  // Whether some layer fits the mesh.
  bool useful(int m) {
    if (useful_[m] < 0) {
      useful_[m] = 0;
      for (int l = 0; l < layers_ && useful_[m] == 0; ++l)
        useful_[m] = time(m, l, l + 1) < kInfinity;
    }
    return useful_[m] == 1;
  }

  // t of layers first..end-1; infinite if not one micro-batch fits.
  Seconds time(int m, int first, int end) {
    size_t at = index(first, end);
    Seconds* table = time_[m].get();
    if (table == nullptr || table[at] == 0) {
      fill(m, first, end, at);
      table = time_[m].get();
    }
    return table[at];
  }
  // Times by length of stages that end at `end`: entry [length - 1] up to `lengths`, 0 where not
  // yet known.
  struct Row {
    const Seconds* times;
    int lengths;
  };
  Row row(int m, int end) {
    if (time_[m].get() == nullptr) allocate(m);
    return {time_[m].get() + static_cast<size_t>(row_of_[end - 1]) * layers_, shared_[end - 1]};
  }
  int limit(int m, int first, int end) { return limit_[m].get()[index(first, end)]; }
  Seconds reduce(int m, int first, int end) {
    return pipelines_ == 1 ? 0 : reduce_[m].get()[index(first, end)];
  }
  const StageProfile& profile(int m, int first, int end) {
    int length = end - first;
    int last = least_end_.empty()
                   ? end - 1
                   : least_end_[static_cast<size_t>(end - 1) * layers_ + (length - 1)];
    uint64_t key = (static_cast<uint64_t>(m) * layers_ + last) * layers_ + (length - 1);
    auto [it, fresh] = profiles_.try_emplace(key);
    if (fresh) {
      double start = now();
      it->second =
          problem_.stage_cost({last - length + 1, last, meshes_[m], micro_batch_, pipelines_});
      seconds += now() - start;
      ++planned;
    }
    return it->second;
  }
  LinkTime link(int layer, int from, int to) const {
    return problem_.link_cost(layer, from, to, micro_batch_, pipelines_);
  }

  int64_t planned = 0;
  double seconds = 0;

 private:
  // Place of a stage in the tables.
  size_t index(int first, int end) const {
    const int length = end - first;
    const int row = length <= shared_[end - 1] ? row_of_[end - 1] : end - 1;
    return static_cast<size_t>(row) * layers_ + (length - 1);
  }
  // From the last end on: an end that has most of its layers in common with one that has a row of
  // its own uses that row. common[a * layers + b], b <= a: as in the constructor.
  void share_rows(const std::vector<int>& common) {
    row_of_.resize(layers_);
    shared_.resize(layers_);
    std::vector<int> rows;
    for (int a = layers_ - 1; a >= 0; --a) {
      int most = 0;
      for (int r : rows) {
        const int length = common[static_cast<size_t>(r) * layers_ + a];
        if (length > most) most = length, row_of_[a] = r;
      }
      shared_[a] = most;
      if (2 * most > a) continue;
      rows.push_back(row_of_[a] = a);
      shared_[a] = layers_;
    }
  }
  void allocate(int m) {
    size_t n = static_cast<size_t>(layers_) * layers_;
    time_[m].allocate(n);
    limit_[m].allocate(n);
    if (pipelines_ > 1) reduce_[m].allocate(n);
  }
  void fill(int m, int first, int end, size_t at) {
    if (time_[m].get() == nullptr) allocate(m);
    const StageProfile& p = profile(m, first, end);
    int limit = p.feasible ? in_flight_limit(p, problem_.clusters[meshes_[m].cluster].memory,
                                             micro_batches_, options_.memory_limit)
                           : 0;
    Seconds t = p.forward + p.backward;
    time_[m].get()[at] = limit < 1 ? kInfinity : std::max(t, 1e-300);
    limit_[m].get()[at] = limit;
    if (pipelines_ > 1) reduce_[m].get()[at] = p.reduce;
  }

  const SearchProblem& problem_;
  const SearchOptions& options_;
  int64_t micro_batch_;
  int micro_batches_, pipelines_, layers_;
  std::vector<int> least_end_;
  std::vector<int> row_of_, shared_;  // [last layer] row of stages up to so many layers
  std::unordered_map<uint64_t, int> numbers_;
  std::vector<Mesh> meshes_;
  std::vector<int> useful_;  // [mesh] -1: not yet known
  std::vector<Sparse<Seconds>> time_, reduce_;
  std::vector<Sparse<int>> limit_;
  std::unordered_map<uint64_t, StageProfile> profiles_;
};

// Plans met, best first, and the incumbent.
struct Pool {
  size_t capacity = 8;
  Seconds worth = kInfinity;  // of the worst
  std::vector<PipelinePlan> plans;
  Seconds best() const { return plans.empty() ? worth : plans[0].objective; }
  void offer(PipelinePlan plan) {
    if (plan.objective > worth) return;
    for (const PipelinePlan& other : plans)
      if (other.objective == plan.objective && other.stages.size() == plan.stages.size() &&
          std::equal(other.stages.begin(), other.stages.end(), plan.stages.begin(),
                     [](const Stage& a, const Stage& b) {
                       return a.first == b.first && a.mesh == b.mesh;
                     }))
        return;
    auto at = std::upper_bound(plans.begin(), plans.end(), plan.objective,
                               [](Seconds t, const PipelinePlan& p) { return t < p.objective; });
    plans.insert(at, std::move(plan));
    if (plans.size() > capacity) plans.pop_back();
  }
};

struct Move {
  int mesh;
  int behind;  // device
};

struct Cell {
  Seconds latency = kInfinity;
  int move = -1;  // of the position; behind a sub-cluster, into Block::next
  int next = 0;   // layer behind
};

using Orders = std::vector<std::vector<int>>;  // of sub-clusters

// What the chains of one table of costs know of each other, and memory that they use in turn.
struct Shared {
  std::map<std::pair<Shapes, int>, std::vector<std::vector<Move>>> moves;  // [device of a cluster]
  Seconds reach = 0;        // a period that some chain can have; 0: none yet
  bool incumbents = false;  // some chain has looked for them
  std::vector<std::vector<Cell>> suffix;
  std::vector<std::vector<Seconds>> prefix;
};

// Some orders of sub-clusters, one family of meshes.
class Chain {
 public:
  // REQUIRES: with two orders that use the same sub-clusters first and the same one next, the
  // beginning of either in front of the rest of the other; with a tied parameter, one last
  // sub-cluster.
  Chain(const SearchProblem& problem, const SearchOptions& options, CostTable* table,
        Shared* shared, const Orders& orders, Shapes shapes, int64_t micro_batch, int micro_batches,
        int pipelines, SearchResult* result, double deadline)
      : problem_(problem),
        options_(options),
        table_(table),
        shared_(*shared),
        micro_batch_(micro_batch),
        micro_batches_(micro_batches),
        pipelines_(pipelines),
        layers_(problem.layers),
        result_(result),
        deadline_(deadline) {
    add_blocks(orders, shapes);
    reset();
    for (int c : orders[0]) {
      starts_.push_back(&moves_of(c, shapes)[0]);
      for (const auto& moves : moves_of(c, shapes))
        for (const Move& move : moves) meshes_ = std::max(meshes_, move.mesh + 1);
    }
    if (problem.tied_cost) {
      for (int root : roots_)
        blocks_[root].extra = problem.tied_cost(blocks_[root].cluster, orders[0].back(), pipelines);
      constant_ = kInfinity;
      for (int root : roots_) constant_ = std::min(constant_, blocks_[root].extra);
      for (int root : roots_) blocks_[root].extra -= constant_;
    }
    if (suffix_.size() < positions_.size()) {
      suffix_.resize(positions_.size());
      prefix_.resize(positions_.size());
    }
  }

  // Every plan with an objective below the pool's best has been seen when this returns true; false:
  // time ran out.
  bool run(Pool* pool) {
    pool_ = pool;
    single_stage(pool);
    double more = micro_batches_ - 1;
    if (micro_batches_ == 1) {
      Solution s;
      if (solve(kLongest, pool->best() - constant_, &s)) offer(s, pool);
      return true;
    }
    if (std::isfinite(pool->best()) && !reachable((pool->best() - constant_) / micro_batches_))
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
      if (bound * micro_batches_ >= pool->best()) break;
      Solution s;
      reset();
      if (solve(bound, pool->best() - constant_ - more * least, &s)) {
        const Seconds period = offer(s, pool);
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
      if (solve(middle, pool->best() - constant_ - more * least, &s))
        met = std::min(offer(s, pool), middle);
      else
        missed = middle;
    }
    reset();
    Seconds bound =
        std::isfinite(pool->best()) ? (pool->best() - constant_) / micro_batches_ : kLongest;
    Seconds latency = least;
    while (bound >= least) {
      if (expired()) return stop(latency + more * least);
      Solution s;
      if (!solve(bound, pool->best() - constant_ - more * least, &s)) return true;
      Seconds period = offer(s, pool);
      latency = s.latency;
      // Below the slack of launch counts, which let this plan pass for slightly faster ones.
      bound = std::min(std::min(period, bound) * (1 - 4 * kCountSlack),
                       (pool->best() * (1 - kSlack) - constant_ - latency) / more);
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
  // A sub-cluster behind a set of others: orders that agree on both share it.
  struct Next {
    int block;
    int row;  // of the links to it
  };
  struct Block {
    int cluster;
    int begin = 0, end = 0;  // positions: of its first device, and behind its last
    Seconds extra = 0;       // tied reduction beyond constant_, of a first one
    std::vector<Next> next;  // none: the last of its orders
  };
  struct Position {
    const std::vector<Move>* moves;  // null: behind the last device
    int block, begin;                // and its first position
    int row;  // of the links in front of a stage that starts here; -1: none inside of the block
  };

  // Blocks stand behind those in front of them.
  void add_blocks(const Orders& orders, Shapes shapes) {
    std::map<std::tuple<size_t, uint32_t, int>, int> numbers;  // place, sub-clusters used, the last
    const auto visit = [&](const std::vector<int>& order, auto f) {
      uint32_t used = 0;
      for (size_t i = 0; i < order.size(); ++i) {
        used |= uint32_t{1} << order[i];
        f(i, numbers[{i, used, order[i]}]);
      }
    };
    for (const auto& order : orders) visit(order, [](size_t, int&) {});
    for (auto& [key, number] : numbers) {
      number = static_cast<int>(blocks_.size());
      Block block;
      block.cluster = std::get<2>(key);
      block.begin = size();
      const auto& moves = moves_of(block.cluster, shapes);
      for (size_t d = 0; d < moves.size(); ++d)
        positions_.push_back(
            {&moves[d], number, block.begin, d == 0 ? -1 : link_row(block.cluster, block.cluster)});
      block.end = size();
      positions_.push_back({nullptr, number, block.begin, -1});
      blocks_.push_back(std::move(block));
    }
    for (const auto& order : orders) {
      int before = -1;
      visit(order, [&](size_t, int number) {
        if (before < 0) {
          if (std::find(roots_.begin(), roots_.end(), number) == roots_.end())
            roots_.push_back(number);
        } else {
          std::vector<Next>& next = blocks_[before].next;
          if (std::none_of(next.begin(), next.end(),
                           [&](const Next& n) { return n.block == number; }))
            next.push_back({number, link_row(blocks_[before].cluster, blocks_[number].cluster)});
        }
        before = number;
      });
    }
  }

  // Links by the layer behind them, from a stage on one sub-cluster to one on another.
  int link_row(int from, int to) {
    auto [it, fresh] = rows_.try_emplace({from, to}, static_cast<int>(link_total_.size()));
    if (!fresh) return it->second;
    link_total_.emplace_back(layers_ + 1, 0);
    link_worst_.emplace_back(layers_ + 1, 0);
    for (int k = 1; k < layers_; ++k) {
      const LinkTime l = table_->link(k, from, to);
      link_total_.back()[k] = l.total();
      link_worst_.back()[k] = std::max(l.forward, l.backward);
    }
    return it->second;
  }

  int size() const { return static_cast<int>(positions_.size()); }
  // Of a position behind all devices of a sub-cluster, where it leads; null: it is another.
  const std::vector<Next>* next_of(int at) const {
    return positions_[at].moves == nullptr ? &blocks_[positions_[at].block].next : nullptr;
  }
  bool last(int at) const {
    const std::vector<Next>* next = next_of(at);
    return next != nullptr && next->empty();
  }
  // Positions count from the first device of their block.
  int behind(int at, const Move& move) const { return positions_[at].begin + move.behind; }

  // Of every device of a sub-cluster, counted from its first.
  const std::vector<std::vector<Move>>& moves_of(int c, Shapes shapes) {
    auto [it, fresh] = shared_.moves.try_emplace({shapes, c});
    if (!fresh) return it->second;
    const SubCluster& sub = problem_.clusters[c];
    for (int d = 0; d < sub.size(); ++d) {
      it->second.emplace_back();
      for_each_mesh(sub, c, shapes, d, [&](Mesh mesh, int behind) {
        for (bool recompute : {false, true}) {
          if (recompute && !options_.recompute) break;
          mesh.recompute = recompute;
          const int m = table_->mesh(mesh);
          if (table_->useful(m)) it->second.back().push_back({m, behind});
        }
      });
    }
    return it->second;
  }

  bool expired() const { return deadline_ > 0 && now() > deadline_; }

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

  // Of the link in front of a stage, inside a block: those to the next are in its end.
  Seconds gap(int k, int at) const {
    const int row = positions_[at].row;
    return row < 0 ? 0 : link_total_[row][k];
  }
  bool slow(int k, int at, Seconds p) const {
    const int row = positions_[at].row;
    return row >= 0 && link_worst_[row][k] > p;
  }

  // The only stage that holds both ends of the model pays no tied reduction.
  void single_stage(Pool* pool) {
    for (int root : roots_)
      for (const Move& move : *positions_[blocks_[root].begin].moves) {
        if (!last(behind(blocks_[root].begin, move))) continue;
        if (table_->time(move.mesh, 0, layers_) == kInfinity) continue;
        Solution s;
        s.steps = {{0, layers_, move.mesh}};
        offer(s, pool);
      }
  }

  // Leftmost first layer of a stage that ends at `end` and takes at most p; `end` if none. Gallops
  // from a stage of `length` layers.
  int leftmost(int m, int end, Seconds p, int length) {
    int good = end, bad = -1;  // good: fits, or empty; bad: does not, or out of bounds
    int at = std::clamp(end - length, 0, end);
    if (at == end || table_->time(m, at, end) <= p) {
      good = at;
      for (int step = 1; good - step > bad; step *= 2) {
        if (table_->time(m, good - step, end) > p) {
          bad = good - step;
          break;
        }
        good -= step;
      }
    } else {
      bad = at;
      for (int step = 1; bad + step < good; step *= 2) {
        if (table_->time(m, bad + step, end) <= p) {
          good = bad + step;
          break;
        }
        bad += step;
      }
    }
    while (good - bad > 1) {
      int middle = (good + bad) / 2;
      (table_->time(m, middle, end) <= p ? good : bad) = middle;
    }
    return good;
  }
  // Greatest end of a stage that starts at `first`; `first` if none.
  int rightmost(int m, int first, Seconds p) {
    if (first >= layers_ || table_->time(m, first, first + 1) > p) return first;
    int good = first + 1, bad = layers_ + 1;
    for (int step = 1; good + step < bad; step *= 2) {
      if (table_->time(m, first, good + step) > p) {
        bad = good + step;
        break;
      }
      good += step;
    }
    while (bad - good > 1) {
      int middle = (good + bad) / 2;
      (table_->time(m, first, middle) <= p ? good : bad) = middle;
    }
    return good;
  }

  // allowed_up_[row][k], allowed_down_[row][k]: the nearest layer from k on, or back, in front of
  // which the link of that row takes at most p.
  void allow(Seconds p) {
    allowed_up_.resize(link_worst_.size());
    allowed_down_.resize(link_worst_.size());
    for (size_t r = 0; r < link_worst_.size(); ++r) {
      auto &up = allowed_up_[r], &down = allowed_down_[r];
      up.assign(layers_ + 1, layers_);
      down.assign(layers_ + 1, 0);
      for (int k = layers_ - 1; k >= 0; --k) up[k] = link_worst_[r][k] > p ? up[k + 1] : k;
      for (int k = 1; k <= layers_; ++k) down[k] = link_worst_[r][k] > p ? down[k - 1] : k;
    }
  }

  int up(int k, int at) const {
    const int row = positions_[at].row;
    return row < 0 ? k : allowed_up_[row][k];
  }
  int down(int k, int at) const {
    const int row = positions_[at].row;
    return row < 0 ? k : allowed_down_[row][k];
  }

  // reach_[position]: a lower bound on k such that the devices from there on can take the layers
  // k.. with t <= p and links of at most p; layers + 1 if they cannot. False: no plan has a period
  // of p.
  bool reachable(Seconds p) {
    allow(p);
    reach_.assign(positions_.size(), layers_ + 1);
    struct Known {
      int row = -2, behind_row = -2, end = -1, first = -1, length = 0;
    };
    std::vector<Known> memo(meshes_);
    for (int at = size() - 1; at >= 0; --at) {
      if (const std::vector<Next>* next = next_of(at)) {
        if (next->empty()) reach_[at] = layers_;
        for (const Next& n : *next)
          if (const int k = reach_[blocks_[n.block].begin]; k < layers_)
            if (const int first = allowed_up_[n.row][k]; first < layers_)
              reach_[at] = std::min(reach_[at], first);
        continue;
      }
      const int row = positions_[at].row;
      for (const Move& move : *positions_[at].moves) {
        const int to = behind(at, move), end = reach_[to];
        if (end > layers_) continue;
        const bool to_last = last(to);
        const int behind_row = to_last ? -1 - layers_ : positions_[to].row;
        Known& known = memo[move.mesh];
        if (known.end != end || known.row != row || known.behind_row != behind_row) {
          known = {row, behind_row, end, layers_ + 1, known.length};
          // The least end that leaves a layer for this stage; the first layer grows with it.
          for (int e = std::max(1, end); e <= layers_; e = up(e + 1, to)) {
            int first = leftmost(move.mesh, e, p, known.length);
            known.length = e - first;
            first = up(first, at);
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
    for (int at = 0; at < size(); ++at) low_[at] = std::max(low_[at], reach_[at]);
    std::vector<int> most(positions_.size(), -1);  // layers before, the mirror image
    for (int root : roots_) most[blocks_[root].begin] = 0;
    std::vector<std::pair<int, int>> memo(meshes_, {-1, -1});  // [mesh] (first, rightmost)
    for (int at = 0; at < size(); ++at) {
      if (const std::vector<Next>* next = next_of(at)) {
        for (const Next& n : *next)
          if (most[at] > 0) {
            int& there = most[blocks_[n.block].begin];
            if (const int k = allowed_down_[n.row][most[at]]; k > 0) there = std::max(there, k);
          }
        continue;
      }
      for (const Move& move : *positions_[at].moves) {
        const int to = behind(at, move);
        for (int first = std::min(most[at], layers_ - 1); first >= 0; first = down(first - 1, at)) {
          auto& [known_first, known] = memo[move.mesh];
          if (known_first != first) {
            known_first = first;
            known = rightmost(move.mesh, first, p);
          }
          int end = down(known, to);
          if (end > first) most[to] = std::max(most[to], end);
          if (end > first || first == 0) break;
        }
      }
    }
    for (int at = 0; at < size(); ++at) {
      high_[at] = std::min(high_[at], most[at]);
      if (last(at)) continue;
      high_[at] = std::min(high_[at], layers_ - 1);
      if (most[at] != 0) low_[at] = std::max(low_[at], 1);
    }
    return true;
  }

  // First phase: fills suffix_[at][k - low] with the least latency of the layers k.. on the devices
  // from there on.
  void solve_suffix(Seconds p) {
    for (int at = size() - 1; at >= 0; --at) {
      int low = low_[at], high = high_[at];
      suffix_[at].assign(std::max(0, high - low + 1), Cell());
      if (low > high) continue;
      Cell* cells = suffix_[at].data();
      if (const std::vector<Next>* next = next_of(at)) {
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
        const int to = behind(at, move);
        const auto& from = suffix_[to];
        for (int end = std::max(low_[to], low + 1); end <= high_[to]; ++end) {
          Seconds tail = from[end - low_[to]].latency;
          if (tail == kInfinity || slow(end, to, p)) continue;
          tail += gap(end, to);
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
    for (int at = 0; at < size(); ++at)
      prefix_[at].assign(std::max(0, high_[at] - low_[at] + 1), kInfinity);
    for (int root : roots_)
      if (auto& first = prefix_[blocks_[root].begin]; !first.empty())
        first[0] = blocks_[root].extra;
    for (int at = 0; at < size(); ++at) {
      if (low_[at] > high_[at]) continue;
      if (const std::vector<Next>* next = next_of(at)) {
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
        const int to = behind(at, move);
        for (int end = low_[to]; end <= high_[to]; ++end) {
          Seconds& best = prefix_[to][end - low_[to]];
          const CostTable::Row row = table_->row(move.mesh, end);
          for (int k = std::min(high_[at], end - 1); k >= low_[at]; --k) {
            Seconds t = end - k <= row.lengths ? row.times[end - k - 1] : 0;
            if (t == 0) t = table_->time(move.mesh, k, end);
            if (t > p) break;
            if (slow(k, at, p)) continue;
            best = std::min(best, prefix_[at][k - low_[at]] + gap(k, at) + t);
          }
        }
      }
    }
  }

  // Drops states that no plan below the cutoff passes through.
  void tighten(Seconds cutoff) {
    for (int at = 0; at < size(); ++at) {
      int low = low_[at], high = high_[at];
      auto dead = [&](int k) {
        return suffix_[at][k - low_[at]].latency + gap(k, at) + prefix_[at][k - low_[at]] > cutoff;
      };
      while (low <= high && dead(low)) ++low;
      while (low <= high && dead(high)) --high;
      if (low > high) {
        suffix_[at].clear();
        prefix_[at].clear();
      } else {
        suffix_[at].erase(suffix_[at].begin() + (high + 1 - low_[at]), suffix_[at].end());
        suffix_[at].erase(suffix_[at].begin(), suffix_[at].begin() + (low - low_[at]));
        prefix_[at].erase(prefix_[at].begin() + (high + 1 - low_[at]), prefix_[at].end());
        prefix_[at].erase(prefix_[at].begin(), prefix_[at].begin() + (low - low_[at]));
      }
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
    for (int k = 0; !last(at);) {
      const Cell& cell = suffix_[at][k - low_[at]];
      if (const std::vector<Next>* next = next_of(at)) {
        at = blocks_[(*next)[cell.move].block].begin;
        continue;
      }
      const Move& move = (*positions_[at].moves)[cell.move];
      solution->steps.push_back({k, cell.next, move.mesh});
      k = cell.next;
      at = behind(at, move);
    }
    if (pipelines_ == 1 && launches(*solution, p)) {
      solve_prefix(p);
      tighten(cutoff * (1 + kSlack));
      return true;
    }
    // Slower than p under its memory, but a plan.
    offer(*solution, pool_);
    cutoff = std::min(cutoff, pool_->best() - constant_ - (micro_batches_ - 1) * least_);
    solve_prefix(p);
    tighten(cutoff * (1 + kSlack));
    return solve_labels(p, cutoff, solution);
  }

  // Whether the exact counts for period p fit into the stages' memory.
  bool launches(const Solution& s, Seconds p) {
    Launch launch;
    for (size_t i = s.steps.size(); i-- > 0;) {
      const Step& step = s.steps[i];
      Seconds t = table_->time(step.mesh, step.first, step.end);
      if (i + 1 == s.steps.size())
        launch = launch_last(t);
      else
        launch = launch_before(launch, t,
                               table_
                                   ->link(step.end, table_->mesh(step.mesh).cluster,
                                          table_->mesh(s.steps[i + 1].mesh).cluster)
                                   .total(),
                               p);
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
    for (int at = size() - 1; at >= 0; --at) {
      int low = low_[at], high = high_[at];
      labels[at].resize(std::max(0, high - low + 1));
      if (last(at) && low <= high) labels[at][0].push_back({0, {0, 0}, 0, -1, 0, -1, -1});
      if (positions_[at].moves == nullptr) continue;
      const std::vector<Move>& moves = *positions_[at].moves;
      for (int k = low; k <= high; ++k) {
        Seconds rest = prefix_[at][k - low] + gap(k, at);
        if (!(suffix_[at][k - low].latency + rest <= limit)) continue;
        fresh.clear();
        std::vector<Label>& kept = labels[at][k - low];
        for (size_t m = 0; m < moves.size(); ++m) {
          const Move& move = moves[m];
          const int to = behind(at, move);
          // Behind a sub-cluster the next stage starts in any that may follow.
          const std::vector<Next>* next = next_of(to);
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
                Launch launch = last(to) ? launch_last(t) : launch_before(tail.launch, t, link, p);
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
          if (a.latency != b.latency) return a.latency < b.latency;
          if (a.launch.state != b.launch.state) return a.launch.state < b.launch.state;
          return a.reduce < b.reduce;
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
    for (int k = 0; !last(at);) {
      solution->steps.push_back({k, best->next, (*positions_[at].moves)[best->move].mesh});
      k = best->next;
      at = best->behind;
      best = &labels[at][k - low_[at]][best->parent];
    }
    return true;
  }

  // Enters a plan into the pool; returns its period.
  Seconds offer(const Solution& solution, Pool* pool) {
    std::vector<Stage> stages;
    for (const Step& step : solution.steps)
      stages.push_back({step.first, step.end - 1, table_->mesh(step.mesh),
                        table_->profile(step.mesh, step.first, step.end)});
    PipelinePlan plan =
        evaluate(problem_, stages, micro_batch_, micro_batches_, pipelines_, options_.memory_limit);
    Seconds period = plan.period;
    pool->offer(std::move(plan));
    return period;
  }

  const SearchProblem& problem_;
  const SearchOptions& options_;
  CostTable* table_;
  Shared& shared_;
  int64_t micro_batch_;
  int micro_batches_, pipelines_, layers_;
  SearchResult* result_;
  double deadline_;
  int meshes_ = 0;
  Pool* pool_ = nullptr;
  Seconds least_ = 0;     // no plan has a shorter period
  Seconds constant_ = 0;  // tied reduction, the least
  std::vector<Block> blocks_;
  std::vector<int> roots_;                        // blocks
  std::vector<Position> positions_;               // of all blocks
  std::vector<const std::vector<Move>*> starts_;  // of the first device of each cluster
  std::map<std::pair<int, int>, int> rows_;       // of the link tables
  std::vector<std::vector<Seconds>> link_total_, link_worst_;  // [row][layer behind]
  std::vector<std::vector<int>> allowed_up_, allowed_down_;    // [row][layer]
  std::vector<int> low_, high_, reach_;                        // [position]
  std::vector<std::vector<Cell>>& suffix_ = shared_.suffix;    // [position][k - low]
  std::vector<std::vector<Seconds>>& prefix_ = shared_.prefix;
};

// Orders by the chains that search them. Those of many sub-clusters are searched at once, behind
// the one that is listed, which finds plans that the others are held against.
std::vector<Orders> chains_of(const SearchProblem& problem, const SearchOptions& options) {
  const auto count = static_cast<int>(problem.clusters.size());
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (!options.any_order) return {{order}};
  std::vector<Orders> chains;
  double cells = problem.layers;
  for (const SubCluster& c : problem.clusters) cells += 1.0 * problem.layers * c.size();
  if (count >= options.joint_orders && std::ldexp(cells, count - 1) <= kMostCells) {
    chains.push_back({order});
    chains.resize(problem.tied_cost ? count + 1 : 2);
    do {
      chains[problem.tied_cost ? 1 + order.back() : 1].push_back(order);
    } while (std::next_permutation(order.begin(), order.end()));
  } else {
    do {
      chains.push_back({order});
    } while (std::next_permutation(order.begin(), order.end()));
  }
  return chains;
}

}  // namespace

namespace {

// Where a slice that starts at a device starts first: on nodes of the same kinds, as far in; if the
// devices of its node are alike, at the beginning.
class FirstPlace {
 public:
  FirstPlace(const SubCluster& cluster, int d) : per_node_(cluster.devices), d_(d) {
    if (cluster.kinds.empty()) return;
    const auto node = [&](int n) { return cluster.kinds.begin() + n * per_node_; };
    for (int n = 0; n < cluster.nodes; ++n) {
      int same = 0;
      while (!std::equal(node(same), node(same + 1), node(n))) ++same;
      like_.push_back(same);
    }
    const int here = d / per_node_;
    uniform_ = std::count(node(here), node(here + 1), cluster.kinds[d]) == per_node_;
  }
  int of_part() const {
    if (like_.empty()) return 0;
    return like_[d_ / per_node_] * per_node_ + (uniform_ ? 0 : d_ % per_node_);
  }
  int of_nodes(int count) const {
    if (like_.empty()) return 0;
    const auto here = like_.begin() + d_ / per_node_;
    int first = 0;
    while (!std::equal(here, here + count, like_.begin() + first)) ++first;
    return first * per_node_;
  }

 private:
  int per_node_, d_;
  bool uniform_ = false;
  std::vector<int> like_;  // [node] the first of the same kinds; empty: devices are alike
};

}  // namespace

void for_each_mesh(const SubCluster& cluster, int index, Shapes shapes, int d,
                   const std::function<void(const Mesh&, int)>& visit) {
  int per_node = cluster.devices, in_node = d % per_node;
  bool power = (per_node & (per_node - 1)) == 0;
  // Powers of two up to a node, and whole nodes, pack in any order; other sizes stay in a node.
  bool anywhere = shapes == Shapes::paper && power && cluster.kinds.empty();
  const FirstPlace first(cluster, d);
  for (int m = 1; m < per_node; shapes == Shapes::paper ? m *= 2 : ++m) {
    int behind = d + m;
    if (anywhere ? behind <= cluster.size() : in_node + m <= per_node)
      visit({index, 1, m, false, first.of_part()}, behind);
  }
  if (anywhere || in_node == 0)
    for (int n = 1; d + n * per_node <= cluster.size(); ++n)
      visit({index, n, per_node, false, first.of_nodes(n)}, d + n * per_node);
}

PipelinePlan evaluate(const SearchProblem& problem, const std::vector<Stage>& stages,
                      int64_t micro_batch, int micro_batches, int pipelines, bool memory_limit) {
  PipelinePlan plan;
  plan.stages = stages;
  plan.micro_batch = micro_batch;
  plan.micro_batches = micro_batches;
  plan.pipelines = pipelines;
  Seconds reduce = 0, latency = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    const Stage& s = stages[i];
    plan.pipeline.stages.push_back({s.profile.forward, s.profile.backward});
    plan.pipeline.in_flight_limit.push_back(
        std::max(1, in_flight_limit(s.profile, problem.clusters[s.mesh.cluster].memory,
                                    micro_batches, memory_limit)));
    plan.pipeline.epilogue.push_back(pipelines > 1 ? s.profile.reduce : 0);
    reduce = std::max(reduce, plan.pipeline.epilogue.back());
    latency += plan.pipeline.stages.back().total();
    if (i + 1 < stages.size()) {
      plan.pipeline.links.push_back(problem.link_cost(
          s.last + 1, s.mesh.cluster, stages[i + 1].mesh.cluster, micro_batch, pipelines));
      latency += plan.pipeline.links.back().total();
    }
  }
  ExactCounts exact = exact_counts(plan.pipeline);
  plan.period = exact.period;
  plan.counts = exact.counts;
  plan.objective = latency + (micro_batches - 1) * exact.period + reduce;
  if (problem.tied_cost && stages.size() > 1)
    plan.objective +=
        problem.tied_cost(stages.front().mesh.cluster, stages.back().mesh.cluster, pipelines);
  return plan;
}

namespace {

// The clusters one of `pipelines` equal pipelines has; false if they do not divide, or not into
// devices of the same kinds.
bool divide(const std::vector<SubCluster>& clusters, int pipelines, std::vector<SubCluster>* part) {
  *part = clusters;
  for (SubCluster& c : *part) {
    if (c.nodes % pipelines == 0)
      c.nodes /= pipelines;
    else if (c.nodes == 1 && c.devices % pipelines == 0)
      c.devices /= pipelines;
    else
      return false;
    if (c.kinds.empty()) continue;
    const auto size = static_cast<size_t>(c.size());
    for (size_t d = size; d < c.kinds.size(); ++d)
      if (c.kinds[d] != c.kinds[d % size]) return false;
    c.kinds.resize(size);
  }
  return true;
}

void check_problem(const SearchProblem& problem, const SearchOptions& options) {
  auto positive = [](const char* field, int64_t value) {
    if (value < 1) throw user_error("pipeline", "{} is {}; give a positive number", field, value);
  };
  positive("layers", problem.layers);
  positive("batch", problem.batch);
  if (problem.layers > 100'000)
    throw user_error("pipeline", "layers is {}; give at most 100000", problem.layers);
  if (problem.clusters.empty() || problem.clusters.size() > kMostSubClusters)
    throw user_error("pipeline", "clusters has {} entries; give 1 to {}", problem.clusters.size(),
                     kMostSubClusters);
  for (const SubCluster& c : problem.clusters) {
    positive("clusters.nodes", c.nodes);
    positive("clusters.devices", c.devices);
    const int64_t size = static_cast<int64_t>(c.nodes) * c.devices;
    if (size >= int64_t{1} << kSizeBits)
      throw user_error("pipeline", "clusters has one of {} x {} devices; give less than {}",
                       c.nodes, c.devices, int64_t{1} << kSizeBits);
    if (!c.kinds.empty() && static_cast<int64_t>(c.kinds.size()) != size)
      throw user_error("pipeline", "clusters.kinds has {} entries; give {}, one per device",
                       c.kinds.size(), size);
  }
  for (int64_t m : options.micro_batches) positive("micro_batches", m);
  for (int d : options.pipelines) positive("pipelines", d);
  if (!problem.layer_class.empty() &&
      static_cast<int>(problem.layer_class.size()) != problem.layers)
    throw user_error("pipeline", "layer_class has {} entries; give {}, one per layer",
                     problem.layer_class.size(), problem.layers);
}

}  // namespace

SearchResult search(const SearchProblem& problem, const SearchOptions& options) {
  check_problem(problem, options);
  SearchResult result;
  result.lower_bound = kInfinity;
  double start = now(), deadline = options.time_limit > 0 ? start + options.time_limit : 0;
  Pool pool;
  pool.capacity = static_cast<size_t>(std::max(1, options.pool));
  if (options.worth < kLongest) pool.worth = options.worth;
  bool complete = true;
  std::vector<Shapes> families = {options.shapes};
  if (options.shapes == Shapes::both) families = {Shapes::paper, Shapes::uneven};
  for (int pipelines : options.pipelines)
    for (int64_t micro_batch : options.micro_batches) {
      if (problem.batch % (micro_batch * pipelines) != 0) continue;
      int64_t count = problem.batch / (micro_batch * pipelines);
      if (count > kUnlimited / 2)
        throw user_error("pipeline", "batch {} has {} micro-batches; give a larger micro-batch",
                         problem.batch, count);
      int micro_batches = static_cast<int>(count);
      SearchProblem part = problem;
      if (!divide(problem.clusters, pipelines, &part.clusters)) continue;
      CostTable table(part, options, micro_batch, micro_batches, pipelines);
      Shared shared;
      for (Shapes shapes : families) {
        for (const Orders& orders : chains_of(part, options)) {
          ++result.configurations;
          if (deadline > 0 && now() > deadline) {
            complete = false;
            result.lower_bound = 0;
            break;
          }
          Chain chain(part, options, &table, &shared, orders, shapes, micro_batch, micro_batches,
                      pipelines, &result, deadline);
          complete = chain.run(&pool) && complete;
        }
      }
      result.planned += table.planned;
      result.cost_s += table.seconds;
    }
  result.search_s = now() - start - result.cost_s;
  result.feasible = !pool.plans.empty();
  if (!result.feasible) {
    result.reason = result.configurations == 0
                        ? "no micro-batch size and number of pipelines divide the batch and the "
                          "sub-clusters"
                    : complete && pool.worth < kInfinity ? "no plan is worth it"
                    : complete ? "in every plan some stage does not fit its devices with one "
                                 "micro-batch in flight"
                               : "time ran out before a plan was found";
    return result;
  }
  result.reason = complete ? "proven optimal" : "time ran out";
  result.objective = pool.best();
  result.lower_bound = std::min(result.lower_bound, result.objective);
  if (options.pool > 0) {
    double simulate = now();
    size_t best = 0;
    for (size_t i = 0; i < pool.plans.size(); ++i) {
      PipelinePlan& plan = pool.plans[i];
      ScheduleRun run = run_best(plan.pipeline, plan.micro_batches);
      plan.schedule = run.schedule.kind;
      plan.makespan = run.timeline.makespan;
      if (problem.tied_cost && plan.stages.size() > 1)
        plan.makespan += problem.tied_cost(plan.stages.front().mesh.cluster,
                                           plan.stages.back().mesh.cluster, plan.pipelines);
      if (plan.makespan < pool.plans[best].makespan) best = i;
    }
    result.best = pool.plans[best];
    result.simulate_s = now() - simulate;
  } else {
    result.best = pool.plans[0];
  }
  result.pool = std::move(pool.plans);
  return result;
}

double load_balance(const PipelinePlan& plan, const std::vector<double>& speed) {
  Seconds longest = 0;
  for (const Stage& s : plan.stages)
    longest = std::max(longest, s.profile.forward + s.profile.backward);
  double done = 0, possible = 0;
  for (const Stage& s : plan.stages) {
    double weight = speed[s.mesh.cluster] * s.mesh.size();
    done += (s.profile.forward + s.profile.backward) * weight;
    possible += longest * weight;
  }
  return done / possible;
}

}  // namespace motley::pipeline
