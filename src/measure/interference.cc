#include <algorithm>
#include <cmath>

#include "comm/background.h"
#include "core/median.h"
#include "cost/overlap.h"
#include "measure/parts.h"
#include "measure/step_runner.h"

namespace motley {

namespace {

// The largest of all ranks' numbers, on each of them.
double largest(Communicator& group, double mine) {
  at::Tensor all = at::full({1}, mine, at::TensorOptions(group.device()).dtype(at::kDouble));
  group.all_reduce(all, Reduction::max);
  return all.item<double>();
}

std::pair<std::string, int64_t> typical_step(const CalibrateOptions& options) {
  if (!options.steps.empty()) return options.steps.front();
  if (options.device.is_cpu()) return {"gpt:layers=1,hidden=256,heads=4,seq=64,vocab=512", 12};
  return {"gpt:layers=2,hidden=768,heads=12,seq=512,vocab=50257", 8};
}

}  // namespace

std::optional<double> measure_interference(Communicator& group, const CalibrateOptions& options) {
  if (group.size() == 1) return std::nullopt;
  const int rounds = options.quick ? 2 : 3;
  constexpr double kMost = 4;        // steps in a round
  constexpr double kMargin = 1.5;    // as many times as long as the steps are messages beside them
  constexpr Seconds kLongest = 1.5;  // of messages in a round, where a step does not take longer
  std::vector<double> alone, beside;
  // A thread of its own: padding goes by its CPU clock.
  run_thread_group(1, [&](Communicator& self) {
    DeviceClock own(options.speed, options.device);
    const auto [model, batch] = typical_step(options);
    StepRunner runner(model, batch, false, own, nullptr, self, options.device);
    const auto step = [&] { return runner.run(StepRunner::Timed::nothing); };
    for (int i = 0; i < 3; ++i) step();
    const Seconds longest = largest(group, step());
    at::Tensor message = at::zeros({static_cast<int64_t>(GradientSizes().together) / 4},
                                   at::TensorOptions(options.device).dtype(at::kFloat));
    const auto send = [&] { group.all_reduce(message); };
    send();
    group.barrier();
    const Seconds begun = own.has_stream() ? own.now() : wall_clock();
    send();
    const Seconds one = largest(group, (own.has_stream() ? own.now() : wall_clock()) - begun);
    const double steps = std::clamp(std::floor(kLongest / (kMargin * longest)), 1., kMost);
    const auto messages = static_cast<int>(std::ceil(kMargin * steps * longest / one));
    for (int round = 0; round < rounds; ++round) {
      group.barrier();
      for (int i = 0; i < steps; ++i) alone.push_back(step());
      group.barrier();
      Background background(options.device);
      for (int i = 0; i < messages; ++i) background.start(send);
      for (int i = 0; i < steps; ++i) {
        const Seconds seconds = step();
        // A step in which they ended was alone in part. Of a stream they have been started, no more.
        if (!own.has_stream() && background.idle()) break;
        beside.push_back(seconds);
      }
      background.wait_all();
    }
  });
  if (beside.empty()) return std::nullopt;
  return std::clamp(median(beside) / median(alone) - 1, 0., kMostInterference);
}

}  // namespace motley
