#include "pipeline/cost_table.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

namespace motley::pipeline {

int in_flight_limit(const StageProfile& profile, Bytes memory, int micro_batches, bool limited) {
  if (!limited) return kUnlimited;
  Bytes left = memory * (1 + kSlack) - profile.state;
  if (left < 0) return 0;
  if (profile.activation * micro_batches <= left) return kUnlimited;
  return static_cast<int>(std::floor(left / profile.activation));
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

CostTable::CostTable(const SearchProblem& problem, const SearchOptions& options,
                     int64_t micro_batch, int micro_batches, int pipelines)
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

int CostTable::mesh(const Mesh& mesh) {
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

const StageProfile& CostTable::profile(int m, int first, int end) {
  int length = end - first;
  int last = least_end_.empty() ? end - 1
                                : least_end_[static_cast<size_t>(end - 1) * layers_ + (length - 1)];
  uint64_t key = (static_cast<uint64_t>(m) * layers_ + last) * layers_ + (length - 1);
  auto [it, fresh] = profiles_.try_emplace(key);
  if (fresh) {
    double start = steady_seconds();
    it->second =
        problem_.stage_cost({last - length + 1, last, meshes_[m], micro_batch_, pipelines_});
    seconds += steady_seconds() - start;
    ++planned;
  }
  return it->second;
}

void CostTable::share_rows(const std::vector<int>& common) {
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

void CostTable::allocate(int m) {
  size_t n = static_cast<size_t>(layers_) * layers_;
  time_[m].allocate(n);
  limit_[m].allocate(n);
  if (pipelines_ > 1) reduce_[m].allocate(n);
}

void CostTable::fill(int m, int first, int end, size_t at) {
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

int CostTable::leftmost(int m, int end, Seconds p, int length) {
  int good = end, bad = -1;  // good: fits, or empty; bad: does not, or out of bounds
  int at = std::clamp(end - length, 0, end);
  if (at == end || time(m, at, end) <= p) {
    good = at;
    for (int step = 1; good - step > bad; step *= 2) {
      if (time(m, good - step, end) > p) {
        bad = good - step;
        break;
      }
      good -= step;
    }
  } else {
    bad = at;
    for (int step = 1; bad + step < good; step *= 2) {
      if (time(m, bad + step, end) <= p) {
        good = bad + step;
        break;
      }
      bad += step;
    }
  }
  while (good - bad > 1) {
    int middle = (good + bad) / 2;
    (time(m, middle, end) <= p ? good : bad) = middle;
  }
  return good;
}
int CostTable::rightmost(int m, int first, Seconds p) {
  if (first >= layers_ || time(m, first, first + 1) > p) return first;
  int good = first + 1, bad = layers_ + 1;
  for (int step = 1; good + step < bad; step *= 2) {
    if (time(m, first, good + step) > p) {
      bad = good + step;
      break;
    }
    good += step;
  }
  while (bad - good > 1) {
    int middle = (good + bad) / 2;
    (time(m, first, middle) <= p ? good : bad) = middle;
  }
  return good;
}

}  // namespace motley::pipeline
