#include "trials/fit.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

namespace motley::grid::trials {

namespace {

constexpr double kSigma = 0.1, kProfileSigma = 0.15;  // of a row's logarithm, at least
constexpr double kRows = 20;  // a set counts as much as so many rows of a small one

// Of a residual in sigmas: it loses weight beyond 2, and beyond 1 where the trial took longer than
// predicted: whatever else runs on a machine and its network slows trials down, and none up.
double width_of(double r) { return r < 0 ? 1 : 4; }
double cauchy_weight(double r) { return 1 / (1 + r * r / width_of(r)); }
double cauchy_loss(double r) { return width_of(r) * std::log1p(r * r / width_of(r)); }

// The residuals of one set: rows, then profiles.
Vector residuals(const Set& set, const std::vector<int>& rows, bool profiles, double sigma,
                 const Constants& constants) {
  Predictor predict(set, constants);
  Vector r;
  // Many rows of one table are not as many facts about its machine.
  const double weight = std::min(1.0, std::sqrt(kRows / static_cast<double>(rows.size() + 1)));
  for (int row : rows)
    r.push_back(weight * std::log(predict(set.trials[row]).step / set.trials[row].measured) /
                sigma);
  for (const Profile& profile : set.profiles)
    if (profiles) r.push_back(std::log(predict(profile) / profile.measured) / kProfileSigma);
  return r;
}

}  // namespace

namespace {

// Levenberg-Marquardt with numeric derivatives. `sigma`: [seen] of its rows.
Constants fit_at(const std::vector<Seen>& seen, const std::vector<const Set*>& profiled,
                 const Vector& sigmas) {
  std::vector<Seen> all = seen;
  for (const Set* set : profiled)
    if (std::none_of(all.begin(), all.end(), [&](const Seen& s) { return s.set == set; }))
      all.push_back({set, {}});
  std::map<std::string, double> freedom;
  Constants now;
  for (const Seen& s : all)
    for (const Parameter& p : s.set->parameters)
      if (now.emplace(p.name, std::log(p.start)).second) freedom[p.name] = p.freedom;
  const Constants prior = now;
  const size_t n = now.size();
  std::vector<std::string> names;
  for (const auto& [name, value] : now) names.push_back(name);
  auto depends = [&](const Seen& s, const std::string& name) {
    return std::any_of(s.set->parameters.begin(), s.set->parameters.end(),
                       [&](const Parameter& p) { return p.name == name; });
  };
  auto profile_of = [&](const Seen& s) {
    return std::find(profiled.begin(), profiled.end(), s.set) != profiled.end();
  };
  auto sigma_of = [&](size_t i) { return i < sigmas.size() ? sigmas[i] : kSigma; };
  auto of_all = [&](const Constants& at) {
    std::vector<Vector> r;
    for (size_t i = 0; i < all.size(); ++i)
      r.push_back(residuals(*all[i].set, all[i].rows, profile_of(all[i]), sigma_of(i), at));
    Vector& priors = r.emplace_back();
    for (const std::string& name : names)
      priors.push_back((at.at(name) - prior.at(name)) / freedom[name]);
    return r;
  };
  auto loss = [](const std::vector<Vector>& r) {
    double sum = 0;
    for (const Vector& part : r)
      for (double x : part) sum += cauchy_loss(x);
    return sum;
  };
  std::vector<Vector> at = of_all(now);
  double damping = 1e-2;
  for (int iteration = 0; iteration < 25; ++iteration) {
    std::vector<Vector> normal(n, Vector(n, 0.0));
    Vector gradient(n, 0.0);
    for (size_t part = 0; part < at.size(); ++part) {
      const bool priors = part == all.size();
      std::vector<size_t> on;
      std::vector<Vector> slopes;
      for (size_t i = 0; i < n; ++i) {
        if (priors) {
          on.push_back(i), slopes.emplace_back(n, 0.0);
          slopes.back()[i] = 1 / freedom[names[i]];
          continue;
        }
        if (!depends(all[part], names[i])) continue;
        Constants moved = now;
        moved[names[i]] += 1e-3;
        Vector r =
            residuals(*all[part].set, all[part].rows, profile_of(all[part]), sigma_of(part), moved);
        for (size_t k = 0; k < r.size(); ++k) r[k] = (r[k] - at[part][k]) / 1e-3;
        on.push_back(i), slopes.push_back(std::move(r));
      }
      for (size_t k = 0; k < at[part].size(); ++k) {
        const double w = cauchy_weight(at[part][k]);
        for (size_t i = 0; i < on.size(); ++i) {
          gradient[on[i]] -= w * slopes[i][k] * at[part][k];
          for (size_t j = 0; j < on.size(); ++j)
            normal[on[i]][on[j]] += w * slopes[i][k] * slopes[j][k];
        }
      }
    }
    const double before = loss(at);
    bool better = false;
    for (int attempt = 0; attempt < 6 && !better; ++attempt) {
      const Vector step = solve(normal, gradient, damping);
      Constants moved = now;
      for (size_t i = 0; i < n; ++i) moved[names[i]] += std::clamp(step[i], -0.7, 0.7);
      std::vector<Vector> r = of_all(moved);
      if (loss(r) < before) {
        better = true;
        now = moved;
        at = std::move(r);
        damping = std::max(damping / 5, 1e-6);
      } else {
        damping *= 5;
      }
    }
    if (!better || before - loss(at) < 1e-4 * before) break;
  }
  return now;
}

}  // namespace

Constants fit(const std::vector<Seen>& seen, const std::vector<const Set*>& profiled) {
  Vector sigmas(seen.size(), kSigma);
  const Constants first = fit_at(seen, profiled, sigmas);
  // A noisy table is trusted less: as its median residual says.
  for (size_t i = 0; i < seen.size(); ++i) {
    Predictor predict(*seen[i].set, first);
    Vector off;
    for (int row : seen[i].rows) {
      const Trial& t = seen[i].set->trials[row];
      off.push_back(std::abs(std::log(predict(t).step / t.measured)));
    }
    if (off.empty()) continue;
    std::nth_element(off.begin(), off.begin() + off.size() / 2, off.end());
    sigmas[i] = std::max(kSigma, 1.48 * off[off.size() / 2]);
  }
  return fit_at(seen, profiled, sigmas);
}

const char* to_string(Mechanism mechanism) {
  switch (mechanism) {
    case Mechanism::none:
      return "none of them";
    case Mechanism::launches:
      return "launches";
    case Mechanism::products:
      return "products";
    case Mechanism::traffic:
      return "memory traffic";
    case Mechanism::collectives:
      return "collectives";
    case Mechanism::messages:
      return "messages";
    case Mechanism::recomputation:
      return "recomputation";
    case Mechanism::schedule:
      return "the schedule";
  }
  return "?";
}

Estimate Predictor::operator()(const Trial& trial) {
  const Estimator& e = estimator(trial.model, trial.cluster);
  Strategy s = trial.strategy;
  if (without_ == Mechanism::recomputation) s.recompute = Recompute::none;
  Estimate estimate = e.estimate(s);
  // The work of a stage alone, as if no stage ever waited.
  if (without_ == Mechanism::schedule) estimate.step -= estimate.pipeline * (1 - 1.0 / s.pp);
  return estimate;
}

double Predictor::operator()(const Profile& profile) {
  const Estimator& e = estimator(profile.model, 0);
  Strategy s;
  s.tp = profile.tp;
  int first = 0;
  while (e.cluster().type_of(first).name != profile.type) ++first;
  for (int t = 0; t < profile.tp; ++t) s.devices.push_back(first + t);
  const Mesh mesh = e.mesh(s);
  return e.layer_time(profile.layer, mesh.types_of(0)[0], s, mesh.tensor[0], mesh.context[0])
      .forward;
}

const Estimator& Predictor::estimator(int model, int of_cluster) {
  auto& slot = estimators_[{model, of_cluster}];
  if (!slot) {
    System system{set_.clusters[of_cluster], {}};
    system.calibration =
        default_calibration(system.cluster, set_.models[model].precision, Runtime::deepspeed);
    for (const Parameter& p : set_.parameters)
      if (const auto known = constants_.find(p.name); known != constants_.end())
        p.set(&system, std::exp(known->second));
    constexpr double kNothing = 1e-12, kInfinite = 1e30;
    for (auto& [type, rates] : system.calibration.types) {
      if (without_ == Mechanism::launches) rates.launch = rates.collective = kNothing;
      if (without_ == Mechanism::products) rates.flops = kInfinite;
      if (without_ == Mechanism::traffic) rates.memory = kInfinite;
    }
    if (without_ == Mechanism::messages) system.calibration.message_launch = kNothing;
    for (auto& [type, rates] : system.calibration.links) {
      if (without_ == Mechanism::messages) rates.message = kInfinite;
      if (without_ == Mechanism::collectives) rates.start = kNothing;
    }
    for (Group& group : system.cluster.groups)
      if (without_ == Mechanism::collectives) {
        group.link.bandwidth *= 1e6, group.uplink *= 1e6;
        for (DirectLink& d : group.direct) d.bandwidth *= 1e6;
      }
    slot = std::make_unique<Estimator>(set_.models[model], system.cluster, system.calibration,
                                       set_.times);
  }
  return *slot;
}

Vector solve(std::vector<Vector> a, Vector b, double damping) {
  const size_t n = b.size();
  for (size_t i = 0; i < n; ++i) a[i][i] *= 1 + damping;
  for (size_t i = 0; i < n; ++i) {
    size_t pivot = i;
    for (size_t r = i; r < n; ++r)
      if (std::abs(a[r][i]) > std::abs(a[pivot][i])) pivot = r;
    std::swap(a[i], a[pivot]);
    std::swap(b[i], b[pivot]);
    for (size_t r = i + 1; r < n; ++r) {
      const double f = a[r][i] / a[i][i];
      for (size_t c = i; c < n; ++c) a[r][c] -= f * a[i][c];
      b[r] -= f * b[i];
    }
  }
  for (size_t i = n; i-- > 0;) {
    for (size_t c = i + 1; c < n; ++c) b[i] -= a[i][c] * b[c];
    b[i] /= a[i][i];
  }
  return b;
}

}  // namespace motley::grid::trials
