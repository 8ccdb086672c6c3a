#include "reduce/semantics.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/rng.h"

namespace motley::reduce {

DenseStates::DenseStates(int devices)
    : devices_(devices),
      words_((devices + 63) / 64),
      bits_(static_cast<size_t>(devices) * devices * words_, 0) {
  for (int d = 0; d < devices; ++d)
    for (int c = 0; c < devices; ++c) row(d, c)[d / 64] |= uint64_t{1} << (d % 64);
}

uint64_t DenseStates::hash() const {
  uint64_t h = 0;
  for (uint64_t word : bits_) h = mix64(h ^ word);
  return h;
}

bool DenseStates::holds(int device, int chunk) const {
  const uint64_t* r = row(device, chunk);
  for (int w = 0; w < words_; ++w)
    if (r[w]) return true;
  return false;
}

int DenseStates::held(int device) const {
  int chunks = 0;
  for (int c = 0; c < devices_; ++c) chunks += holds(device, c);
  return chunks;
}

bool DenseStates::strays(const std::vector<std::vector<uint64_t>>& goal) const {
  for (int d = 0; d < devices_; ++d)
    for (int c = 0; c < devices_; ++c)
      for (int w = 0; w < words_; ++w)
        if (row(d, c)[w] & ~goal[d][w]) return true;
  return false;
}

void DenseStates::set_goal(const std::vector<std::vector<uint64_t>>& goal) {
  for (int d = 0; d < devices_; ++d)
    for (int c = 0; c < devices_; ++c) std::copy(goal[d].begin(), goal[d].end(), row(d, c));
}

int DenseStates::lacking(int first, int count) const {
  int chunks = 0;
  for (int c = 0; c < devices_; ++c) {
    bool lacks = false;
    for (int w = 0; w < words_ && !lacks; ++w) {
      uint64_t all = 0;
      for (int d = first; d < first + count; ++d) all |= row(d, c)[w];
      int bits = std::min(64, devices_ - 64 * w);
      lacks = all != (bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1);
    }
    chunks += lacks;
  }
  return chunks;
}

bool DenseStates::reduce_group(const std::vector<int>& group, std::vector<uint64_t>* sum) const {
  size_t size = static_cast<size_t>(devices_) * words_;
  sum->assign(row(group[0], 0), row(group[0], 0) + size);
  bool some = false;
  for (int c = 0; c < devices_; ++c) {
    bool held = holds(group[0], c);
    some = some || held;
    for (size_t i = 1; i < group.size(); ++i) {
      if (holds(group[i], c) != held) return false;
      for (int w = 0; w < words_; ++w) {
        uint64_t& into = (*sum)[static_cast<size_t>(c) * words_ + w];
        uint64_t add = row(group[i], c)[w];
        if (into & add) return false;
        into |= add;
      }
    }
  }
  return some;
}

bool DenseStates::apply_group(Collective collective, const std::vector<int>& group) {
  size_t size = static_cast<size_t>(devices_) * words_;
  int n = static_cast<int>(group.size());
  auto store = [&](int device, const std::vector<uint64_t>& state) {
    std::copy(state.begin(), state.end(), row(device, 0));
  };
  std::vector<uint64_t> sum;
  switch (collective) {
    case Collective::all_reduce:
    case Collective::reduce:
      if (!reduce_group(group, &sum)) return false;
      for (int d : group) {
        if (collective == Collective::reduce && d != group[0]) sum.assign(size, 0);
        store(d, sum);
      }
      return true;
    case Collective::reduce_scatter: {
      if (!reduce_group(group, &sum)) return false;
      std::vector<int> held;
      for (int c = 0; c < devices_; ++c)
        if (holds(group[0], c)) held.push_back(c);
      int chunks = static_cast<int>(held.size());
      if (chunks % n != 0) return false;
      for (int i = 0; i < n; ++i) {
        std::vector<uint64_t> part(size, 0);
        for (int k = i * (chunks / n); k < (i + 1) * (chunks / n); ++k)
          std::copy_n(sum.begin() + static_cast<size_t>(held[k]) * words_, words_,
                      part.begin() + static_cast<size_t>(held[k]) * words_);
        store(group[i], part);
      }
      return true;
    }
    case Collective::all_gather: {
      sum.assign(size, 0);
      int each = -1;
      std::vector<char> taken(devices_, 0);
      for (int d : group) {
        int chunks = 0;
        for (int c = 0; c < devices_; ++c) {
          if (!holds(d, c)) continue;
          if (taken[c]) return false;
          taken[c] = 1;
          ++chunks;
          std::copy_n(row(d, c), words_, sum.begin() + static_cast<size_t>(c) * words_);
        }
        if (chunks == 0 || (each >= 0 && each != chunks)) return false;
        each = chunks;
      }
      for (int d : group) store(d, sum);
      return true;
    }
    case Collective::broadcast: {
      bool strictly = false;
      for (int d : group)
        for (size_t w = 0; w < size; ++w) {
          uint64_t mine = row(d, 0)[w], root = row(group[0], 0)[w];
          if (mine & ~root) return false;
          strictly = strictly || mine != root;
        }
      if (!strictly) return false;
      sum.assign(row(group[0], 0), row(group[0], 0) + size);
      for (int d : group) store(d, sum);
      return true;
    }
    default:
      return false;
  }
}

bool DenseStates::apply(Collective collective, const Groups& groups) {
  for (const std::vector<int>& group : groups)
    if (!apply_group(collective, group)) return false;
  return true;
}

}  // namespace motley::reduce
