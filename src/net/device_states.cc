#include "net/device_states.h"

#include <algorithm>

namespace motley::net {

SparseStates::SparseStates(int devices) : devices_(devices), states_(devices) {
  size_t words = (static_cast<size_t>(devices) + 63) / 64;
  for (int d = 0; d < devices; ++d) {
    std::vector<uint64_t> own(words, 0);
    own[d / 64] |= uint64_t{1} << (d % 64);
    states_[d] = {{0, devices, intern(std::move(own))}};
  }
}

int SparseStates::intern(std::vector<uint64_t> set) {
  auto [it, fresh] = index_.try_emplace(std::move(set), static_cast<int>(sets_.size()));
  if (fresh) sets_.push_back(it->first);
  return it->second;
}

int SparseStates::join(const std::vector<int>& sets) {
  auto it = joins_.find(sets);
  if (it != joins_.end()) return it->second;
  std::vector<uint64_t> all = sets_[sets[0]];
  bool disjoint = true;
  for (size_t i = 1; i < sets.size() && disjoint; ++i)
    for (size_t w = 0; w < all.size(); ++w) {
      disjoint = disjoint && !(all[w] & sets_[sets[i]][w]);
      all[w] |= sets_[sets[i]][w];
    }
  int id = disjoint ? intern(std::move(all)) : -1;
  joins_.emplace(sets, id);
  return id;
}

bool SparseStates::within(int a, int b) const {
  if (a == b) return true;
  for (size_t w = 0; w < sets_[a].size(); ++w)
    if (sets_[a][w] & ~sets_[b][w]) return false;
  return true;
}

void SparseStates::append(State* state, Stretch stretch) {
  if (!state->empty() && state->back().first + state->back().count == stretch.first &&
      state->back().set == stretch.set)
    state->back().count += stretch.count;
  else
    state->push_back(stretch);
}

bool SparseStates::reduce_group(const std::vector<int>& group, State* sum) {
  // Walk all members at once, from cut to cut; `at` is the stretch each is in.
  std::vector<size_t> at(group.size(), 0);
  std::vector<int> sets(group.size());
  sum->clear();
  int chunk = 0;
  for (;;) {
    size_t ended = 0;
    int start = devices_, end = devices_;
    for (size_t i = 0; i < group.size(); ++i) {
      const State& s = states_[group[i]];
      while (at[i] < s.size() && s[at[i]].first + s[at[i]].count <= chunk) ++at[i];
      if (at[i] == s.size()) {
        ++ended;
        continue;
      }
      int first = std::max(chunk, s[at[i]].first);
      if (ended > 0 || (i > 0 && first != start)) return false;
      start = first;
      end = std::min(end, s[at[i]].first + s[at[i]].count);
      sets[i] = s[at[i]].set;
    }
    if (ended == group.size()) return !sum->empty();
    if (ended > 0) return false;
    int all = join(sets);
    if (all < 0) return false;
    append(sum, {start, end - start, all});
    chunk = end;
  }
}

bool SparseStates::broadcastable(const std::vector<int>& group) const {
  const State& root = states_[group[0]];
  bool strictly = false;
  for (size_t i = 1; i < group.size(); ++i) {
    const State& s = states_[group[i]];
    if (s == root) continue;
    strictly = true;
    for (const Stretch& mine : s) {
      // The root's stretches must cover mine with sets that contain it.
      int chunk = mine.first;
      for (const Stretch& r : root) {
        if (r.first + r.count <= chunk) continue;
        if (r.first > chunk || chunk >= mine.first + mine.count) break;
        if (!within(mine.set, r.set)) return false;
        chunk = r.first + r.count;
      }
      if (chunk < mine.first + mine.count) return false;
    }
  }
  return strictly;
}

bool SparseStates::apply(Collective collective, const Groups& groups) {
  std::vector<State> after = states_;
  State sum;
  for (const std::vector<int>& group : groups) {
    int n = static_cast<int>(group.size());
    switch (collective) {
      case Collective::all_reduce:
      case Collective::reduce:
        if (!reduce_group(group, &sum)) return false;
        for (int d : group)
          after[d] = collective == Collective::all_reduce || d == group[0] ? sum : State();
        break;
      case Collective::reduce_scatter: {
        if (!reduce_group(group, &sum)) return false;
        int chunks = 0;
        for (const Stretch& s : sum) chunks += s.count;
        if (chunks % n != 0) return false;
        size_t at = 0;
        int used = 0;  // chunks of sum[at] given away
        for (int d : group) {
          after[d].clear();
          for (int left = chunks / n; left > 0;) {
            int take = std::min(left, sum[at].count - used);
            append(&after[d], {sum[at].first + used, take, sum[at].set});
            left -= take, used += take;
            if (used == sum[at].count) ++at, used = 0;
          }
        }
        break;
      }
      case Collective::all_gather: {
        std::vector<Stretch> all;
        int each = -1;
        for (int d : group) {
          int chunks = 0;
          for (const Stretch& s : states_[d]) chunks += s.count, all.push_back(s);
          if (chunks == 0 || (each >= 0 && each != chunks)) return false;
          each = chunks;
        }
        std::sort(all.begin(), all.end(),
                  [](const Stretch& a, const Stretch& b) { return a.first < b.first; });
        sum.clear();
        for (size_t i = 0; i < all.size(); ++i) {
          if (i > 0 && all[i - 1].first + all[i - 1].count > all[i].first) return false;
          append(&sum, all[i]);
        }
        for (int d : group) after[d] = sum;
        break;
      }
      case Collective::broadcast:
        if (!broadcastable(group)) return false;
        for (int d : group) after[d] = states_[group[0]];
        break;
      default:
        return false;
    }
  }
  states_ = std::move(after);
  return true;
}

bool SparseStates::at_goal() const {
  for (const State& s : states_) {
    if (s.size() != 1 || s[0].first != 0 || s[0].count != devices_) return false;
    int contributions = 0;
    for (uint64_t word : sets_[s[0].set]) contributions += __builtin_popcountll(word);
    if (contributions != devices_) return false;
  }
  return true;
}

std::vector<std::pair<int, int>> SparseStates::held(int device) const {
  std::vector<std::pair<int, int>> result;
  for (const Stretch& s : states_[device]) {
    if (!result.empty() && result.back().first + result.back().second == s.first)
      result.back().second += s.count;
    else
      result.push_back({s.first, s.count});
  }
  return result;
}

}  // namespace motley::net
