#include "trials/fit.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>

namespace motley::grid::trials {

namespace {

int width(const Model& model) {
  for (const Layer& layer : model.layers)
    if (layer.block) return static_cast<int>(layer.output / static_cast<double>(model.tokens));
  return 0;
}

// Of a residual in sigmas: beyond 2 it loses weight, so that trials which something else slowed
// down do not bend the rest.
double cauchy_weight(double r) { return 1 / (1 + r * r / 4); }

// Levenberg-Marquardt with numeric derivatives, from `start` and with its time scales.
Vector fit_parameters(const Set& set, const std::vector<int>& rows, const Fitted& start) {
  constexpr double kSigma = 0.05, kProfileSigma = 0.15;
  const size_t n = set.parameters.size();
  Vector logs = start.logs;
  auto residuals = [&](const Vector& at) {
    Predictor predict(set, {at, start.time_scales});
    Vector r;
    for (int row : rows)
      r.push_back(std::log(predict(set.trials[row]).step / set.trials[row].measured) / kSigma);
    for (const Profile& profile : set.profiles)
      r.push_back(std::log(predict(profile) / profile.measured) / kProfileSigma);
    for (size_t i = 0; i < n; ++i)
      r.push_back((at[i] - std::log(set.parameters[i].start)) / set.parameters[i].freedom);
    return r;
  };
  auto loss = [](const Vector& r) {
    double sum = 0;
    for (double x : r) sum += 4 * std::log1p(x * x / 4);
    return sum;
  };
  Vector now = residuals(logs);
  double damping = 1e-2;
  for (int iteration = 0; iteration < 25; ++iteration) {
    std::vector<Vector> jacobian;
    for (size_t i = 0; i < n; ++i) {
      Vector moved = logs;
      moved[i] += 1e-3;
      Vector r = residuals(moved);
      for (size_t k = 0; k < r.size(); ++k) r[k] = (r[k] - now[k]) / 1e-3;
      jacobian.push_back(std::move(r));
    }
    std::vector<Vector> normal(n, Vector(n, 0.0));
    Vector gradient(n, 0.0);
    for (size_t k = 0; k < now.size(); ++k) {
      const double w = cauchy_weight(now[k]);
      for (size_t i = 0; i < n; ++i) {
        gradient[i] -= w * jacobian[i][k] * now[k];
        for (size_t j = 0; j < n; ++j) normal[i][j] += w * jacobian[i][k] * jacobian[j][k];
      }
    }
    const double before = loss(now);
    bool better = false;
    for (int attempt = 0; attempt < 6 && !better; ++attempt) {
      Vector moved = logs, step = solve(normal, gradient, damping);
      for (size_t i = 0; i < n; ++i) moved[i] += std::clamp(step[i], -0.7, 0.7);
      Vector r = residuals(moved);
      if (loss(r) < before) {
        better = true;
        logs = moved;
        now = std::move(r);
        damping = std::max(damping / 5, 1e-6);
      } else {
        damping *= 5;
      }
    }
    if (!better || before - loss(now) < 1e-4 * before) break;
  }
  return logs;
}

// TimeScales of layers from what is left of the rows' logarithms: an effect of width and degree and
// another of the micro-batch, both normal around none, in noise (best linear unbiased
// prediction, by backfitting), with the weights of the fit.
TimeScales infer_time_scales(const Set& set, const std::vector<int>& rows, const Vector& logs) {
  constexpr double kNoise = 0.05, kDegree = 0.1, kMicroBatch = 0.03;
  struct Effect {
    double value = 0, sum = 0, weights = 0;
    void add(double left, double weight) { sum += weight * left, weights += weight; }
    void update(double prior) {
      value = sum / (weights + kNoise * kNoise / (prior * prior));
      sum = weights = 0;
    }
  };
  std::map<std::pair<int, int>, Effect> degree;             // width, tp
  std::map<std::tuple<int, int, int>, Effect> micro_batch;  // and micro-batch
  Predictor predict(set, {logs, {}});
  struct Left {
    double left;
    Effect *degree, *micro_batch;
    double weight() const {
      return cauchy_weight((left - degree->value - micro_batch->value) / kNoise);
    }
  };
  std::vector<Left> left;
  for (int row : rows) {
    const Trial& t = set.trials[row];
    const int w = width(set.models[t.model]), tp = t.strategy.tp;
    left.push_back({std::log(t.measured / predict(t).step), &degree[{w, tp}],
                    &micro_batch[{w, tp, t.strategy.micro_batch}]});
  }
  for (int iteration = 0; iteration < 50; ++iteration) {
    for (const Left& l : left) l.degree->add(l.left - l.micro_batch->value, l.weight());
    for (auto& [key, effect] : degree) effect.update(kDegree);
    for (const Left& l : left) l.micro_batch->add(l.left - l.degree->value, l.weight());
    for (auto& [key, effect] : micro_batch) effect.update(kMicroBatch);
  }
  TimeScales time_scales;
  for (const auto& [key, effect] : degree)
    time_scales[key.first][{key.second, 0}] = std::exp(effect.value);
  for (const auto& [key, effect] : micro_batch) {
    const auto& [w, tp, mbs] = key;
    time_scales[w][{tp, mbs}] = std::exp(degree[{w, tp}].value + effect.value);
  }
  return time_scales;
}

}  // namespace

double Predictor::operator()(const Profile& profile) {
  const Estimator& e = estimator(0, 0);
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
    const Cluster& cluster = set_.clusters[of_cluster];
    Calibration calibration = default_calibration(cluster, set_.models[model].precision);
    for (size_t i = 0; i < fitted_.logs.size(); ++i)
      set_.parameters[i].set(&calibration, std::exp(fitted_.logs[i]));
    if (auto time_scales = fitted_.time_scales.find(width(set_.models[model]));
        time_scales != fitted_.time_scales.end())
      calibration.time_scale = time_scales->second;
    slot = std::make_unique<Estimator>(set_.models[model], cluster, calibration, set_.times);
  }
  return *slot;
}

Calibration calibrated(const Set& set, const Vector& logs) {
  Calibration c = default_calibration(set.clusters[0], set.models[0].precision);
  for (size_t i = 0; i < logs.size(); ++i) set.parameters[i].set(&c, std::exp(logs[i]));
  return c;
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

Fitted fit(const Set& set, const std::vector<int>& rows) {
  Fitted fitted;
  for (const Parameter& p : set.parameters) fitted.logs.push_back(std::log(p.start));
  fitted.logs = fit_parameters(set, rows, fitted);
  if (!set.time_scales) return fitted;
  fitted.time_scales = infer_time_scales(set, rows, fitted.logs);
  fitted.logs = fit_parameters(set, rows, fitted);
  fitted.time_scales = infer_time_scales(set, rows, fitted.logs);
  return fitted;
}

}  // namespace motley::grid::trials
