#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>
#include <tuple>
#include <utility>

#include "capture/capture.h"
#include "cost/cost.h"
#include "graph/canonical.h"
#include "graph/precision.h"
#include "interpret/dispatch.h"
#include "measure/device_clock.h"
#include "measure/parts.h"
#include "measure/step_runner.h"
#include "runtime/eager.h"
#include "runtime/trainer.h"

namespace motley {

Program alone(const Theory& theory) {
  std::vector<Step> steps;
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
      steps.push_back(step);
      break;
    }
  }
  return {std::move(steps)};
}

std::vector<std::pair<std::string, int64_t>> reference_steps(bool quick, at::Device device) {
  if (!device.is_cpu())
    return {{"mlp:layers=4,hidden=4096,in=4096", 512},
            {"mlp:layers=3,hidden=8192,in=8192", 1024},
            {"gpt:layers=2,hidden=768,heads=12,seq=512,vocab=50257", 8},
            {"gpt:layers=1,hidden=2048,heads=32,seq=1024,vocab=32000", 2},
            {"bert:layers=2,hidden=768,heads=12,seq=512,vocab=30522,dropout=0.1", 8},
            {"bert-moe:layers=2,hidden=768,heads=12,seq=128,vocab=8192,experts=8,every=2", 32},
            {"vgg19:width=64,image=224,classes=1000", 16},
            {"resnet50:width=64,image=224,classes=1000", 64},
            {"resnet50:width=64,image=160,classes=1000", 32},
            {"vit:layers=2,hidden=768,heads=12,image=224,patch=16,classes=1000", 32}};
  if (quick)
    return {{"mlp:layers=4,hidden=512,in=256", 64},
            {"gpt:layers=1,hidden=192,heads=4,seq=64,vocab=512", 2},
            {"gpt:layers=1,hidden=256,heads=4,seq=64,vocab=512", 12},
            {"bert-moe:layers=2,hidden=128,heads=4,seq=48,vocab=512,experts=4,every=2", 6},
            {"vgg19:width=12,image=32,classes=10", 12},
            {"resnet50:width=8,image=32,classes=10", 4}};
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

namespace {

// Attention as models of torch 2 have it, forward and backward; empty where libtorch has no such
// operator.
std::string attention_step(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, bool causal,
                           bool half) {
  constexpr const char* kName = "aten::_scaled_dot_product_flash_attention_for_cpu";
  if (!c10::Dispatcher::singleton().findSchema({kName, ""})) return "";
  const std::string type = half ? "bf16" : "f32";
  const std::string x = fmt::format("{}[{},{},{},{}]", type, batch, heads, tokens, dim);
  const std::string sums = fmt::format("f32[{},{},{}]", batch, heads, tokens);
  std::string text = "model attention\n";
  for (int i = 0; i < 4; ++i) text += fmt::format("%{} = motley::input(\"x{}\") : {}\n", i, i, x);
  text += fmt::format("%4, %5 = {}(%0, %1, %2, 0.0, {}, none, none) : {}, {}\n", kName, causal, x,
                      sums);
  text += fmt::format(
      "%6, %7, %8 = {}_backward(%3, %0, %1, %2, %4, %5, 0.0, {}, none, none) : {}, {}, {}\n", kName,
      causal, x, x, x);
  return text + fmt::format("%9 = aten::sum(%6, none) : {}[]\nloss %9\n", type);
}

// Calls so small that all take what a launch takes say nothing of larger ones, which are then priced
// by what the device's memory and units sustain: of a fit through noise a model's numbers, thousands
// of times as many, would take seconds.
void replace_noise(const std::vector<Sample>& samples, const ProfiledDevice& device, bool half,
                   OpRate* rate) {
  constexpr Seconds kNoise = 2e-6;
  constexpr double kSlow = 4;  // kernels that are that much slower than memory and units, are
  const Sample& largest = *std::max_element(
      samples.begin(), samples.end(),
      [](const Sample& a, const Sample& b) { return a.bytes + a.flops < b.bytes + b.flops; });
  const Seconds sustained = std::max(largest.bytes / device.memory_bandwidth,
                                     largest.flops / (half ? device.half_flops : device.flops));
  const Seconds fitted = (rate->flops > 0 ? largest.flops / rate->flops : 0) +
                         (rate->memory_bandwidth > 0 ? largest.bytes / rate->memory_bandwidth : 0);
  if (sustained > kNoise || (fitted > 0 && fitted < kSlow * sustained)) return;
  std::vector<double> times;
  for (const Sample& s : samples) times.push_back(s.seconds);
  rate->overhead = median(times);
  rate->flops = 0;
  rate->memory_bandwidth = device.memory_bandwidth;
}

using MeasuredSteps = std::vector<std::pair<std::vector<Work>, Seconds>>;  // calls, and all

// By what factor steps take longer than their calls one by one, of those that count: the others have
// rates, too. Nothing where no call has a price.
template <typename Counts, typename Price>
std::optional<double> longer_than_calls(const MeasuredSteps& steps,
                                        const std::map<std::string, OpRate>& rates, Counts counts,
                                        Price price) {
  Seconds measured = 0, priced = 0, others = 0;
  for (const auto& [work, seconds] : steps) {
    measured += seconds;
    for (const Work& w : work) {
      if (w.op == nullptr || w.free) continue;
      const auto rate = rates.find(std::string(w.op->name) + std::string(w.half ? kHalfRate : ""));
      if (rate != rates.end()) (counts(w) ? priced : others) += price(rate->second, w);
    }
  }
  if (priced <= 0) return std::nullopt;
  return std::max(0.5, (measured - others) / priced);
}

// Attention as the measured steps have it: forward and backward, one beside the other.
std::vector<std::string> attention_steps(bool small, bool half) {
  const int64_t larger = small ? 1 : 8;
  std::vector<std::string> steps;
  for (const auto& [heads, tokens, dim, causal] :
       {std::tuple{int64_t{4}, 64 * larger, int64_t{32}, false},
        {4, 64 * larger, 64, true},
        {8, 128 * larger, 64, false},
        {4, 128 * larger, 128, true}})
    if (std::string text = attention_step(larger, heads, tokens, dim, causal, half); !text.empty())
      steps.push_back(std::move(text));
  return steps;
}

// How long the machine takes to launch operators, as steps of the size of real ones had it, whose
// kernels are others than those of tiny ones; and the steps.
struct MeasuredLaunches {
  std::map<std::string, std::vector<double>> samples;  // by name of the operator
  MeasuredSteps whole;
};

void measure_launches(StepRunner& runner, const std::function<bool(const Work&)>& counts,
                      const DeviceClock& own, bool as_whole, MeasuredLaunches* found) {
  constexpr int kRuns = 3;
  std::vector<double> all;
  for (int i = 0; i < kRuns; ++i) {
    runner.run(StepRunner::Timed::nothing);
    all.push_back(runner.launched());
    runner.run(StepRunner::Timed::launches);
  }
  const MeasuredStep& step = runner.measured();
  for (size_t n = 0; n < step.launches.size(); ++n)
    if (!step.launches[n].empty() && counts(step.work[n]))
      found->samples[step.work[n].op->name].push_back(own.typical(step.launches[n]));
  if (as_whole) found->whole.emplace_back(step.work, own.typical(all));
}

// Of a whole step the machine also makes views, and goes from call to call.
void set_launches(const MeasuredLaunches& found, bool half, std::map<std::string, OpRate>* rates) {
  const auto of = [&](const std::string& op) {
    const auto rate = rates->find(half ? op + std::string(kHalfRate) : op);
    return rate != rates->end() ? &rate->second : nullptr;
  };
  for (const auto& [op, times] : found.samples)
    if (OpRate* rate = of(op)) rate->launch = median(times);
  const double longer =
      longer_than_calls(
          found.whole, *rates,
          [half](const Work& w) { return w.op != nullptr && !w.free && w.half == half; },
          [](const OpRate& r, const Work&) { return r.launch; })
          .value_or(1);
  for (const auto& [op, times] : found.samples)
    if (OpRate* rate = of(op)) rate->launch *= longer;
}

// Of a step in bf16 those of its operators count that have a value in 16 bits.
void measure_ops(const CalibrateOptions& options, bool half, ProfiledDevice* result) {
  run_thread_group(1, [&](Communicator& self) {
    const auto counts = [half](const Work& w) {
      return w.op != nullptr && !w.free && w.half == half;
    };
    using Timed = StepRunner::Timed;
    std::map<std::string, std::vector<Sample>> samples;
    MeasuredSteps whole;
    MeasuredLaunches launches;
    std::optional<HeadStart> ahead;
    if (options.device.is_cuda()) ahead.emplace(options.device);
    const auto steps =
        options.steps.empty() ? reference_steps(options.quick, options.device) : options.steps;
    auto measure = [&](StepRunner& runner, const DeviceClock& own, bool as_whole) {
      const Seconds start = wall_clock();
      for (int i = 0; i < (own.has_stream() ? 2 : 1); ++i) runner.run(Timed::nothing);
      std::vector<double> times;
      for (int i = 0; i < 2 || (i < 5 && wall_clock() - start <
                                             options.budget / static_cast<double>(steps.size()));
           ++i) {
        const Seconds seconds = runner.run(Timed::calls);
        times.push_back(own.has_stream() ? runner.run(Timed::all) : seconds);
      }
      const MeasuredStep& step = runner.measured();
      whole.emplace_back(step.work, own.typical(times));
      for (size_t n = 0; n < step.seconds.size(); ++n)
        if (!step.seconds[n].empty() && counts(step.work[n]))
          samples[step.work[n].op->name].push_back(
              {step.work[n].flops, step.work[n].cut_bytes + step.work[n].whole_bytes,
               own.typical(step.seconds[n])});
      if (ahead) measure_launches(runner, counts, own, as_whole, &launches);
    };
    for (const auto& [model, batch] : steps) {
      // Padding goes by the CPU clock of the thread.
      DeviceClock own(options.speed, options.device);
      StepRunner runner(model, batch, half, own, ahead ? &*ahead : nullptr, self, options.device);
      measure(runner, own, true);
    }
    for (const std::string& text : attention_steps(options.device.is_cpu(), half)) {
      DeviceClock own(options.speed, options.device);
      StepRunner runner(text, own, ahead ? &*ahead : nullptr, self, options.device);
      measure(runner, own, false);  // its calls: there are too few for what a step takes
    }
    std::map<std::string, OpRate> rates;
    std::vector<ProfiledOp> found;
    for (const auto& [name, list] : samples) {
      ProfiledOp op;
      op.rate = fit(list, &op.fit, half ? result->half_flops : result->flops);
      if (!options.device.is_cpu()) replace_noise(list, *result, half, &op.rate);
      op.rate.op = name;
      if (half) op.rate.op += kHalfRate;
      rates[op.rate.op] = op.rate;
      found.push_back(std::move(op));
    }
    for (const ProfiledOp& op : result->ops) rates.emplace(op.rate.op, op.rate);
    if (ahead) set_launches(launches, half, &rates);
    // Steps take longer than their calls, one by one: waking up, going from call to call.
    const std::optional<double> longer =
        longer_than_calls(whole, rates, counts, [](const OpRate& r, const Work& w) {
          return r.overhead + (r.flops > 0 ? w.flops / r.flops : 0) +
                 (r.memory_bandwidth > 0 ? (w.cut_bytes + w.whole_bytes) / r.memory_bandwidth : 0);
        });
    if (!longer) return;
    for (ProfiledOp& op : found) {
      op.rate.overhead *= *longer;
      op.rate.flops /= *longer;
      op.rate.memory_bandwidth /= *longer;
      op.rate.launch = rates.at(op.rate.op).launch;
      result->ops.push_back(std::move(op));
    }
  });
}

template <typename O, typename Settings>
void measure_optimizer(Communicator& group, DeviceClock& watch, const CalibrateOptions& options,
                       const char* name, Optimizer kind, const Settings& settings,
                       ProfiledDevice* result) {
  const int repeats = options.quick ? 5 : 8, unused = options.quick ? 2 : 3;
  const bool stream = watch.has_stream() && StreamTimes::known();
  std::optional<HeadStart> ahead;
  if (stream) ahead.emplace(options.device);
  std::vector<Sample> samples;
  Seconds launch = 0;
  struct Size {
    int count;
    int64_t numel;
  };
  // As many as a model would have: a parameter is not in the cache any more when its turn comes.
  std::vector<Size> sizes{{512, 1 << 9}, {256, 1 << 14}, {64, 1 << 16}, {16, 1 << 18},
                          {4, 1 << 20},  {2, 1 << 22},   {1, 1 << 23}};
  if (!options.device.is_cpu())
    sizes = {{512, 1 << 9}, {256, 1 << 14}, {128, 1 << 18},
             {64, 1 << 20}, {16, 1 << 22},  {4, 1 << 24}};
  for (const Size& size : sizes) {
    if (options.quick && options.device.is_cpu() && size.numel > 1 << 22) break;
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < size.count; ++i) {
      parameters.push_back(at::ones({size.numel}, at::TensorOptions(options.device)));
      parameters.back().mutable_grad() = at::ones_like(parameters.back());
    }
    O optimizer(parameters, settings);
    std::function<void()> step = [&] { optimizer.step(); };
    if (options.optimizer) step = options.optimizer(kind, parameters);
    // All devices at the same time, as at the end of a step: they may share memory. It is slow
    // until all of it, state and temporaries, has been used a few times.
    std::vector<double> times, launches;
    for (int i = 0; i < repeats; ++i) {
      watch.rest();
      group.barrier();
      watch.begin();
      const Seconds before = watch.now();
      step();
      const Seconds launched = wall_clock() - before;
      if (i >= unused) times.push_back(watch.now() - before);
      watch.worked();
      if (!stream || i < unused) continue;
      StreamTimes marks(options.device);
      ahead->give(2 * launched);
      marks.mark();
      step();
      marks.mark();
      times.back() = marks.between()[0];
      launches.push_back(launched);
    }
    watch.rest();
    const Seconds all = watch.typical(times);
    // Of many small ones, which are more than what a step of any takes.
    if (launch == 0 && !launches.empty()) launch = median(launches) / size.count;
    samples.push_back(
        {0, 4. * static_cast<double>(size.numel) * (3 + 2 * state_factor(kind)), all / size.count});
  }
  ProfiledOp op;
  op.rate = fit_with_cache(samples, &op.fit);
  op.rate.op = name;
  op.rate.launch = launch;
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
    // Few launches: Python's optimizers make few, which are measured.
    if (!options.device.is_cpu()) plan.optimizer = Optimizer::sgd;
    plan.set_graph(canonicalize(capture(model, batch).graph));
    plan.program = alone(*plan.theory);
    const CostModel cost(plan.cluster);
    const Shares shares(plan.ratios);
    const Fractions fractions(plan.cluster, shares);
    const Seconds priced =
        cost_of(*plan.theory, plan.program, cost, fractions, plan.optimizer).step +
        launching(*plan.theory, plan.program, cost, fractions, plan.optimizer).waits;
    Bytes inputs = 0;
    for (const Input& input : plan.graph->inputs)
      inputs += static_cast<Bytes>(plan.graph->spec(input.value).bytes());
    run_thread_group(1, [&](Communicator& self) {
      TrainOptions training;
      training.speed = options.speed;
      training.device = options.device;
      const RunReport report = train(plan, self, training, options.quick ? 8 : 16);
      rest.emplace_back(inputs, std::max(0.0, report.median_step_s - priced));
      op.fit.points.emplace_back(priced, report.median_step_s);
    });
  }
  op.rate.op = "motley::step";
  op.rate.overhead = rest[0].second;
  // Inputs of a device with a stream are there, or are copied while it computes.
  if (rest[1].second > rest[0].second && options.device.is_cpu())
    op.rate.memory_bandwidth = (rest[1].first - rest[0].first) / (rest[1].second - rest[0].second);
  op.fit.r2 = 1;
  result->ops.push_back(op);
}

}  // namespace

ProfiledDevice measure_device(Communicator& group, const Cluster& cluster,
                              const CalibrateOptions& options,
                              const std::function<void(const std::string&)>& say) {
  ProfiledDevice device;
  group.barrier();
  if (options.classes) {
    device = *options.classes;
  } else {
    say("classes of operators");
    device = measure_classes(options.speed, options.device);
  }
  device.type = cluster.type_of(group.rank()).name;
  DeviceClock watch(options.speed, options.device);
  group.barrier();
  say("operators of reference models");
  measure_ops(options, false, &device);
  if (options.half) {
    group.barrier();
    say("operators in bf16");
    measure_ops(options, true, &device);
  }
  group.barrier();
  say("optimizers");
  measure_optimizer<torch::optim::AdamW>(group, watch, options, "motley::adamw", Optimizer::adamw,
                                         torch::optim::AdamWOptions(1e-3), &device);
  measure_optimizer<torch::optim::SGD>(group, watch, options, "motley::sgd", Optimizer::sgd,
                                       torch::optim::SGDOptions(1e-3).momentum(0.9), &device);
  group.barrier();
  measure_step(options, &device);
  std::sort(device.ops.begin(), device.ops.end(),
            [](const ProfiledOp& a, const ProfiledOp& b) { return a.rate.op < b.rate.op; });
  group.barrier();
  return device;
}

}  // namespace motley
