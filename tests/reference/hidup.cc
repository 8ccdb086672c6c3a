#include "reference/hidup.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <map>

namespace motley::spmd {

using namespace solver;

namespace {

constexpr Seconds kNever = std::numeric_limits<Seconds>::infinity();

class Hidup {
 public:
  Hidup(const Problem& problem, int most) : problem_(problem), most_(most) {}

  Seconds run() {
    const size_t n = problem_.nodes.size();
    last_use_.assign(problem_.value_table.size(), -1);
    for (size_t k = 0; k < n; ++k)
      for (int v : problem_.nodes[k].inputs) last_use_[v] = static_cast<int>(k);
    states_.resize(n + 1);
    states_[0][{std::vector<uint32_t>(problem_.value_table.size(), 0), true}] = {{0, 0}};
    for (size_t k = 0; k < n; ++k)
      for (const auto& [state, labels] : states_[k]) {
        from_ = &state;
        labels_ = &labels;
        begin_ = static_cast<int>(k);
        extend(static_cast<int>(k), state.forms, {}, 0, 0);
      }
    Seconds best = kNever;
    for (const auto& [state, labels] : states_[n])
      for (const auto& [time, debt] : labels) best = std::min(best, time + debt);
    return best;
  }

 private:
  struct State {
    std::vector<uint32_t> forms;  // [value] of live ones
    bool full = false;            // the next stage may be without collectives
    auto operator<=>(const State&) const = default;
  };
  using Labels = std::vector<std::pair<Seconds, Seconds>>;

  // `made`: form of values of this stage; `forms`: there, and converted for this stage.
  void extend(int k, const std::vector<uint32_t>& forms, const std::map<int, uint8_t>& made,
              Seconds compute, Seconds comm) {
    if (k > begin_) close(k, forms, made, compute, comm);
    if (k == static_cast<int>(problem_.nodes.size()) || k - begin_ == most_) return;
    const ProblemNode& node = problem_.nodes[k];
    for (const Option& option : problem_.option_tables[node.table].options) {
      std::vector<uint32_t> there = forms;
      Seconds sent = comm;
      bool possible = true;
      for (size_t i = 0; i < node.inputs.size() && possible; ++i) {
        const int v = node.inputs[i];
        if (const auto own = made.find(v); own != made.end()) {
          possible = own->second == option.in[i];
          continue;
        }
        if (there[v] >> option.in[i] & 1) continue;
        const FormTable& table = problem_.form_tables[problem_.value_table[v]];
        const Seconds seconds = complete_from_set(table, there[v], 1u << option.in[i]);
        possible = std::isfinite(seconds) && std::popcount(there[v]) < 2;
        sent += seconds;
        there[v] |= 1u << option.in[i];
      }
      if (!possible) continue;
      std::map<int, uint8_t> with = made;
      for (size_t o = 0; o < node.outputs.size(); ++o) with[node.outputs[o]] = option.out[o];
      extend(k + 1, there, with, compute + option.compute[0] + option.comm, sent);
    }
  }

  void close(int k, std::vector<uint32_t> forms, const std::map<int, uint8_t>& made,
             Seconds compute, Seconds comm) {
    if (comm == 0 && !from_->full) return;
    State state;
    for (const auto& [v, form] : made) forms[v] |= 1u << form;
    for (size_t v = 0; v < forms.size(); ++v)
      if (last_use_[v] < k) forms[v] = 0;
    state.forms = std::move(forms);
    state.full = k - begin_ == most_;
    Labels& labels = states_[k][state];
    for (const auto& [time, debt] : *labels_) {
      const std::pair<Seconds, Seconds> label(time + std::max(debt, comm) + std::max(compute, comm),
                                              compute);
      if (std::any_of(labels.begin(), labels.end(), [&](const auto& other) {
            return other.first <= label.first && other.second <= label.second;
          }))
        continue;
      std::erase_if(labels, [&](const auto& other) {
        return label.first <= other.first && label.second <= other.second;
      });
      labels.push_back(label);
    }
  }

  const Problem& problem_;
  const int most_;
  std::vector<int> last_use_;  // [value]
  std::vector<std::map<State, Labels>> states_;
  const State* from_ = nullptr;
  const Labels* labels_ = nullptr;
  int begin_ = 0;
};

}  // namespace

Seconds hidup(const Problem& problem, int most_nodes) { return Hidup(problem, most_nodes).run(); }

Seconds best_of_all_in_parts(const Problem& problem, const PartsSearch& search) {
  const Weights mean{std::vector<double>(problem.types, 1.0 / problem.types), {}};
  std::vector<int> option(problem.nodes.size(), 0);
  const auto options = [&](size_t i) {
    return static_cast<int>(problem.option_tables[problem.nodes[i].table].options.size());
  };
  Seconds best = kNever;
  while (true) {
    const Solution solution = evaluate(problem, option, mean);
    if (!solution.option.empty() && std::isfinite(solution.price)) {
      const DivisionProblem division = division_of(problem, solution, search);
      const int steps = static_cast<int>(division.steps.size());
      for (int cuts = 0; cuts < 1 << (steps - 1); ++cuts) {
        std::vector<int> begin = {0};
        for (int i = 1; i < steps; ++i)
          if (cuts >> (i - 1) & 1) begin.push_back(i);
        best = std::min(best, division_seconds(division, begin));
      }
    }
    size_t i = 0;
    while (i < option.size() && ++option[i] == options(i)) option[i++] = 0;
    if (i == option.size()) return best;
  }
}

}  // namespace motley::spmd
