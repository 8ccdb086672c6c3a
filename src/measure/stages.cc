#include <algorithm>
#include <optional>
#include <set>

#include "cluster/part.h"
#include "comm/subgroup.h"
#include "interpret/dispatch.h"
#include "measure/device_clock.h"
#include "measure/parts.h"
#include "runtime/executor.h"

namespace motley {

namespace {

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

}  // namespace

std::vector<ProfiledStage> measure_layers(const CalibrateOptions& options,
                                          const std::string& type) {
  constexpr int kLeastRuns = 3, kMostRuns = 9;
  std::vector<ProfiledStage> result;
  run_thread_group(1, [&](Communicator& self) {
    // Padding goes by the CPU clock of the thread.
    DeviceClock watch(options.speed, options.device);
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
    // As in a pipeline, over the messages of all.
    const std::unique_ptr<Communicator> members = subgroup(group, shape.devices, number);
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

}  // namespace motley
