#include "measure/calibrate.h"

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "capture/capture.h"
#include "cluster/part.h"
#include "comm/subgroup.h"
#include "core/error.h"
#include "cost/cost.h"
#include "graph/canonical.h"
#include "interpret/dispatch.h"
#include "net/collectives.h"
#include "runtime/eager.h"
#include "runtime/emulate.h"
#include "runtime/executor.h"
#include "runtime/trainer.h"

namespace motley {

namespace {

constexpr size_t kMaxPoints = 40;    // of an operator, kept in the profile
constexpr Seconds kShortest = 1e-9;  // that clocks tell

Seconds seconds_of(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<Seconds>(t.tv_sec) + 1e-9 * static_cast<Seconds>(t.tv_nsec);
}
Seconds wall_clock() { return seconds_of(CLOCK_MONOTONIC); }

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return (x[(x.size() - 1) / 2] + x[x.size() / 2]) / 2;
}

// Solves the normal equations of the features in `set`; false if they are singular.
bool solve(const std::array<std::array<double, 3>, 3>& a, const std::array<double, 3>& b, int set,
           std::array<double, 3>* x) {
  std::vector<int> index;
  for (int i = 0; i < 3; ++i)
    if (set & (1 << i)) index.push_back(i);
  const size_t n = index.size();
  std::vector<std::vector<double>> m(n, std::vector<double>(n + 1));
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) m[i][j] = a[index[i]][index[j]];
    m[i][n] = b[index[i]];
  }
  for (size_t k = 0; k < n; ++k) {
    if (!(std::abs(m[k][k]) > 1e-12 * a[index[k]][index[k]])) return false;
    for (size_t i = 0; i < n; ++i) {
      if (i == k) continue;
      const double factor = m[i][k] / m[k][k];
      for (size_t j = k; j <= n; ++j) m[i][j] -= factor * m[k][j];
    }
  }
  x->fill(0);
  for (size_t i = 0; i < n; ++i) (*x)[index[i]] = m[i][n] / m[i][i];
  return true;
}

// seconds = x[0] * f0 + x[1] * f1 + x[2] * f2, x >= 0.
std::array<double, 3> least_squares(const std::vector<std::array<double, 3>>& features,
                                    const std::vector<double>& seconds) {
  // Columns are scaled to the same size.
  std::array<double, 3> scale{};
  for (const auto& f : features)
    for (int i = 0; i < 3; ++i) scale[i] = std::max(scale[i], std::abs(f[i]));
  std::array<std::array<double, 3>, 3> a{};
  std::array<double, 3> b{}, best{};
  for (size_t s = 0; s < features.size(); ++s) {
    const double weight = 1 / std::max(seconds[s], kShortest);
    for (int i = 0; i < 3; ++i) {
      if (scale[i] == 0) continue;
      const double fi = features[s][i] / scale[i];
      b[i] += weight * fi * seconds[s];
      for (int j = 0; j < 3; ++j)
        if (scale[j] > 0) a[i][j] += weight * fi * features[s][j] / scale[j];
    }
  }
  double least = std::numeric_limits<double>::infinity();
  for (int set = 1; set < 8; ++set) {
    std::array<double, 3> x{};
    bool possible = true;
    for (int i = 0; i < 3; ++i) possible = possible && (!(set & (1 << i)) || scale[i] > 0);
    if (!possible || !solve(a, b, set, &x)) continue;
    if (std::any_of(x.begin(), x.end(), [](double v) { return v < 0; })) continue;
    double error = 0;
    for (size_t s = 0; s < features.size(); ++s) {
      double predicted = 0;
      for (int i = 0; i < 3; ++i)
        if (scale[i] > 0) predicted += x[i] * features[s][i] / scale[i];
      error +=
          (predicted - seconds[s]) * (predicted - seconds[s]) / std::max(seconds[s], kShortest);
    }
    if (error < least * (1 - 1e-9)) least = error, best = x;
  }
  for (int i = 0; i < 3; ++i) best[i] = scale[i] > 0 ? best[i] / scale[i] : 0;
  return best;
}

FitQuality quality_of(const std::vector<std::pair<double, Seconds>>& points,
                      const std::vector<double>& predicted) {
  FitQuality q;
  double mean = 0, total = 0, residual = 0;
  for (const auto& [x, y] : points) mean += y / static_cast<double>(points.size());
  for (size_t i = 0; i < points.size(); ++i) {
    const double y = points[i].second;
    total += (y - mean) * (y - mean);
    residual += (y - predicted[i]) * (y - predicted[i]);
    q.error +=
        std::abs(predicted[i] - y) / std::max(y, kShortest) / static_cast<double>(points.size());
  }
  q.r2 = total > 0 ? 1 - residual / total : 1;
  // Evenly spread over the sizes, the ends included.
  std::vector<std::pair<double, Seconds>> sorted = points;
  std::sort(sorted.begin(), sorted.end());
  const size_t n = sorted.size(), kept = std::min(n, kMaxPoints);
  for (size_t i = 0; i < kept; ++i)
    q.points.push_back(sorted[kept > 1 ? i * (n - 1) / (kept - 1) : 0]);
  return q;
}

// Time as this device sees it.
class Watch {
 public:
  Watch(double speed, at::Device device) : speed_(speed), device_(device) {
    if (speed > 0) padding_.emplace(speed);
  }
  Seconds now() const {
    if (speed_ > 0) return seconds_of(CLOCK_THREAD_CPUTIME_ID) / speed_;
    if (device_.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(device_.index());
    return wall_clock();
  }
  void worked(const void* work = nullptr) {
    if (padding_) padding_->after(true, work);
  }
  // Of repeated measurements of the same work: an emulated device takes the least (emulate.h), but
  // for one in twenty and those that took nothing: a virtual machine's clock of CPU time takes back
  // what the host took before.
  double typical(std::vector<double> times) const {
    if (speed_ <= 0) return median(times);
    std::erase_if(times, [](double t) { return t <= 0; });
    std::sort(times.begin(), times.end());
    return times.empty() ? kShortest : times[times.size() / 20];
  }
  void rest() {
    if (padding_) padding_->before(false);
  }
  void begin() {
    if (padding_) padding_->after(false);
  }

 private:
  double speed_;
  at::Device device_;
  std::optional<Padding> padding_;
};

// Seconds of one call, over about `budget` seconds and at least twice.
template <typename F>
Seconds seconds_per_call(Watch& watch, Seconds budget, F call) {
  call();
  watch.begin();
  std::vector<double> times;
  const Seconds start = wall_clock();
  while (times.size() < 2 || (wall_clock() - start < budget && times.size() < 2000)) {
    const Seconds before = watch.now();
    call();
    times.push_back(watch.now() - before);
    watch.worked();
  }
  watch.rest();
  return watch.typical(times);
}

// ---- Devices

void measure_classes(Watch& watch, at::Device device, ProfiledDevice* result) {
  at::NoGradGuard no_grad;
  const Seconds budget = 0.12;
  auto add = [&](const char* name, const char* dtype, const std::vector<Sample>& samples,
                 bool by_bytes) {
    ProfiledClass c;
    c.name = name;
    c.dtype = dtype;
    const OpRate rate = fit(samples, &c.fit);
    c.overhead = rate.overhead;
    c.rate = by_bytes ? rate.memory_bandwidth : rate.flops;
    for (size_t i = 0; i < samples.size(); ++i)
      c.fit.points[i] = {by_bytes ? samples[i].bytes : samples[i].flops, samples[i].seconds};
    result->classes.push_back(c);
    return c;
  };
  const at::TensorOptions f32 = at::TensorOptions(device);
  const at::Tensor tiny = at::ones({8}, f32);
  const Seconds launch = seconds_per_call(watch, budget, [&] { at::add(tiny, tiny); });
  result->overhead = launch;
  add("launch", "f32", {{8, 96, launch}}, false);
  struct Type {
    const char* name;
    at::ScalarType type;
    int64_t largest;
  };
  for (const Type& t : {Type{"f32", at::kFloat, 512}, Type{"f64", at::kDouble, 256},
                        Type{"bf16", at::kBFloat16, 128}}) {
    std::vector<Sample> products, elementwise;
    for (int64_t n = 32; n <= t.largest; n *= 2) {
      const at::Tensor a = at::ones({n, n}, f32.dtype(t.type));
      const double cube = static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n);
      products.push_back({2 * cube, 0, seconds_per_call(watch, budget, [&] { at::mm(a, a); })});
    }
    for (int64_t n = 1 << 10; n <= (1 << 20); n *= 8) {
      const at::Tensor a = at::ones({n}, f32.dtype(t.type));
      elementwise.push_back({0, 3. * static_cast<double>(a.nbytes()),
                             seconds_per_call(watch, budget, [&] { at::add(a, a); })});
    }
    const ProfiledClass matmul = add("matmul", t.name, products, false);
    const ProfiledClass memory = add("elementwise", t.name, elementwise, true);
    if (t.type == at::kFloat) result->flops = result->half_flops = matmul.rate;
    if (t.type == at::kFloat) result->memory_bandwidth = memory.rate;
    if (t.type == at::kBFloat16 && matmul.rate > 0) result->half_flops = matmul.rate;
  }
  std::vector<Sample> convolutions;
  for (int64_t c : {8, 16, 32, 64}) {
    const at::Tensor x = at::ones({4, c, 16, 16}, f32), w = at::ones({c, c, 3, 3}, f32);
    convolutions.push_back({2. * 4 * 16 * 16 * 9 * static_cast<double>(c * c), 0,
                            seconds_per_call(watch, budget, [&] { at::conv2d(x, w, {}, 1, 1); })});
  }
  add("convolution", "f32", convolutions, false);
}

// A step of a model on one device and the times of its calls.
struct MeasuredStep {
  Graph graph;
  std::unique_ptr<Theory> theory;
  Program program;
  std::vector<Work> work;                    // [node]
  std::vector<std::vector<double>> seconds;  // [node]
};

Program alone(const Theory& theory) {
  Program program;
  for (size_t n = 0; n < theory.graph().nodes.size(); ++n) {
    const auto& triples = theory.triples(NodeId(n));
    for (size_t t = 0; t < triples.size(); ++t) {
      if (triples[t].cut != 0 || !triples[t].kernel.empty() ||
          !std::all_of(triples[t].in.begin(), triples[t].in.end(),
                       [](Placement p) { return p.is_replicated(); }))
        continue;
      Step step;
      step.node = NodeId(n);
      step.triple = static_cast<int>(t);
      program.steps.push_back(step);
      break;
    }
  }
  return program;
}

class StepRunner {
 public:
  StepRunner(const std::string& model, int64_t batch, Watch& watch, Communicator& self,
             at::Device device)
      : watch_(watch), shares_(std::vector<double>{1.0}) {
    step_.graph = canonicalize(capture(model, batch).graph);
    step_.theory = std::make_unique<Theory>(step_.graph);
    step_.program = alone(*step_.theory);
    step_.work.resize(step_.graph.nodes.size());
    step_.seconds.resize(step_.graph.nodes.size());
    for (const Step& s : step_.program.steps)
      step_.work[s.node.index] =
          work_of(*step_.theory, s.node, step_.theory->triples(s.node)[s.triple]);
    ExecutorOptions options;
    options.device = device;
    options.before = [this](bool) {
      begun_ = watch_.now();
      node_ = -1;
    };
    options.observe = [this](ValueId v, Placement, const at::Tensor&) {
      node_ = step_.graph.value(v).producer.index;
    };
    options.after = [this](bool, const void* instruction) {
      if (node_ >= 0 && keep_) step_.seconds[node_].push_back(watch_.now() - begun_);
      watch_.worked(instruction);
    };
    executor_ = std::make_unique<Executor>(*step_.theory, step_.program, shares_, self, options);
    const std::shared_ptr<TrainModule> module = materialize(parse_model(model), 0);
    const TensorMap parameters = parameters_of(*module), buffers = buffers_of(*module);
    const TensorMap inputs = random_inputs(*module, batch, 1);
    auto set = [&](ValueId value, const at::Tensor& whole) {
      executor_->set(value, whole.detach().to(at::TensorOptions(device), false, true));
    };
    for (const Parameter& p : step_.graph.parameters) set(p.value, parameters.at(p.name));
    for (const Buffer& b : step_.graph.buffers) set(b.value, buffers.at(b.name));
    for (const Input& i : step_.graph.inputs) set(i.value, inputs.at(i.name));
  }

  void run(bool keep) {
    keep_ = keep;
    watch_.begin();
    executor_->step(number_++);
    watch_.rest();
  }
  const MeasuredStep& measured() const { return step_; }

 private:
  Watch& watch_;
  Shares shares_;
  MeasuredStep step_;
  std::unique_ptr<Executor> executor_;
  Seconds begun_ = 0;
  int node_ = -1;
  bool keep_ = false;
  int64_t number_ = 0;
};

void measure_ops(const CalibrateOptions& options, ProfiledDevice* result) {
  run_thread_group(1, [&](Communicator& self) {
    std::map<std::string, std::vector<Sample>> samples;
    std::vector<std::pair<std::vector<Work>, Seconds>> whole;  // of every step: calls and time
    const auto steps = options.steps.empty() ? reference_steps() : options.steps;
    for (const auto& [model, batch] : steps) {
      // Padding goes by the CPU clock of the thread.
      Watch own(options.speed, options.device);
      StepRunner runner(model, batch, own, self, options.device);
      const Seconds start = wall_clock();
      runner.run(false);
      std::vector<double> walls;
      for (int i = 0; i < 2 || (i < 5 && wall_clock() - start <
                                             options.budget / static_cast<double>(steps.size()));
           ++i) {
        const Seconds begun = wall_clock();
        runner.run(true);
        walls.push_back(wall_clock() - begun);
      }
      const MeasuredStep& step = runner.measured();
      whole.emplace_back(step.work, own.typical(walls));
      for (size_t n = 0; n < step.seconds.size(); ++n)
        if (!step.seconds[n].empty() && step.work[n].op != nullptr && !step.work[n].free)
          samples[step.work[n].op->name].push_back(
              {step.work[n].flops, step.work[n].cut_bytes + step.work[n].whole_bytes,
               own.typical(step.seconds[n])});
    }
    std::map<std::string, OpRate> rates;
    for (const auto& [name, list] : samples) {
      ProfiledOp op;
      op.rate = fit(list, &op.fit);
      op.rate.op = name;
      rates[name] = op.rate;
      result->ops.push_back(std::move(op));
    }
    // Steps take longer than their calls, one by one: waking up, going from call to call.
    Seconds measured = 0, priced = 0;
    for (const auto& [work, seconds] : whole) {
      measured += seconds;
      for (const Work& w : work) {
        if (w.op == nullptr || w.free) continue;
        const OpRate& r = rates.at(w.op->name);
        priced += r.overhead + (r.flops > 0 ? w.flops / r.flops : 0) +
                  (r.memory_bandwidth > 0 ? (w.cut_bytes + w.whole_bytes) / r.memory_bandwidth : 0);
      }
    }
    const double longer = measured / priced;
    for (ProfiledOp& op : result->ops) {
      op.rate.overhead *= longer;
      op.rate.flops /= longer;
      op.rate.memory_bandwidth /= longer;
    }
  });
}

template <typename O, typename Settings>
void measure_optimizer(Communicator& group, Watch& watch, at::Device device, const char* name,
                       Optimizer kind, const Settings& settings, ProfiledDevice* result) {
  std::vector<Sample> samples;
  struct Size {
    int count;
    int64_t numel;
  };
  // As many as a model would have: a parameter is not in the cache any more when its turn comes.
  for (const Size& size :
       {Size{512, 1 << 9}, Size{256, 1 << 14}, Size{64, 1 << 16}, Size{16, 1 << 18},
        Size{4, 1 << 20}, Size{2, 1 << 22}, Size{1, 1 << 23}}) {
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < size.count; ++i) {
      parameters.push_back(at::ones({size.numel}, at::TensorOptions(device)));
      parameters.back().mutable_grad() = at::ones_like(parameters.back());
    }
    O optimizer(parameters, settings);
    // All devices at the same time, as at the end of a step: they may share memory. It is slow
    // until all of it, state and temporaries, has been used a few times.
    std::vector<double> times;
    for (int i = 0; i < 8; ++i) {
      watch.rest();
      group.barrier();
      watch.begin();
      const Seconds before = watch.now();
      optimizer.step();
      if (i >= 3) times.push_back(watch.now() - before);
      watch.worked();
    }
    watch.rest();
    const Seconds all = watch.typical(times);
    samples.push_back(
        {0, 4. * static_cast<double>(size.numel) * (3 + 2 * state_factor(kind)), all / size.count});
  }
  ProfiledOp op;
  op.rate = fit_with_cache(samples, &op.fit);
  op.rate.op = name;
  result->ops.push_back(op);
}

// What a step takes beyond its operators: tiny models with small and large inputs, trained,
// against their price.
void measure_step(const CalibrateOptions& options, ProfiledDevice* result) {
  DeviceType type;
  type.name = result->type;
  type.flops = result->flops;
  type.half_flops = result->half_flops;
  type.memory = 1e12;
  type.memory_bandwidth = result->memory_bandwidth;
  type.overhead = result->overhead;
  for (const ProfiledOp& op : result->ops) type.ops.push_back(op.rate);
  std::vector<std::pair<Bytes, Seconds>> rest;
  ProfiledOp op;
  for (const auto& [model, batch] : {std::pair{"mlp:layers=2,hidden=8,in=8,classes=4", 4},
                                     std::pair{"mlp:layers=2,hidden=2,in=2048,classes=4", 128}}) {
    Plan plan;
    plan.model = model;
    plan.batch = batch;
    plan.cluster = flat_cluster({type}, {1}, {LinkKind::switched, 1, 0});
    plan.ratios = {{1.}};
    plan.set_graph(canonicalize(capture(model, batch).graph));
    plan.program = alone(*plan.theory);
    const CostModel cost(plan.cluster);
    const Shares shares(plan.ratios);
    const Fractions fractions(plan.cluster, shares);
    const Seconds priced =
        cost_of(*plan.theory, plan.program, cost, fractions, plan.optimizer).step;
    Bytes inputs = 0;
    for (const Input& input : plan.graph->inputs)
      inputs += static_cast<Bytes>(plan.graph->spec(input.value).bytes());
    run_thread_group(1, [&](Communicator& self) {
      TrainOptions training;
      training.speed = options.speed;
      training.device = options.device;
      const RunReport report = train(plan, self, training, 16);
      rest.emplace_back(inputs, std::max(0.0, report.median_step_s - priced));
      op.fit.points.emplace_back(priced, report.median_step_s);
    });
  }
  op.rate.op = "motley::step";
  op.rate.overhead = rest[0].second;
  if (rest[1].second > rest[0].second)
    op.rate.memory_bandwidth = (rest[1].first - rest[0].first) / (rest[1].second - rest[0].second);
  op.fit.r2 = 1;
  result->ops.push_back(op);
}

// Parameters and floating inputs are small random numbers; integers are 0, which every table has.
at::Tensor any_value(const TensorSpec& spec, at::Device device) {
  const at::TensorOptions options = at::TensorOptions(device).dtype(to_torch(spec.dtype));
  if (!at::isFloatingType(to_torch(spec.dtype))) return at::zeros(spec.shape, options);
  return 0.02 * at::randn(spec.shape, options);
}

// Gives an executor its pieces of all sources; where they are stored.
std::set<const void*> set_sources(Executor& executor, const Graph& graph, at::Device device) {
  std::set<const void*> storages;
  const auto set = [&](ValueId v) {
    const at::Tensor value =
        any_value({graph.spec(v).dtype, executor.local_shape(v, executor.stored(v))}, device);
    storages.insert(value.storage().unsafeGetStorageImpl());
    executor.set(v, value);
  };
  for (const Parameter& p : graph.parameters) set(p.value);
  for (const Buffer& b : graph.buffers) set(b.value);
  for (const Input& i : graph.inputs) set(i.value);
  return storages;
}

// The passes of one micro-batch: seconds by `now`, and what is held between them beyond `sources`.
struct Passes {
  Seconds forward = 0, backward = 0;
  Bytes held = 0;
};
Passes run_passes(Executor& executor, const Graph& graph, const std::set<const void*>& sources,
                  int run, const std::function<void()>& meet, const std::function<Seconds()>& now) {
  Passes passes;
  meet();
  const Seconds begun = now();
  Executor::Flight flight = executor.forward(run, 0);
  passes.forward = now() - begun;
  for (ValueId v : graph.outputs)
    if (const Node& made = graph.node(graph.value(v).producer);
        made.phase == Phase::forward && !is_source(made))
      executor.take(&flight, v);
  std::set<const void*> held = sources;
  for (const at::Tensor& value : flight)
    if (value.defined() && held.insert(value.storage().unsafeGetStorageImpl()).second)
      passes.held += static_cast<Bytes>(value.storage().nbytes());
  meet();
  const Seconds again = now();
  executor.backward(&flight, run, 0);
  passes.backward = now() - again;
  executor.reduce(run);
  return passes;
}

ProfiledStage profile_of(const StageShape& shape, const std::string& type,
                         const std::vector<Passes>& runs,
                         const std::function<double(const std::vector<double>&)>& typical) {
  std::vector<double> forward, backward;
  for (const Passes& p : runs) forward.push_back(p.forward), backward.push_back(p.backward);
  ProfiledStage stage{shape.shape, shape.model, type, shape.micro_batch};
  stage.forward = typical(forward);
  stage.backward = typical(backward);
  stage.activation = runs.back().held;
  stage.devices = shape.devices.empty() ? 1 : static_cast<int>(shape.devices.size());
  stage.nodes = shape.nodes;
  return stage;
}

// Of every device by itself.
std::vector<ProfiledStage> measure_layers(const CalibrateOptions& options,
                                          const std::string& type) {
  constexpr int kLeastRuns = 3, kMostRuns = 9;
  std::vector<ProfiledStage> result;
  run_thread_group(1, [&](Communicator& self) {
    // Padding goes by the CPU clock of the thread.
    Watch watch(options.speed, options.device);
    for (const StageShape& shape : options.stages) {
      if (!shape.devices.empty()) continue;
      const Graph& graph = shape.theory->graph();
      const Program program = phase_ordered(*shape.theory, alone(*shape.theory));
      ExecutorOptions execution;
      execution.device = options.device;
      execution.after = [&](bool, const void*) { watch.worked(); };
      Executor executor(*shape.theory, program, Shares(std::vector<double>{1.0}), self, execution);
      const std::set<const void*> sources = set_sources(executor, graph, options.device);
      std::vector<Passes> runs;
      const Seconds start = wall_clock(),
                    budget = options.budget / static_cast<double>(options.stages.size());
      for (int run = 0; run <= kLeastRuns || (run <= kMostRuns && wall_clock() - start < budget);
           ++run) {
        watch.begin();
        const Passes passes = run_passes(
            executor, graph, sources, run, [] {}, [&] { return watch.now(); });
        watch.rest();
        if (run > 0) runs.push_back(passes);  // after warming up
      }
      result.push_back(profile_of(shape, type, runs, [&](const std::vector<double>& times) {
        return watch.typical(times);
      }));
    }
  });
  return result;
}

// Of several devices together, which this rank is one of: as they see it, waiting included.
std::vector<ProfiledStage> measure_meshes(Communicator& group, const Cluster& cluster,
                                          const CalibrateOptions& options) {
  constexpr int kRuns = 5;
  std::vector<ProfiledStage> result;
  int number = 0;
  for (const StageShape& shape : options.stages) {
    if (shape.devices.empty()) continue;
    ++number;
    group.barrier();
    if (!std::binary_search(shape.devices.begin(), shape.devices.end(), group.rank())) continue;
    // On the CPU as in a pipeline, over the messages of all.
    const std::unique_ptr<Communicator> members =
        options.device.is_cuda() ? options.subgroup(shape.devices, fmt::format("/stage{}", number))
                                 : subgroup(group, shape.devices, number);
    std::optional<Padding> padding;
    ExecutorOptions execution;
    execution.device = options.device;
    if (options.speed > 0) {
      padding.emplace(options.speed);
      execution.before = [&](bool compute) { padding->before(compute); };
      execution.after = [&](bool compute, const void* instruction) {
        padding->after(compute, instruction);
      };
    }
    const auto now = [&] {
      if (padding) padding->before(false);
      if (options.device.is_cuda())
        at::detail::getCUDAHooks().deviceSynchronize(options.device.index());
      const Seconds time = wall_clock();
      if (padding) padding->after(false);
      return time;
    };
    const auto meet = [&] {
      now();
      members->barrier();
      if (padding) padding->after(false);
    };
    const Graph& graph = shape.theory->graph();
    Executor executor(*shape.theory, *shape.program, Shares(shape.ratios), *members, execution);
    const std::set<const void*> sources = set_sources(executor, graph, options.device);
    std::vector<Passes> runs;
    for (int run = 0; run <= kRuns; ++run) {
      const Passes passes = run_passes(executor, graph, sources, run, meet, now);
      if (run > 0) runs.push_back(passes);  // after warming up
    }
    result.push_back(profile_of(shape, types_of(part_of(cluster, shape.devices)), runs, median));
  }
  return result;
}

ProfiledDevice measure_device(Communicator& group, const Cluster& cluster,
                              const CalibrateOptions& options,
                              const std::function<void(const std::string&)>& say) {
  ProfiledDevice device;
  device.type = cluster.type_of(group.rank()).name;
  Watch watch(options.speed, options.device);
  group.barrier();
  say("classes of operators");
  measure_classes(watch, options.device, &device);
  group.barrier();
  say("operators of reference models");
  measure_ops(options, &device);
  group.barrier();
  say("optimizers");
  measure_optimizer<torch::optim::AdamW>(group, watch, options.device, "motley::adamw",
                                         Optimizer::adamw, torch::optim::AdamWOptions(1e-3),
                                         &device);
  measure_optimizer<torch::optim::SGD>(group, watch, options.device, "motley::sgd", Optimizer::sgd,
                                       torch::optim::SGDOptions(1e-3).momentum(0.9), &device);
  group.barrier();
  measure_step(options, &device);
  std::sort(device.ops.begin(), device.ops.end(),
            [](const ProfiledOp& a, const ProfiledOp& b) { return a.rate.op < b.rate.op; });
  group.barrier();
  return device;
}

// ---- Links

// The median over the calls of the slowest member, the same on all.
template <typename F>
Seconds collective_seconds(Communicator& group, at::Device device, int repeats, F call) {
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    group.barrier();
    const Seconds start = wall_clock();
    call();
    if (device.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(device.index());
    at::Tensor took =
        at::full({1}, wall_clock() - start, at::TensorOptions(device).dtype(at::kDouble));
    group.all_reduce(took, Reduction::max);
    times.push_back(took.item<double>());
  }
  return median(times);
}

ProfiledGroup measure_links(Communicator& group, const Cluster& part, at::Device device) {
  constexpr Seconds kLongest = 0.6;  // a size that would take longer is left out
  constexpr int64_t kLargest = int64_t{16} << 20;
  ProfiledGroup result;
  const int p = group.size();
  const at::TensorOptions f32 = at::TensorOptions(device);
  const CollectiveModel nominal(part);
  const double exchange = nominal.profile(std::vector<double>(p, 1. / p)).exchange *
                          CollectiveModel(part).ring_bandwidth();
  const double n = p;
  for (int f = 0; f < kCollectiveForms; ++f) {
    const auto form = static_cast<CollectiveForm>(f);
    const double rounds = form == CollectiveForm::all_reduce ? 2 * (n - 1) : n - 1;
    const double traffic = form == CollectiveForm::all_reduce   ? 2 * (n - 1) / n
                           : form == CollectiveForm::broadcast  ? n - 1
                           : form == CollectiveForm::all_to_all ? exchange
                                                                : (n - 1) / n;
    std::vector<std::pair<double, Seconds>> points;
    std::vector<std::array<double, 3>> features;
    std::vector<double> seconds;
    Seconds last = 0;
    for (int64_t bytes = int64_t{4} << 10; bytes <= kLargest; bytes *= 4) {
      if (last * 3.5 > kLongest) break;
      const int64_t numel = bytes / 4, piece = std::max<int64_t>(numel / p, 1);
      at::Tensor whole = at::ones({numel}, f32);
      std::vector<at::Tensor> pieces, parts;
      for (int r = 0; r < p; ++r) {
        const int64_t size = form != CollectiveForm::broadcast ? piece : r == 0 ? numel : 0;
        pieces.push_back(at::ones({size}, f32));
        parts.push_back(at::ones({std::max<int64_t>(piece / p, 1)}, f32));
      }
      std::vector<at::Tensor> received;
      for (int r = 0; r < p; ++r) received.push_back(at::empty_like(parts[r]));
      auto call = [&] {
        switch (form) {
          case CollectiveForm::all_reduce:
            group.all_reduce(whole);
            break;
          case CollectiveForm::all_gather:
          case CollectiveForm::broadcast:
            group.all_gather(pieces);
            break;
          case CollectiveForm::reduce_scatter:
            group.reduce_scatter(pieces);
            break;
          case CollectiveForm::all_to_all:
            group.all_to_all(parts, received);
            break;
        }
      };
      call();
      last = collective_seconds(group, device, last > 0.05 ? 3 : 7, call);
      points.emplace_back(static_cast<double>(bytes), last);
      features.push_back({rounds, traffic * static_cast<double>(bytes), 0});
      seconds.push_back(last);
    }
    const std::array<double, 3> x = least_squares(features, seconds);
    std::vector<double> predicted;
    for (const auto& row : features) predicted.push_back(x[0] * row[0] + x[1] * row[1]);
    // Where no size took time that grows, the largest size is a bound.
    const double per_byte = x[1] > 0 ? x[1] : seconds.back() / features.back()[1];
    result.collectives.push_back({form, x[0], 1 / per_byte});
    result.fits.push_back(quality_of(points, predicted));
  }
  return result;
}

// The groups of the tree with at least two devices; of a chain over the same devices the first.
void each_group(
    const Cluster& cluster,
    const std::function<void(const std::vector<int>& path, const Group&, bool again)>& body) {
  std::function<void(size_t, std::vector<int>&, bool)> walk = [&](size_t g, std::vector<int>& path,
                                                                  bool again) {
    const Group& group = cluster.groups[g];
    if (group.device_count < 2) return;
    body(path, group, again);
    for (size_t c = 0; c < group.children.size(); ++c) {
      path.push_back(static_cast<int>(c));
      walk(group.children[c].index, path, group.children.size() == 1);
      path.pop_back();
    }
  };
  std::vector<int> path;
  walk(0, path, false);
}

// Everybody's text, on every rank.
std::vector<std::string> gather_texts(Communicator& group, const std::string& mine,
                                      at::Device device) {
  at::Tensor sizes = at::zeros({group.size()}, at::kLong);
  sizes[group.rank()] = static_cast<int64_t>(mine.size());
  sizes = sizes.to(device);
  group.all_reduce(sizes);
  sizes = sizes.to(at::kCPU);
  std::vector<at::Tensor> pieces;
  for (int r = 0; r < group.size(); ++r)
    pieces.push_back(at::empty({sizes[r].item<int64_t>()}, at::kByte));
  std::copy(mine.begin(), mine.end(), pieces[group.rank()].data_ptr<uint8_t>());
  for (at::Tensor& piece : pieces) piece = piece.to(device);
  group.all_gather(pieces);
  std::vector<std::string> texts;
  for (at::Tensor& piece : pieces) {
    const at::Tensor bytes = piece.to(at::kCPU);
    const auto* data = reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>());
    texts.emplace_back(data, data + bytes.numel());
  }
  return texts;
}

}  // namespace

OpRate fit(const std::vector<Sample>& samples, FitQuality* quality) {
  std::vector<std::array<double, 3>> features;
  std::vector<double> seconds, predicted;
  for (const Sample& s : samples) {
    features.push_back({1, s.flops, s.bytes});
    seconds.push_back(s.seconds);
  }
  const std::array<double, 3> x = least_squares(features, seconds);
  std::vector<std::pair<double, Seconds>> points;
  for (size_t i = 0; i < samples.size(); ++i) {
    predicted.push_back(x[0] + x[1] * samples[i].flops + x[2] * samples[i].bytes);
    points.emplace_back(predicted.back(), seconds[i]);
  }
  *quality = quality_of(points, predicted);
  OpRate rate;
  rate.overhead = x[0];
  rate.flops = x[1] > 0 ? 1 / x[1] : 0;
  rate.memory_bandwidth = x[2] > 0 ? 1 / x[2] : 0;
  return rate;
}

OpRate fit_with_cache(const std::vector<Sample>& samples, FitQuality* quality) {
  std::vector<double> seconds;
  for (const Sample& s : samples) seconds.push_back(s.seconds);
  OpRate best;
  quality->error = std::numeric_limits<double>::infinity();
  for (const Sample& knee : samples) {
    std::vector<std::array<double, 3>> features;
    for (const Sample& s : samples)
      features.push_back({1, s.bytes, std::max(0.0, s.bytes - knee.bytes)});
    const std::array<double, 3> x = least_squares(features, seconds);
    std::vector<double> predicted;
    std::vector<std::pair<double, Seconds>> points;
    for (size_t i = 0; i < samples.size(); ++i) {
      predicted.push_back(x[0] + x[1] * features[i][1] + x[2] * features[i][2]);
      points.emplace_back(predicted.back(), seconds[i]);
    }
    const FitQuality now = quality_of(points, predicted);
    if (now.error >= quality->error) continue;
    *quality = now;
    best.overhead = x[0];
    best.memory_bandwidth = x[1] > 0 ? 1 / x[1] : 0;
    best.cached = x[2] > 0 ? knee.bytes : 0;
    best.uncached_bandwidth = x[2] > 0 ? 1 / x[2] : 0;
  }
  return best;
}

std::vector<std::pair<std::string, int64_t>> reference_steps() {
  return {{"mlp:layers=4,hidden=512,in=256", 8},
          {"mlp:layers=4,hidden=512,in=256", 64},
          {"mlp:layers=3,hidden=1024,in=512", 128},
          {"gpt:layers=1,hidden=192,heads=4,seq=64,vocab=512", 2},
          {"gpt:layers=1,hidden=256,heads=4,seq=64,vocab=512", 12},
          {"gpt:layers=1,hidden=256,heads=4,seq=64,vocab=512", 28},
          {"bert:layers=1,hidden=192,heads=4,seq=48,vocab=512,dropout=0.1", 6},
          {"bert-moe:layers=2,hidden=128,heads=4,seq=48,vocab=512,experts=4,every=2", 6},
          {"bert-moe:layers=2,hidden=192,heads=4,seq=48,vocab=512,experts=4,every=2", 24},
          {"vgg19:width=8,image=32,classes=10", 4},
          {"vgg19:width=12,image=32,classes=10", 12},
          {"vgg19:width=16,image=32,classes=10", 32},
          {"resnet50:width=8,image=32,classes=10", 4},
          {"vit:layers=1,hidden=192,heads=4,image=32,patch=8,classes=10", 8}};
}

Profile calibrate(Communicator& group, const Cluster& cluster, const CalibrateOptions& options) {
  const Seconds start = wall_clock();
  auto say = [&](const std::string& what) {
    if (options.progress) options.progress(what);
  };
  Profile profile;
  profile.cluster = cluster.name;
  say("collectives");
  int number = 0;
  each_group(cluster, [&](const std::vector<int>& path, const Group& g, bool again) {
    ProfiledGroup measured;
    std::vector<int> ranks;
    for (int d = 0; d < g.device_count; ++d) ranks.push_back(g.first_device + d);
    ++number;
    if (again && !profile.groups.empty()) {
      measured = profile.groups.back();
    } else if (g.device_count == group.size()) {
      measured = measure_links(group, cluster, options.device);
    } else {
      group.barrier();
      if (group.rank() >= g.first_device && group.rank() < g.first_device + g.device_count) {
        const auto members = options.subgroup(ranks, fmt::format("/group{}", number));
        measured = measure_links(*members, part_of(cluster, ranks), options.device);
      }
      group.barrier();
    }
    measured.path = path;
    measured.types.clear();
    for (int d : ranks) measured.types.push_back(cluster.type_of(d).name);
    profile.groups.push_back(std::move(measured));
  });
  profile.devices = {measure_device(group, cluster, options, say)};
  if (!options.stages.empty()) {
    say(fmt::format("{} layers and stages of pipelines", options.stages.size()));
    profile.stages = measure_layers(options, profile.devices[0].type);
    for (ProfiledStage& s : measure_meshes(group, cluster, options))
      profile.stages.push_back(std::move(s));
    group.barrier();
  }

  const std::vector<std::string> all = gather_texts(group, to_json(profile).dump(), options.device);
  if (group.rank() != 0) return profile;
  profile.devices.clear();
  profile.stages.clear();
  // By type, shape and group.
  std::map<std::tuple<std::string, std::string, int, int>, ProfiledStage> stages;
  for (const DeviceType& type : cluster.types) {
    // The slowest member of a type stands for it.
    std::optional<ProfiledDevice> slowest;
    for (int r = 0; r < group.size(); ++r) {
      if (cluster.type_of(r).name != type.name) continue;
      Profile theirs = parse_profile(all[r], fmt::format("the profile of rank {}", r));
      if (!slowest || theirs.devices[0].flops < slowest->flops) slowest = theirs.devices[0];
      for (const ProfiledStage& s : theirs.stages) {
        auto [it, fresh] = stages.try_emplace({s.type, s.shape, s.devices, s.nodes}, s);
        if (s.forward + s.backward > it->second.forward + it->second.backward) it->second = s;
      }
      for (size_t g = 0; g < theirs.groups.size(); ++g)
        if (profile.groups[g].collectives.empty()) profile.groups[g] = theirs.groups[g];
    }
    if (slowest) profile.devices.push_back(*slowest);
  }
  for (auto& [key, stage] : stages) profile.stages.push_back(std::move(stage));
  profile.seconds = wall_clock() - start;
  return profile;
}

}  // namespace motley
