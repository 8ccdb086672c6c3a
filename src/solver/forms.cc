#include "solver/forms.h"

#include <algorithm>
#include <bit>

#include "core/infinity.h"

namespace motley::solver {
namespace {}  // namespace

FormSpace::FormSpace(const FormTable& table) : table_(&table), n_(table.forms) {
  for (int a = 0; a < n_; ++a) {
    for (int b = 0; b < n_; ++b) dist_[a][b] = table.convert[a * n_ + b];
  }
  for (int k = 0; k < n_; ++k) {
    for (int a = 0; a < n_; ++a) {
      for (int b = 0; b < n_; ++b) dist_[a][b] = std::min(dist_[a][b], dist_[a][k] + dist_[k][b]);
    }
  }
  for (int a = 0; a < n_; ++a) {
    free_[a] = 0;
    for (int b = 0; b < n_; ++b) free_[a] |= (dist_[a][b] == 0 ? 1u : 0u) << b;
  }
}

uint32_t FormSpace::close(uint32_t set) const {
  uint32_t closed = 0;
  for (; set != 0; set &= set - 1) closed |= free_[std::countr_zero(set)];
  return closed;
}

double FormSpace::steiner(uint32_t have, uint32_t want) {
  if ((want & ~have) == 0) return 0;
  if (have == 0) return kInfinity;
  if (n_ <= kDense) return row(have)[want];
  const auto [it, fresh] = sparse_.try_emplace((have << 16) | want, 0);
  if (fresh) it->second = complete_from_set(*table_, have, want);
  return it->second;
}

const double* FormSpace::from_each_anew(uint32_t want) {
  if (n_ <= kDense) {
    plant();
    return &tree_[static_cast<size_t>(want) * n_];
  }
  for (int f = 0; f < n_; ++f) each_[f] = steiner(1u << f, want);
  return each_.data();
}

// tree_[want * n + root]: two arborescences from one root, or a path to another root.
void FormSpace::plant() {
  const uint32_t sets = 1u << n_;
  tree_.assign(static_cast<size_t>(sets) * n_, 0);
  std::array<double, kMaxForms> joined;
  for (uint32_t set = 1; set < sets; ++set) {
    double* cell = &tree_[static_cast<size_t>(set) * n_];
    for (int root = 0; root < n_; ++root) {
      joined[root] = set == 1u << root ? 0 : kInfinity;
      for (uint32_t part = (set - 1) & set; part > (set ^ part); part = (part - 1) & set) {
        joined[root] =
            std::min(joined[root], tree_[part * n_ + root] + tree_[(set ^ part) * n_ + root]);
      }
    }
    for (int root = 0; root < n_; ++root) {
      cell[root] = kInfinity;
      for (int via = 0; via < n_; ++via) {
        cell[root] = std::min(cell[root], dist_[root][via] + joined[via]);
      }
    }
  }
}

// Costs from a set: each wanted form hangs from an arborescence rooted in one form of the set.
const double* FormSpace::row(uint32_t have) {
  const uint32_t sets = 1u << n_;
  if (tree_.empty()) plant();
  if (rows_.empty()) rows_.resize(sets);
  std::vector<double>& row = rows_[have];
  if (!row.empty()) return row.data();
  row.assign(sets, 0);
  std::vector<double> single(sets, kInfinity);
  for (uint32_t want = 1; want < sets; ++want) {
    for (uint32_t left = have; left != 0; left &= left - 1) {
      single[want] = std::min(single[want], tree_[want * n_ + std::countr_zero(left)]);
    }
    row[want] = single[want];
    for (uint32_t part = (want - 1) & want; part > (want ^ part); part = (part - 1) & want) {
      row[want] = std::min(row[want], single[part] + row[want ^ part]);
      row[want] = std::min(row[want], row[part] + single[want ^ part]);
    }
  }
  return row.data();
}

uint32_t FormSpace::available(uint32_t set, uint32_t need) const {
  set = close(set);
  for (int f = n_ - 1; f >= 0; --f) {
    if ((set >> f & 1) == 0 || (need >> f & 1) != 0) continue;
    const uint32_t rest = set & ~(1u << f);
    bool useful = false;
    for (int g = 0; g < n_ && !useful; ++g) {
      useful = g != f && leads_to(g, need) && dist_[f][g] < distance(rest, g);
    }
    if (!useful) set = rest;
  }
  return set;
}

uint32_t FormSpace::required(uint32_t set) const {
  for (int f = n_ - 1; f >= 0; --f) {
    if ((set >> f & 1) == 0) continue;
    for (uint32_t rest = set & ~(1u << f); rest != 0; rest &= rest - 1) {
      if (dist_[std::countr_zero(rest)][f] == 0) {
        set &= ~(1u << f);
        break;
      }
    }
  }
  return set;
}

const std::vector<Grown>& FormSpace::grow(uint32_t have, uint32_t want, uint32_t need) {
  const auto [it, fresh] = grown_.try_emplace(std::array<uint32_t, 3>{have, want, need});
  if (!fresh) return it->second;
  std::vector<Grown>& result = it->second;
  if (need == 0) {
    const double cost = steiner(have, want);
    if (cost < kInfinity) result.push_back({0, cost});
    return result;
  }
  result.push_back({close(have), 0});
  for (uint32_t left = want; left != 0; left &= left - 1) {
    std::vector<Grown> next;
    for (const Grown& from : result) {
      found_.clear();
      chains(from.forms, from.forms, 1u << std::countr_zero(left), from.cost);
      next.insert(next.end(), found_.begin(), found_.end());
    }
    prune(&next);
    result = std::move(next);
  }
  for (Grown& grown : result) grown.forms = available(grown.forms, need);
  prune(&result);
  return result;
}

double FormSpace::distance(uint32_t set, int to) const {
  double least = kInfinity;
  for (; set != 0; set &= set - 1) least = std::min(least, dist_[std::countr_zero(set)][to]);
  return least;
}

bool FormSpace::leads_to(int from, uint32_t need) const {
  for (; need != 0; need &= need - 1) {
    if (dist_[from][std::countr_zero(need)] < kInfinity) return true;
  }
  return false;
}

// Chains of conversions from `set`, the first leaving `tips` (the newest forms), to `want`.
void FormSpace::chains(uint32_t set, uint32_t tips, uint32_t want, double cost) {
  for (const Grown& grown : found_) {
    if (grown.cost + steiner(grown.forms, set) <= cost) return;
  }
  if ((set & want) != 0) {
    found_.push_back({set, cost});
    return;
  }
  const int goal = std::countr_zero(want);
  std::vector<std::pair<double, int>> arcs;  // nearest to the goal first: its chain bounds others
  for (int to = 0; to < n_; ++to) {
    if ((set >> to & 1) != 0) continue;
    double arc = kInfinity;
    for (uint32_t from = tips; from != 0; from &= from - 1) {
      arc = std::min(arc, table_->convert[std::countr_zero(from) * n_ + to]);
    }
    if (arc + dist_[to][goal] < kInfinity) arcs.emplace_back(arc, to);
  }
  std::sort(arcs.begin(), arcs.end(), [&](const auto& a, const auto& b) {
    return a.first + dist_[a.second][goal] < b.first + dist_[b.second][goal];
  });
  for (const auto& [arc, to] : arcs) {
    const uint32_t larger = close(set | 1u << to);
    chains(larger, larger & ~set, want, cost + arc);
  }
}

void FormSpace::prune(std::vector<Grown>* list) {
  std::sort(list->begin(), list->end(), [](const Grown& a, const Grown& b) {
    return a.cost != b.cost ? a.cost < b.cost : a.forms < b.forms;
  });
  std::vector<Grown> kept;
  for (const Grown& grown : *list) {
    bool dominated = false;
    for (const Grown& other : kept) {
      dominated |= other.cost + steiner(other.forms, grown.forms) <= grown.cost;
    }
    if (!dominated) kept.push_back(grown);
  }
  *list = std::move(kept);
}

}  // namespace motley::solver
