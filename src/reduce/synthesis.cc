#include "reduce/synthesis.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "core/error.h"

namespace motley::reduce {

namespace {

constexpr size_t kMaxStateBytes = size_t{256} << 20;

// All transitions between the states reachable within the limit.
class Explorer {
 public:
  Explorer(const std::vector<int>& levels, const std::vector<std::vector<int>>& goal,
           int size_limit)
      : levels_(levels),
        limit_(size_limit),
        initial_(static_cast<int>(size_of(levels))),
        goal_(initial_) {
    int n = initial_.devices();
    goal_sets_.assign(n, std::vector<uint64_t>(initial_.words(), 0));
    for (int d = 0; d < n; ++d)
      for (int e : goal[d]) goal_sets_[d][e / 64] |= uint64_t{1} << (e % 64);
    goal_.set_goal(goal_sets_);
    for (const Form& form : forms_of(levels)) {
      forms_.push_back(form);
      groups_.push_back(groups_of(form, levels));
    }
  }

  ProgramSpace run() {
    space_.size_limit = limit_;
    enter(initial_, 0);
    size_t layer = 0;
    for (int steps = 0; steps < limit_; ++steps) {
      size_t end = matrices_.size();
      for (; layer < end; ++layer) expand(static_cast<int>(layer), steps + 1 == limit_);
    }
    prune();
    return std::move(space_);
  }

  const std::vector<DenseStates>& matrices() const { return matrices_; }

 private:
  // The number of a state, which is new or known.
  int enter(const DenseStates& matrix, uint32_t scattered) {
    auto [first, last] = by_hash_.equal_range(matrix.hash());
    for (auto it = first; it != last; ++it)
      if (matrices_[it->second].equals(matrix)) {
        MOTLEY_CHECK(!full() || space_.states[it->second].scattered == scattered);
        return it->second;
      }
    int id = static_cast<int>(matrices_.size());
    size_t n = static_cast<size_t>(initial_.devices());
    if (matrices_.size() * n * n * initial_.words() * sizeof(uint64_t) > kMaxStateBytes)
      throw user_error("reduce", "more than {} device states; lower --size-limit (now {})",
                       matrices_.size(), limit_);
    by_hash_.emplace(matrix.hash(), id);
    matrices_.push_back(matrix);
    space_.states.emplace_back();
    space_.states[id].goal = matrix.equals(goal_);
    space_.states[id].scattered = scattered;
    return id;
  }
  // Is the goal a reduction over all devices? Then what is scattered is a matter of levels.
  bool full() const {
    for (const auto& set : goal_sets_)
      if (set != goal_sets_[0]) return false;
    return true;
  }

  // `last`: only the goal is of use.
  void expand(int id, bool last) {
    if (space_.states[id].goal) return;
    for (size_t f = 0; f < forms_.size(); ++f)
      for (Collective collective : net::kReductionCollectives) {
        if (forms_[f].shape == Shape::master && collective != Collective::all_reduce) continue;
        DenseStates next = matrices_[id];
        if (!next.apply(collective, groups_[f])) continue;
        if (last ? !next.equals(goal_) : next.strays(goal_sets_)) continue;
        uint32_t scattered = space_.states[id].scattered, spanned = 0;
        Span span = span_of(forms_[f], levels_);
        for (int l = span.first; l <= span.last; ++l) spanned |= uint32_t{1} << l;
        if (collective == Collective::reduce_scatter) scattered |= spanned;
        if (collective == Collective::all_gather) scattered &= ~spanned;
        int to = enter(next, scattered);
        space_.states[id].next.push_back({{forms_[f], collective}, to});
      }
  }

  // Counts the ways to the goal and drops transitions that lie on none.
  void prune() {
    size_t n = space_.states.size();
    // ways[s][state]: programs of exactly s steps from state; least steps from the start.
    std::vector<std::vector<double>> ways(limit_ + 1, std::vector<double>(n, 0.0));
    std::vector<int> to_goal(n, kMaxSizeLimit + 1), from_start(n, kMaxSizeLimit + 1);
    for (size_t i = 0; i < n; ++i)
      if (space_.states[i].goal) ways[0][i] = 1, to_goal[i] = 0;
    for (int s = 1; s <= limit_; ++s)
      for (size_t i = 0; i < n; ++i) {
        for (const Transition& t : space_.states[i].next) ways[s][i] += ways[s - 1][t.to];
        if (ways[s][i] > 0) to_goal[i] = std::min(to_goal[i], s);
      }
    from_start[0] = 0;
    for (size_t i = 0; i < n; ++i)  // breadth-first order
      for (const Transition& t : space_.states[i].next)
        from_start[t.to] = std::min(from_start[t.to], from_start[i] + 1);
    double programs = 0;
    for (int s = 0; s <= limit_; ++s) programs += ways[s][0];
    if (programs > static_cast<double>(kMaxPrograms))
      throw user_error("reduce", "{} programs of at most {} steps; lower --size-limit", programs,
                       limit_);
    space_.programs = static_cast<int64_t>(programs);
    for (size_t i = 0; i < n; ++i)
      std::erase_if(space_.states[i].next, [&](const Transition& t) {
        return from_start[i] + 1 + to_goal[t.to] > limit_;
      });
  }

  std::vector<int> levels_;
  int limit_;
  DenseStates initial_, goal_;
  std::vector<std::vector<uint64_t>> goal_sets_;
  std::vector<Form> forms_;
  std::vector<Groups> groups_;
  std::vector<DenseStates> matrices_;
  std::unordered_multimap<uint64_t, int> by_hash_;
  ProgramSpace space_;
};

void check_limit(int size_limit) {
  if (size_limit < 1 || size_limit > kMaxSizeLimit)
    throw user_error("reduce", "--size-limit is {}; give a number from 1 to {}", size_limit,
                     kMaxSizeLimit);
}

}  // namespace

ProgramSpace program_space(int levels, int size_limit) {
  check_limit(size_limit);
  if (levels > 6)
    throw user_error(
        "reduce",
        "the reduction spans {} levels of the hierarchy; at most 6 are explored: join levels",
        levels);
  std::vector<int> twos(levels + 1, 2);
  twos[0] = 1;
  int devices = 1 << levels;
  std::vector<int> all(devices);
  std::iota(all.begin(), all.end(), 0);
  Explorer explorer(twos, std::vector<std::vector<int>>(devices, all), size_limit);
  ProgramSpace space = explorer.run();
  for (size_t s = 0; s < space.states.size(); ++s) {
    std::vector<double>& lack = space.states[s].lack;
    for (int l = 0; l <= levels; ++l) {
      int block = devices >> l, least = devices;
      for (int first = 0; first < devices; first += block)
        least = std::min(least, explorer.matrices()[s].lacking(first, block));
      lack.push_back(least == 0 ? 0 : least == devices ? 1 : 0.5);
    }
  }
  return space;
}

ProgramSpace program_space_on(const std::vector<int>& levels,
                              const std::vector<std::vector<int>>& goal, int size_limit) {
  check_limit(size_limit);
  MOTLEY_CHECK(static_cast<int64_t>(goal.size()) == size_of(levels));
  return Explorer(levels, goal, size_limit).run();
}

std::vector<Program> programs_of(const ProgramSpace& space) {
  // Which states reach the goal in exactly s steps.
  std::vector<std::vector<char>> reaches(space.size_limit + 1,
                                         std::vector<char>(space.states.size(), 0));
  for (size_t i = 0; i < space.states.size(); ++i) reaches[0][i] = space.states[i].goal;
  for (int s = 1; s <= space.size_limit; ++s)
    for (size_t i = 0; i < space.states.size(); ++i)
      for (const Transition& t : space.states[i].next) reaches[s][i] |= reaches[s - 1][t.to];
  std::vector<Program> programs;
  programs.reserve(space.programs);
  Program program;
  auto walk = [&](auto&& self, int state, int left) -> void {
    if (left == 0) {
      programs.push_back(program);
      return;
    }
    for (const Transition& t : space.states[state].next) {
      if (!reaches[left - 1][t.to]) continue;
      program.push_back(t.step);
      self(self, t.to, left - 1);
      program.pop_back();
    }
  };
  for (int size = 0; size <= space.size_limit; ++size)
    if (reaches[size][0]) walk(walk, 0, size);
  MOTLEY_CHECK(static_cast<int64_t>(programs.size()) == space.programs);
  return programs;
}

bool verify(const Program& program, const std::vector<int>& levels) {
  SparseStates states(static_cast<int>(size_of(levels)));
  for (const Step& step : program)
    if (!states.apply(step.collective, groups_of(step.form, levels))) return false;
  return states.at_goal();
}

std::string to_string(const Step& step, const std::vector<std::string>& names) {
  std::string collective;  // "ReduceScatter"
  bool capital = true;
  for (const char c : std::string_view(to_string(step.collective))) {
    if (c != '_') collective += capital ? static_cast<char>(std::toupper(c)) : c;
    capital = c == '_';
  }
  std::string form = "InsideGroup";
  if (step.form.shape != Shape::inside)
    form = fmt::format("{}({})", step.form.shape == Shape::parallel ? "Parallel" : "Master",
                       names[step.form.ancestor]);
  return fmt::format("({}, {}, {})", names[step.form.slice], form, collective);
}

}  // namespace motley::reduce
