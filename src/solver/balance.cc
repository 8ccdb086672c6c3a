#include "solver/balance.h"

#include <coin/Clp_C_Interface.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>

#include "core/error.h"
#include "core/infinity.h"

namespace motley::solver {
namespace {

constexpr double kClpInf = std::numeric_limits<double>::max();

// A linear program, minimised; all columns are >= 0.
class LinearProgram {
 public:
  int column(double cost, double upper = kClpInf) {
    cost_.push_back(cost);
    upper_.push_back(upper);
    entries_.emplace_back();
    return static_cast<int>(cost_.size()) - 1;
  }
  int row(double lower, double upper, const std::vector<std::pair<int, double>>& terms) {
    const int r = static_cast<int>(row_lower_.size());
    row_lower_.push_back(lower);
    row_upper_.push_back(upper);
    for (const auto& [column, coefficient] : terms) {
      if (coefficient != 0) entries_[column].emplace_back(r, coefficient);
    }
    return r;
  }
  // Whether there is an optimum.
  bool solve() {
    std::vector<CoinBigIndex> start{0};
    std::vector<int> index;
    std::vector<double> element;
    const std::vector<double> lower(cost_.size(), 0);
    for (const auto& column : entries_) {
      for (const auto& [r, coefficient] : column) {
        index.push_back(r);
        element.push_back(coefficient);
      }
      start.push_back(static_cast<CoinBigIndex>(index.size()));
    }
    const std::unique_ptr<Clp_Simplex, void (*)(Clp_Simplex*)> model(Clp_newModel(),
                                                                     Clp_deleteModel);
    Clp_setLogLevel(model.get(), 0);
    Clp_setPrimalTolerance(model.get(), 1e-10);
    Clp_setDualTolerance(model.get(), 1e-10);
    Clp_loadProblem(model.get(), static_cast<int>(cost_.size()),
                    static_cast<int>(row_lower_.size()), start.data(), index.data(), element.data(),
                    lower.data(), upper_.data(), cost_.data(), row_lower_.data(),
                    row_upper_.data());
    Clp_dual(model.get(), 0);
    if (Clp_status(model.get()) != 0) return false;
    const double* x = Clp_primalColumnSolution(model.get());
    const double* y = Clp_dualRowSolution(model.get());
    value.assign(x, x + cost_.size());
    dual.assign(y, y + row_lower_.size());
    return true;
  }

  std::vector<double> value;  // [column]
  std::vector<double> dual;   // [row]

 private:
  std::vector<double> cost_, upper_, row_lower_, row_upper_;
  std::vector<std::vector<std::pair<int, double>>> entries_;
};

// Stages equal up to a factor: the greatest of their times is 1, `scale` is the sum of the factors.
struct Merged {
  double scale = 0;
  std::vector<double> sharded;  // [segment * types + type]
  std::vector<double> replicated;
};

// [segment * types + type]
std::vector<double> sharded_of(const BalanceStage& stage, size_t segments, size_t types) {
  if (stage.sharded.size() == segments * types) return stage.sharded;
  std::vector<double> all(segments * types, 0);
  std::copy(stage.sharded.begin(), stage.sharded.end(), all.begin() + stage.segment * types);
  return all;
}

std::vector<Merged> merge(const BalanceProblem& problem, double share) {
  std::vector<Merged> merged;
  std::map<std::vector<int64_t>, size_t> known;
  for (const BalanceStage& stage : problem.stages) {
    const size_t types = problem.devices.size();
    const std::vector<double> sharded = sharded_of(stage, problem.sharded.size(), types);
    double unit = 0;
    for (double seconds : sharded) unit = std::max(unit, seconds * share);
    for (double seconds : stage.replicated) unit = std::max(unit, seconds);
    if (unit == 0) continue;
    // Twelve digits: stages of equal layers differ by rounding only.
    std::vector<int64_t> key;
    for (double seconds : sharded) key.push_back(std::llround(seconds * share / unit * 1e12));
    for (double seconds : stage.replicated) key.push_back(std::llround(seconds / unit * 1e12));
    const auto [it, fresh] = known.try_emplace(std::move(key), merged.size());
    if (fresh) {
      Merged m;
      for (double seconds : sharded) m.sharded.push_back(seconds * share / unit);
      for (double seconds : stage.replicated) m.replicated.push_back(seconds / unit);
      merged.push_back(std::move(m));
    }
    merged[it->second].scale += unit;
  }
  return merged;
}

// A problem and the units of its linear program. Columns are shares in units of the mean share, and
// stage times in units of the longest work of the stage; costs are in units of their sum. So all
// numbers are about 1.
struct ScaledProblem {
  explicit ScaledProblem(const BalanceProblem& of)
      : problem(of),
        types(of.devices.size()),
        segments(of.sharded.size()),
        padded(of.sharded.size(), 0) {
    MOTLEY_CHECK(types >= 1 && segments >= 1);
    MOTLEY_CHECK(problem.fixed.size() == types && problem.capacity.size() == types);
    double count = 0;
    for (int n : problem.devices) {
      MOTLEY_CHECK(n >= 1);
      count += n;
    }
    for (const BalanceStage& stage : problem.stages) {
      MOTLEY_CHECK(stage.segment >= 0 && stage.segment < static_cast<int>(segments));
      MOTLEY_CHECK(stage.sharded.size() == types || stage.sharded.size() == segments * types);
      MOTLEY_CHECK(stage.replicated.size() == types);
      padded[stage.segment] += stage.comm_padded;
    }
    share = 1 / count;
    stages = merge(problem, share);
    for (const Merged& stage : stages) unit += stage.scale;
    for (double p : padded) unit += p * share;
    if (unit == 0) unit = 1;
  }
  double bytes_unit(size_t type) const { return std::max(problem.capacity[type], 1.0); }

  const BalanceProblem& problem;
  const size_t types, segments;
  std::vector<double> padded;  // [segment] seconds per unit of the largest share, of all stages
  double share = 0;            // the mean
  std::vector<Merged> stages;
  double unit = 0;  // of costs, seconds
};

// The linear program of a problem. In an elastic one memory may be exceeded, and that is all that
// costs.
class BalanceProgram {
 public:
  BalanceProgram(const ScaledProblem& scaled, bool elastic)
      : scaled_(scaled),
        problem_(scaled.problem),
        types_(scaled.types),
        segments_(scaled.segments),
        share_(scaled.share),
        unit_(scaled.unit),
        elastic_(elastic) {
    for (size_t s = 0; s < segments_; ++s) add_shares(s);
    if (!elastic) {
      for (const Merged& stage : scaled.stages) add_stage(stage);
      for (const BalanceExchange& x : problem_.exchanges)
        if (x.bytes != 0 && !problem_.ports.empty()) add_exchange(x);
    }
    for (size_t j = 0; j < types_; ++j) add_memory(j);
  }

  bool solve() { return lp_.solve(); }

  // Of the solution, as in Balance.
  std::vector<std::vector<double>> ratio() const {
    std::vector<std::vector<double>> result;
    for (size_t s = 0; s < segments_; ++s) {
      std::vector<double>& of_segment = result.emplace_back();
      double sum = 0;
      for (size_t j = 0; j < types_; ++j) {
        of_segment.push_back(std::max(0.0, lp_.value[b_[s][j]] * share_));
        sum += of_segment[j] * problem_.devices[j];
      }
      for (double& r : of_segment) r /= sum;
    }
    return result;
  }

  Weights weights() const {
    Weights result;
    result.compute.assign(types_, 0);
    double sum = 0;
    for (const auto& rows : work_) {
      for (size_t j = 0; j < types_; ++j) {
        const double dual = std::max(0.0, lp_.dual[rows[j]]);
        result.compute[j] += dual;
        sum += dual;
      }
    }
    for (double& w : result.compute) w = sum > 0 ? w / sum : 1.0 / static_cast<double>(types_);
    for (size_t j = 0; j < types_; ++j) {
      if (memory_[j] < 0) continue;
      const double bytes = scaled_.bytes_unit(j);
      const double dual = std::max(0.0, -lp_.dual[memory_[j]]) * unit_ / bytes;
      if (dual > 0 && result.memory.empty()) result.memory.assign(types_, 0);
      if (dual > 0) result.memory[j] = dual;
    }
    return result;
  }

  // REQUIRES: elastic.
  std::vector<double> lacking_bytes() const {
    std::vector<double> result;
    for (size_t j = 0; j < types_; ++j)
      result.push_back(extra_[j] < 0 ? 0 : lp_.value[extra_[j]] * scaled_.bytes_unit(j));
    return result;
  }

 private:
  using Terms = std::vector<std::pair<int, double>>;
  // Columns: what lies below a device more in the first segment of an exchange than in the second,
  // and less.
  struct Difference {
    int more, less;
  };

  void add_shares(size_t segment) {
    Terms whole;
    b_.emplace_back();
    const int largest = lp_.column(elastic_ ? 0 : scaled_.padded[segment] * share_ / unit_);
    for (size_t j = 0; j < types_; ++j) {
      const int column = lp_.column(0);
      b_.back().push_back(column);
      whole.emplace_back(column, problem_.devices[j] * share_);
      lp_.row(0, kClpInf, {{largest, 1}, {column, -1}});
    }
    lp_.row(1, 1, whole);
  }

  void add_stage(const Merged& stage) {
    const int time = lp_.column(stage.scale / unit_);
    work_.emplace_back();
    for (size_t j = 0; j < types_; ++j) {
      Terms terms{{time, 1}};
      for (size_t s = 0; s < segments_; ++s)
        terms.emplace_back(b_[s][j], -stage.sharded[s * types_ + j]);
      work_.back().push_back(lp_.row(stage.replicated[j], kClpInf, terms));
    }
  }

  // An exchange takes as long as the port that takes longest, in either direction.
  void add_exchange(const BalanceExchange& x) {
    double slowest = 0;
    for (const BalancePort& port : problem_.ports)
      slowest = std::max(slowest, port.seconds_per_byte);
    const int time = lp_.column(x.bytes * slowest / unit_);
    std::map<std::vector<double>, Difference> known;  // by the devices below
    const auto moved = [&](const std::vector<double>& devices) {
      const auto [it, fresh] = known.try_emplace(devices);
      if (fresh) it->second = add_difference(x, devices);
      return it->second;
    };
    for (const BalancePort& port : problem_.ports) {
      const Difference first = moved(port.before), end = moved(port.until);
      const double ratio = port.seconds_per_byte / slowest;
      lp_.row(0, kClpInf, {{time, 1}, {end.more, -ratio}, {first.less, -ratio}});
      lp_.row(0, kClpInf, {{time, 1}, {end.less, -ratio}, {first.more, -ratio}});
    }
  }

  // `devices`: [type] below the device.
  Difference add_difference(const BalanceExchange& x, const std::vector<double>& devices) {
    const int more_column = lp_.column(0), less_column = lp_.column(0);
    Terms more{{more_column, 1}}, less{{less_column, 1}};
    for (size_t j = 0; j < types_; ++j) {
      const double below = devices[j] * share_;
      more.emplace_back(b_[x.a][j], -below);
      more.emplace_back(b_[x.b][j], below);
      less.emplace_back(b_[x.a][j], below);
      less.emplace_back(b_[x.b][j], -below);
    }
    lp_.row(0, kClpInf, more);
    lp_.row(0, kClpInf, less);
    return {more_column, less_column};
  }

  void add_memory(size_t type) {
    memory_.push_back(-1);
    extra_.push_back(-1);
    if (problem_.capacity[type] == kInfinity) return;
    Terms terms;
    const double bytes = scaled_.bytes_unit(type);
    for (size_t s = 0; s < segments_; ++s) {
      terms.emplace_back(b_[s][type], problem_.sharded[s][type] * share_ / bytes);
    }
    if (elastic_) {
      extra_[type] = lp_.column(problem_.devices[type] * bytes * share_ / 1e9);
      terms.emplace_back(extra_[type], -1);
    }
    memory_[type] =
        lp_.row(-kClpInf, (problem_.capacity[type] - problem_.fixed[type]) / bytes, terms);
  }

  const ScaledProblem& scaled_;
  const BalanceProblem& problem_;
  const size_t types_, segments_;
  const double share_, unit_;
  const bool elastic_;
  LinearProgram lp_;
  std::vector<std::vector<int>> b_;     // [segment][type] columns
  std::vector<std::vector<int>> work_;  // [merged stage][type] rows
  std::vector<int> memory_;             // [type] rows, -1: has no limit
  std::vector<int> extra_;              // [type] columns of memory that it lacks, -1: none
};

// Devices of one type have the same share in every segment, if that fits.
std::optional<Balance> of_one_type(const ScaledProblem& scaled) {
  const BalanceProblem& problem = scaled.problem;
  if (scaled.types > 1) return std::nullopt;
  double bytes = problem.fixed[0];
  for (const auto& sharded : problem.sharded) bytes += sharded[0] * scaled.share;
  if (bytes > problem.capacity[0]) return std::nullopt;
  Balance result;
  result.feasible = true;
  result.rows = static_cast<int>(scaled.stages.size());
  result.ratio.assign(scaled.segments, {scaled.share / (scaled.share * problem.devices[0])});
  result.seconds = step_seconds(problem, result.ratio);
  result.weights.compute = {1};
  return result;
}

Balance by_linear_program(const ScaledProblem& scaled) {
  Balance result;
  result.rows = static_cast<int>(scaled.stages.size());
  BalanceProgram program(scaled, false);
  result.feasible = program.solve();
  if (!result.feasible) {
    BalanceProgram elastic(scaled, true);
    MOTLEY_CHECK(elastic.solve(), "elastic balance");
    result.lacking_bytes = elastic.lacking_bytes();
    return result;
  }
  result.ratio = program.ratio();
  result.seconds = step_seconds(scaled.problem, result.ratio);
  result.weights = program.weights();
  return result;
}

// How much less of a tensor lies below a device in segment b than in segment a.
double difference(const std::vector<double>& devices, const std::vector<double>& a,
                  const std::vector<double>& b) {
  double sum = 0;
  for (size_t j = 0; j < devices.size(); ++j) sum += devices[j] * (a[j] - b[j]);
  return sum;
}

}  // namespace

double step_seconds(const BalanceProblem& problem, const std::vector<std::vector<double>>& ratio) {
  const size_t types = problem.devices.size();
  double sum = 0;
  for (const BalanceStage& stage : problem.stages) {
    const std::vector<double>& b = ratio[stage.segment];
    const std::vector<double> sharded = sharded_of(stage, ratio.size(), types);
    double longest = 0;
    for (size_t j = 0; j < types; ++j) {
      double seconds = stage.replicated[j];
      for (size_t s = 0; s < ratio.size(); ++s) seconds += sharded[s * types + j] * ratio[s][j];
      longest = std::max(longest, seconds);
    }
    sum += stage.comm_fixed + stage.comm_padded * *std::max_element(b.begin(), b.end()) + longest;
  }
  for (const BalanceExchange& x : problem.exchanges) {
    double worst = 0;
    for (const BalancePort& port : problem.ports) {
      const double first = difference(port.before, ratio[x.a], ratio[x.b]);
      const double end = difference(port.until, ratio[x.a], ratio[x.b]);
      const double out = std::max(0.0, end) + std::max(0.0, -first);
      const double in = std::max(0.0, -end) + std::max(0.0, first);
      worst = std::max(worst, std::max(out, in) * port.seconds_per_byte);
    }
    sum += x.bytes * worst;
  }
  return sum;
}

Balance balance(const BalanceProblem& problem) {
  const ScaledProblem scaled(problem);
  if (auto plain = of_one_type(scaled)) return *std::move(plain);
  return by_linear_program(scaled);
}

Balance balance_by_linear_program(const BalanceProblem& problem) {
  return by_linear_program(ScaledProblem(problem));
}

double price(const PriceLine& line, const MaxMin& at) {
  double price = line.comm;
  for (size_t j = 0; j < line.compute.size(); ++j) price += at.weights[j] * line.compute[j];
  for (size_t k = 0; k < line.excess.size(); ++k) price += at.multipliers[k] * line.excess[k];
  return price;
}

MaxMin max_min(const std::vector<PriceLine>& lines, double most) {
  MOTLEY_CHECK(!lines.empty());
  const size_t types = lines[0].compute.size(), limits = lines[0].excess.size();
  double unit = 0;
  for (const PriceLine& line : lines) {
    MOTLEY_CHECK(line.compute.size() == types && line.excess.size() == limits);
    for (double seconds : line.compute) unit = std::max(unit, line.comm + seconds);
  }
  if (unit == 0) unit = 1;
  // Maximise z, which is at most the price of every line.
  LinearProgram lp;
  const int z = lp.column(-1, 1 + most);
  std::vector<std::pair<int, double>> sum;
  std::vector<int> w, m;
  for (size_t j = 0; j < types; ++j) {
    w.push_back(lp.column(0));
    sum.emplace_back(w.back(), 1);
  }
  for (size_t k = 0; k < limits; ++k) m.push_back(lp.column(0, most));
  lp.row(1, 1, sum);
  std::vector<int> rows;
  for (const PriceLine& line : lines) {
    std::vector<std::pair<int, double>> terms{{z, 1}};
    for (size_t j = 0; j < types; ++j) terms.emplace_back(w[j], -line.compute[j] / unit);
    for (size_t k = 0; k < limits; ++k) terms.emplace_back(m[k], -line.excess[k] / unit);
    rows.push_back(lp.row(-kClpInf, line.comm / unit, terms));
  }
  MOTLEY_CHECK(lp.solve(), "weights of the largest least price");
  MaxMin result;
  double mixed = 0;
  for (int row : rows) {
    result.mix.push_back(std::max(0.0, -lp.dual[row]));
    mixed += result.mix.back();
  }
  for (double& part : result.mix) part /= mixed > 0 ? mixed : 1;
  double total = 0;
  for (int column : w) {
    result.weights.push_back(std::max(0.0, lp.value[column]));
    total += result.weights.back();
  }
  for (double& weight : result.weights) weight /= total;
  for (int column : m) result.multipliers.push_back(std::clamp(lp.value[column], 0.0, most));
  result.price = kInfinity;
  for (const PriceLine& line : lines) result.price = std::min(result.price, price(line, result));
  return result;
}

}  // namespace motley::solver
