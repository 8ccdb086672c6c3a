#include "measure/step_runner.h"

#include <numeric>

#include "capture/capture.h"
#include "graph/canonical.h"
#include "graph/precision.h"
#include "interpret/dispatch.h"
#include "measure/parts.h"
#include "runtime/eager.h"

namespace motley {

namespace {

constexpr double kAhead = 3;  // times as long as launches took without marks

}  // namespace

StepRunner::StepRunner(const std::string& model, int64_t batch, bool half, DeviceClock& watch,
                       HeadStart* ahead, Communicator& self, at::Device device)
    : StepRunner(canonicalize(capture(model, batch).graph), half, watch, ahead, self, device) {
  const std::shared_ptr<TrainModule> module = materialize(parse_model(model), 0);
  const TensorMap parameters = parameters_of(*module), buffers = buffers_of(*module);
  const TensorMap inputs = random_inputs(*module, batch, 1);
  for (const Parameter& p : step_.graph.parameters) set(p.value, parameters.at(p.name));
  for (const Buffer& b : step_.graph.buffers) set(b.value, buffers.at(b.name));
  for (const Input& i : step_.graph.inputs) set(i.value, inputs.at(i.name));
}

StepRunner::StepRunner(const std::string& text, DeviceClock& watch, HeadStart* ahead,
                       Communicator& self, at::Device device)
    : StepRunner(parse_graph(text, "attention"), false, watch, ahead, self, device) {
  for (const Input& i : step_.graph.inputs) {
    const TensorSpec& spec = step_.graph.spec(i.value);
    set(i.value, at::randn(spec.shape, at::kFloat).to(to_torch(spec.dtype)));
  }
}

StepRunner::StepRunner(Graph graph, bool half, DeviceClock& watch, HeadStart* ahead,
                       Communicator& self, at::Device device)
    : watch_(watch), ahead_(ahead), shares_(std::vector<double>{1.0}), device_(device) {
  step_.graph = std::move(graph);
  if (half) step_.graph = with_precision(step_.graph, DType::bf16);
  step_.theory = std::make_unique<Theory>(step_.graph);
  step_.program = alone(*step_.theory);
  step_.work.resize(step_.graph.nodes.size());
  step_.seconds.resize(step_.graph.nodes.size());
  step_.launches.resize(step_.graph.nodes.size());
  for (const Step& s : step_.program.steps)
    step_.work[s.node.index] =
        work_of(*step_.theory, s.node, step_.theory->triples(s.node)[s.triple]);
  if (watch.has_stream() && StreamTimes::known()) stream_.emplace(device);
  ExecutorOptions options;
  options.device = device;
  options.before = [this](bool) {
    if (timed_ == Timed::launches)
      begun_ = wall_clock();
    else if (timed_ == Timed::calls && !stream_)
      begun_ = watch_.now();
    node_ = -1;
  };
  options.observe = [this](ValueId v, Placement, const at::Tensor&) {
    node_ = step_.graph.value(v).producer.index;
  };
  options.after = [this](bool, const void* instruction) {
    if (timed_ == Timed::calls && stream_)
      stream_->mark(), marked_.push_back(node_);
    else if (node_ >= 0 && timed_ == Timed::calls)
      step_.seconds[node_].push_back(watch_.now() - begun_);
    else if (node_ >= 0 && timed_ == Timed::launches)
      step_.launches[node_].push_back(wall_clock() - begun_);
    watch_.worked(instruction);
  };
  executor_ = std::make_unique<Executor>(*step_.theory, step_.program, shares_, self, options);
}

void StepRunner::set(ValueId value, const at::Tensor& whole) {
  executor_->set(value, whole.detach().to(at::TensorOptions(device_), false, true));
}

Seconds StepRunner::run(Timed timed) {
  const auto moment = [this] { return watch_.has_stream() ? watch_.now() : wall_clock(); };
  timed_ = timed;
  const Seconds begun = moment();
  watch_.begin();
  const bool marks = stream_ && (timed == Timed::calls || timed == Timed::all);
  if (marks && ahead_ != nullptr) ahead_->give(kAhead * launched_);
  if (marks) stream_->mark();
  const Seconds called = wall_clock();
  executor_->step(number_++);
  if (!marks) launched_ = wall_clock() - called;
  if (timed == Timed::all && stream_) stream_->mark();
  watch_.rest();
  if (!marks) return moment() - begun;
  const std::vector<double> times = stream_->between();
  if (timed == Timed::calls)
    for (size_t i = 0; i < times.size(); ++i)
      if (marked_[i] >= 0) step_.seconds[marked_[i]].push_back(times[i]);
  marked_.clear();
  return std::accumulate(times.begin(), times.end(), 0.);
}

}  // namespace motley
