#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/rng.h"
#include "reduce/language.h"
#include "reduce/placement.h"
#include "reduce/semantics.h"
#include "reduce/synthesis.h"

namespace motley::reduce {
namespace {

Hierarchy hierarchy_of(const std::vector<int>& sizes) {
  Hierarchy h;
  for (int s : sizes) h.push_back({fmt::format("l{}", h.size()), s});
  return h;
}
std::vector<int> rooted(std::vector<int> sizes) {
  sizes.insert(sizes.begin(), 1);
  return sizes;
}
std::vector<int> iota(int n) {
  std::vector<int> v(n);
  std::iota(v.begin(), v.end(), 0);
  return v;
}

// ---- 3.1: placements ----

TEST(Placement, TheExampleOfFigure2) {
  std::set<std::string> found;
  for (const Matrix& m : placements(hierarchy_of({1, 2, 2, 4}), {4, 4})) found.insert(to_string(m));
  EXPECT_TRUE(found.count("[[1 2 2 1] [1 1 1 4]]"));
  EXPECT_TRUE(found.count("[[1 2 1 2] [1 1 2 2]]"));
  EXPECT_TRUE(found.count("[[1 1 2 2] [1 2 1 2]]"));
}

TEST(Placement, EnumerationEqualsTryingEveryMatrix) {
  Rng rng(1);
  for (int trial = 0; trial < 60; ++trial) {
    // A random matrix gives products that match.
    int levels = static_cast<int>(rng.between(1, 3)), axes = static_cast<int>(rng.between(1, 3));
    std::vector<int> h(levels, 1), p(axes, 1);
    for (int i = 0; i < axes; ++i)
      for (int j = 0; j < levels; ++j) {
        int f = static_cast<int>(rng.between(1, 3));
        h[j] *= f, p[i] *= f;
      }
    std::set<std::vector<int>> expected, found;
    std::vector<int> x(static_cast<size_t>(levels) * axes, 1);
    auto fill = [&](auto&& self, size_t at) -> void {
      if (at == x.size()) {
        for (int j = 0; j < levels; ++j) {
          int product = 1;
          for (int i = 0; i < axes; ++i) product *= x[i * levels + j];
          if (product != h[j]) return;
        }
        for (int i = 0; i < axes; ++i) {
          int product = 1;
          for (int j = 0; j < levels; ++j) product *= x[i * levels + j];
          if (product != p[i]) return;
        }
        expected.insert(x);
        return;
      }
      for (int f = 1; f <= h[at % levels]; ++f)
        if (h[at % levels] % f == 0 && p[at / levels] % f == 0) x[at] = f, self(self, at + 1);
      x[at] = 1;
    };
    fill(fill, 0);
    auto all = placements(hierarchy_of(h), p);
    for (const Matrix& m : all) found.insert(m.factors);
    EXPECT_EQ(found, expected);
    EXPECT_EQ(all.size(), found.size());
  }
}

TEST(Placement, ReductionGroupsPartitionTheDevicesAndDifferInTheirAxesOnly) {
  Hierarchy h = hierarchy_of({4, 16});
  for (const Matrix& m : placements(h, {8, 2, 4}))
    for (Numbering numbering : {Numbering::level_major, Numbering::axis_major}) {
      auto digits = [&](int device) {  // [axis * levels + level]
        std::vector<int> x(m.factors.size());
        for (int j = m.levels - 1; j >= 0; --j)
          for (int i = m.axes - 1; i >= 0; --i) {
            x[i * m.levels + j] = device % m.at(i, j);
            device /= m.at(i, j);
          }
        return x;
      };
      std::set<int> seen;
      for (const auto& group : reduction_groups(m, {0, 2}, numbering)) {
        EXPECT_EQ(group.size(), 32u);
        for (int d : group) {
          EXPECT_TRUE(seen.insert(d).second);
          for (int j = 0; j < m.levels; ++j)
            EXPECT_EQ(digits(d)[m.levels + j], digits(group[0])[m.levels + j]);
        }
        bool sorted = std::is_sorted(group.begin(), group.end());
        EXPECT_TRUE(sorted || numbering == Numbering::axis_major);
      }
      EXPECT_EQ(seen.size(), 64u);
    }
}

TEST(Placement, WhatAUserCanMend) {
  EXPECT_THROW(parse_hierarchy("node:4,gpu:0"), UserError);
  EXPECT_THROW(parse_hierarchy("node:4,gpu:x"), UserError);
  EXPECT_THROW(parse_hierarchy(""), UserError);
  EXPECT_THROW(parse_hierarchy(":4"), UserError);
  EXPECT_THROW(parse_hierarchy("a:1000000000"), UserError);
  EXPECT_THROW(parse_hierarchy("a:100000,b:100000"), UserError);
  EXPECT_THROW(parse_hierarchy("1,1,1,1,1,1,1,1,1"), UserError);
  EXPECT_THROW(parse_hierarchy("a:99999999999999999999"), UserError);
  Hierarchy h = parse_hierarchy("node:4,gpu:16");
  EXPECT_EQ(to_string(h), "node:4,gpu:16");
  EXPECT_THROW(parse_axes("16,2", h), UserError);
  EXPECT_THROW(parse_axes("100000,100000", h), UserError);
  EXPECT_THROW(parse_reduce_axes("0,0", 2), UserError);
  EXPECT_THROW(parse_reduce_axes("2", 2), UserError);
  EXPECT_EQ(parse_reduce_axes("2,0", 3), (std::vector<int>{0, 2}));
  EXPECT_THROW(placements(hierarchy_of(std::vector<int>(8, 4)), std::vector<int>(8, 4)), UserError);
  EXPECT_THROW(program_space(2, 0), UserError);
  EXPECT_THROW(program_space(2, 9), UserError);
  EXPECT_THROW(program_space(7, 5), UserError);
}

// ---- 3.2: semantics ----

TEST(Semantics, Figure4IsInvalid) {
  // (a) reduce_scatter over 0, 1, then all_reduce over the same two: they hold different chunks.
  DenseStates a(4);
  EXPECT_TRUE(a.apply(Collective::reduce_scatter, {{0, 1}}));
  DenseStates b = a;
  EXPECT_FALSE(b.apply(Collective::all_reduce, {{0, 1}}));
  EXPECT_TRUE(a.apply(Collective::all_gather, {{0, 1}}));
  // (b) contributions of 0 and 2 would be counted twice.
  DenseStates c(4);
  EXPECT_TRUE(c.apply(Collective::all_reduce, {{0, 2}}));
  EXPECT_FALSE(c.apply(Collective::all_reduce, {{0, 2}}));
}

TEST(Semantics, ReduceClearsAndBroadcastNeedsMore) {
  DenseStates s(2);
  EXPECT_TRUE(s.apply(Collective::reduce, {{0, 1}}));
  DenseStates again = s;
  EXPECT_FALSE(again.apply(Collective::reduce, {{0, 1}}));
  EXPECT_TRUE(s.apply(Collective::broadcast, {{0, 1}}));
  DenseStates goal(2);
  goal.set_goal({{3}, {3}});
  EXPECT_TRUE(s.equals(goal));
  EXPECT_FALSE(s.apply(Collective::broadcast, {{0, 1}}));
}

// Dense and sparse states accept the same steps, from any reachable state, and agree on the goal.
TEST(Semantics, DenseAndSparseAgreeOnRandomWalks) {
  Rng rng(7);
  int accepted = 0, goals = 0;
  const std::vector<std::vector<int>> shapes = {{2, 2},    {2, 3}, {3, 2, 2}, {4, 2},
                                                {2, 2, 2}, {6},    {5, 3}};
  for (int trial = 0; trial < 1500; ++trial) {
    std::vector<int> levels = rooted(shapes[rng.below(static_cast<int64_t>(shapes.size()))]);
    int n = static_cast<int>(size_of(levels));
    auto forms = forms_of(levels);
    DenseStates dense(n), goal(n);
    SparseStates sparse(n);
    std::vector<uint64_t> all = {(uint64_t{1} << n) - 1};
    goal.set_goal(std::vector<std::vector<uint64_t>>(n, all));
    for (int step = 0; step < 40; ++step) {
      auto groups = groups_of(forms[rng.below(static_cast<int64_t>(forms.size()))], levels);
      const Collective collective = net::kReductionCollectives[rng.below(5)];
      DenseStates d = dense;
      SparseStates s = sparse;
      bool ok = d.apply(collective, groups);
      ASSERT_EQ(ok, s.apply(collective, groups));
      if (!ok) continue;
      dense = d, sparse = s;
      ++accepted;
      ASSERT_EQ(dense.equals(goal), sparse.at_goal());
      goals += sparse.at_goal();
    }
  }
  EXPECT_GT(accepted, 2000);
  EXPECT_GT(goals, 100);
}

// ---- 3.3: the language ----

TEST(Language, Table2) {
  // [(rack, 1), (server, 2), (CPU, 2), (GPU, 4)]: A0..A3 are 0..3, B 4..7, C 8..11, D 12..15.
  std::vector<int> levels = {1, 2, 2, 4};
  EXPECT_EQ(groups_of({Shape::inside, 2, 0}, levels),
            (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ(groups_of({Shape::parallel, 2, 1}, levels),
            (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}}));
  EXPECT_EQ(groups_of({Shape::parallel, 2, 0}, levels),
            (Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}}));
  EXPECT_EQ(groups_of({Shape::master, 2, 0}, levels), (Groups{{0, 4, 8, 12}}));
  EXPECT_EQ(groups_of({Shape::inside, 1, 0}, levels),
            (Groups{{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}}));
  EXPECT_EQ(groups_of({Shape::parallel, 1, 0}, levels).size(), 8u);
  EXPECT_EQ(groups_of({Shape::inside, 0, 0}, levels).size(), 1u);
  EXPECT_TRUE(groups_of({Shape::inside, 3, 0}, levels).empty());
}

TEST(Language, Table1) {
  // The matrix of the introduction, reduced over axis 1, and hierarchies (a) to (d).
  Matrix m{2, 4, {1, 1, 2, 2, 1, 2, 1, 2}};
  Hierarchy h = hierarchy_of({1, 2, 2, 4});
  auto levels = [&](HierarchyKind kind) { return synthesis_hierarchy(h, m, {1}, kind).levels; };
  EXPECT_EQ(levels(HierarchyKind::system), (std::vector<int>{1, 2, 2, 4}));
  EXPECT_EQ(levels(HierarchyKind::column), (std::vector<int>{1, 2, 2, 2, 2}));
  EXPECT_EQ(levels(HierarchyKind::row), (std::vector<int>{1, 2, 2, 2, 2}));
  EXPECT_EQ(levels(HierarchyKind::reduction), (std::vector<int>{1, 2, 2}));
  EXPECT_EQ(levels(HierarchyKind::collapsed), (std::vector<int>{1, 2, 2}));
  Matrix nine{3, 3, {1, 2, 3, 4, 5, 6, 7, 8, 9}};
  SynthesisHierarchy c =
      synthesis_hierarchy(hierarchy_of({28, 80, 162}), nine, {0, 2}, HierarchyKind::collapsed);
  EXPECT_EQ(c.levels, (std::vector<int>{1, 7, 16, 27}));
}

// ---- 3.4: which hierarchy expresses what ----

using Lowered = std::vector<std::pair<int, std::set<std::vector<int>>>>;  // (collective, groups)

std::set<Lowered> lowered_programs(const Hierarchy& h, const Matrix& m,
                                   const std::vector<int>& reduce, HierarchyKind kind, int limit,
                                   bool masters = true) {
  SynthesisHierarchy s = synthesis_hierarchy(h, m, reduce, kind);
  std::vector<std::vector<int>> goal(s.devices[0].size());
  if (s.devices.size() == 1) {
    std::map<int, int> number;
    for (size_t i = 0; i < s.devices[0].size(); ++i) number[s.devices[0][i]] = static_cast<int>(i);
    for (const auto& group : reduction_groups(m, reduce))
      for (int d : group)
        for (int e : group) goal[number[d]].push_back(number[e]);
  } else {
    for (auto& g : goal) g = iota(static_cast<int>(goal.size()));
  }
  std::set<Lowered> result;
  for (const Program& program : programs_of(program_space_on(s.levels, goal, limit))) {
    bool has_master = std::any_of(program.begin(), program.end(), [](const Step& step) {
      return step.form.shape == Shape::master;
    });
    if (has_master && !masters) continue;
    Lowered lowered;
    for (const Step& step : program) {
      Groups groups = lower(step.form, s);
      for (auto& g : groups) std::sort(g.begin(), g.end());
      lowered.push_back({static_cast<int>(step.collective), {groups.begin(), groups.end()}});
    }
    result.insert(lowered);
  }
  return result;
}

bool within(const std::set<Lowered>& a, const std::set<Lowered>& b) {
  return std::includes(b.begin(), b.end(), a.begin(), a.end());
}

// Theorem 3.2, (d) >= (c) >= (b) >= (a), for one reduction axis. One link of it is wrong as
// printed: (c) >= (b) does not hold for programs with Master; without them it does. (d) contains
// all of (a), (b) and (c), which is what the choice of (d) rests on.
TEST(Synthesis, Theorem32) {
  int strict_ab = 0, strict_bc = 0, strict_cd = 0;
  struct Case {
    std::vector<int> sizes, axes, reduce;
  };
  const std::vector<Case> cases = {{{1, 2, 2, 4}, {4, 4}, {0}}, {{1, 2, 2, 4}, {4, 4}, {1}},
                                   {{2, 2, 2}, {4, 2}, {0}},    {{2, 2, 2}, {2, 4}, {1}},
                                   {{2, 4}, {2, 2, 2}, {1}},    {{2, 2, 3}, {6, 2}, {0}},
                                   {{2, 4}, {8}, {0}},          {{3, 4}, {6, 2}, {1}}};
  for (const Case& c : cases) {
    Hierarchy h = hierarchy_of(c.sizes);
    for (const Matrix& m : placements(h, c.axes)) {
      auto programs = [&](HierarchyKind kind, bool masters = true) {
        return lowered_programs(h, m, c.reduce, kind, 4, masters);
      };
      auto a = programs(HierarchyKind::system), b = programs(HierarchyKind::column),
           r = programs(HierarchyKind::row), d = programs(HierarchyKind::reduction);
      EXPECT_TRUE(within(a, b)) << to_string(m);
      EXPECT_TRUE(within(programs(HierarchyKind::column, false), r)) << to_string(m);
      EXPECT_TRUE(within(r, d)) << to_string(m);
      EXPECT_TRUE(within(a, d)) << to_string(m);
      EXPECT_TRUE(within(b, d)) << to_string(m);
      EXPECT_EQ(d, programs(HierarchyKind::collapsed)) << to_string(m);
      strict_ab += a.size() < b.size();
      strict_bc += b.size() < r.size();
      strict_cd += r.size() < d.size();
    }
  }
  EXPECT_GT(strict_ab, 0);
  EXPECT_GT(strict_bc, 0);
  EXPECT_GT(strict_cd, 0);
}

// Where it ends. Axis 0 within levels 1 and 2, axis 1 on level 0, reduced over axis 0: (b) can
// reduce among the first devices of each half in *both* replicas, since the replicas come first in
// its order; in (c) the replicas come last and Master takes the first only.
TEST(Synthesis, Theorem32FailsForMasters) {
  Hierarchy h = hierarchy_of({2, 2, 2});
  Matrix m{2, 3, {1, 2, 2, 2, 1, 1}};
  auto b = lowered_programs(h, m, {0}, HierarchyKind::column, 3);
  auto r = lowered_programs(h, m, {0}, HierarchyKind::row, 3);
  Lowered master = {{static_cast<int>(Collective::reduce), {{0, 1}, {2, 3}, {4, 5}, {6, 7}}},
                    {static_cast<int>(Collective::all_reduce), {{0, 2}, {4, 6}}},
                    {static_cast<int>(Collective::broadcast), {{0, 1}, {2, 3}, {4, 5}, {6, 7}}}};
  EXPECT_TRUE(b.count(master));
  EXPECT_FALSE(r.count(master));
}

// ---- 3.5: synthesis ----

TEST(Synthesis, ProgramCountsBySize) {
  std::vector<int> by_size(6, 0);
  for (const Program& p : programs_of(program_space(2, 5))) ++by_size[p.size()];
  EXPECT_EQ(by_size, (std::vector<int>{0, 1, 4, 20, 22, 0}));
  EXPECT_EQ(program_space(1, 5).programs, 3);
  EXPECT_EQ(program_space(0, 5).programs, 1);  // nothing to do: the empty program
  const std::vector<std::pair<int, int64_t>> three = {{3, 57}, {4, 262}, {5, 825}, {6, 1362}};
  for (auto [limit, count] : three) EXPECT_EQ(program_space(3, limit).programs, count);
  const std::vector<std::pair<int, int64_t>> four = {{3, 99}, {4, 708}, {5, 3967}};
  for (auto [limit, count] : four) EXPECT_EQ(program_space(4, limit).programs, count);
}

// The programs of [1 2 .. 2] are those of any sizes, explored on the full states as they are.
TEST(Synthesis, SizesOfLevelsDoNotMatter) {
  const std::vector<std::vector<int>> cases = {
      {3},       {7},       {2, 3},    {3, 2},    {5, 2},    {2, 8},    {4, 6},      {2, 16},
      {2, 2, 3}, {3, 2, 2}, {2, 3, 2}, {4, 2, 3}, {2, 2, 4}, {3, 3, 3}, {2, 2, 2, 3}};
  for (const auto& sizes : cases) {
    std::vector<int> levels = rooted(sizes);
    int n = static_cast<int>(size_of(levels));
    int limit = sizes.size() == 4 ? 4 : 5;
    auto fast = programs_of(program_space(static_cast<int>(sizes.size()), limit));
    auto slow =
        programs_of(program_space_on(levels, std::vector<std::vector<int>>(n, iota(n)), limit));
    EXPECT_EQ(fast, slow) << fmt::format("{}", fmt::join(sizes, " "));
  }
}

// Every program, tried blindly: all sequences of forms and collectives on full states.
TEST(Synthesis, EqualsTryingEverySequence) {
  for (const std::vector<int>& sizes : {std::vector<int>{4}, {2, 2}, {2, 3}}) {
    std::vector<int> levels = rooted(sizes);
    int n = static_cast<int>(size_of(levels)), limit = 4;
    DenseStates goal(n);
    goal.set_goal(std::vector<std::vector<uint64_t>>(n, {(uint64_t{1} << n) - 1}));
    std::vector<Program> found;
    Program program;
    auto walk = [&](auto&& self, const DenseStates& state, int left) -> void {
      if (left == 0) {
        if (state.equals(goal)) found.push_back(program);
        return;
      }
      for (const Form& form : forms_of(levels))
        for (const Collective collective : net::kReductionCollectives) {
          if (form.shape == Shape::master && collective != Collective::all_reduce) continue;
          DenseStates next = state;
          if (!next.apply(collective, groups_of(form, levels))) continue;
          program.push_back({form, collective});
          self(self, next, left - 1);
          program.pop_back();
        }
    };
    for (int size = 1; size <= limit; ++size) walk(walk, DenseStates(n), size);
    EXPECT_EQ(programs_of(program_space(static_cast<int>(sizes.size()), limit)), found);
  }
}

// What the costs and bounds rest on, at sizes other than 2 and whichever way a state is reached: a
// device that holds something holds the buffer divided by the sizes of the levels scattered; and
// the units of a level lack none of the chunks, all, or at least 1 - 1/n for the smallest scattered
// size n.
TEST(Synthesis, WhatIsHeldAndLackedFollowsFromTheStateOfTwos) {
  for (const std::vector<int>& sizes :
       {std::vector<int>{5}, {2, 3}, {4, 3}, {2, 3, 2}, {3, 2, 4}}) {
    std::vector<int> levels = rooted(sizes);
    int n = static_cast<int>(size_of(levels)), checked = 0;
    ProgramSpace space = program_space(static_cast<int>(sizes.size()), 5);
    auto walk = [&](auto&& self, int s, const DenseStates& state, int left) -> void {
      const ProgramState& twos = space.states[s];
      int scattered = 1, least = n;
      for (size_t l = 1; l < levels.size(); ++l)
        if (twos.scattered >> l & 1) scattered *= levels[l], least = std::min(least, levels[l]);
      for (int d = 0; d < n; ++d) ASSERT_TRUE(state.held(d) == 0 || state.held(d) * scattered == n);
      for (int l = 0, block = n; l < static_cast<int>(levels.size()); ++l) {
        block /= levels[l];
        int lacking = n;
        for (int first = 0; first < n; first += block)
          lacking = std::min(lacking, state.lacking(first, block));
        if (twos.lack[l] == 0 || twos.lack[l] == 1) {
          ASSERT_EQ(lacking, twos.lack[l] * n);
        } else {
          ASSERT_GT(scattered, 1);
          ASSERT_GE(lacking * least, n * (least - 1));
        }
      }
      ++checked;
      if (left == 0) return;
      for (const Transition& t : twos.next) {
        DenseStates next = state;
        ASSERT_TRUE(next.apply(t.step.collective, groups_of(t.step.form, levels)));
        self(self, t.to, next, left - 1);
      }
    };
    walk(walk, 0, DenseStates(n), 5);
    EXPECT_GE(checked, 6);
  }
}

// Longer programs than usual: the invariants checked inside hold, and the counts never shrink.
TEST(Synthesis, LongerLimits) {
  for (int levels = 1; levels <= 3; ++levels) {
    int64_t before = 0;
    for (int limit = 1; limit <= kMaxSizeLimit; ++limit) {
      int64_t programs = program_space(levels, limit).programs;
      EXPECT_GE(programs, before);
      before = programs;
    }
  }
  EXPECT_EQ(program_space(2, kMaxSizeLimit).programs, 47);  // none of two levels is longer than 4
}

TEST(Synthesis, VerifyRejects) {
  auto programs = programs_of(program_space(2, 5));
  std::vector<int> levels = {1, 4, 16};
  for (const Program& p : programs) {
    EXPECT_TRUE(verify(p, levels));
    Program shorter(p.begin(), p.end() - 1);
    EXPECT_FALSE(verify(shorter, levels));
    Program longer = p;
    longer.push_back(p.back());
    EXPECT_FALSE(verify(longer, levels));
  }
}

TEST(Synthesis, VerifiesOnThousandsOfDevices) {
  std::vector<int> levels = {1, 4, 8, 8, 16};
  int verified = 0;
  for (const Program& p : programs_of(program_space(4, 3))) verified += verify(p, levels);
  EXPECT_EQ(verified, 99);
}

}  // namespace
}  // namespace motley::reduce
