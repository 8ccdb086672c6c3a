#include "runtime/verify.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "graph/precision.h"
#include "interpret/dispatch.h"
#include "interpret/interpret.h"
#include "runtime/consistency.h"
#include "runtime/derivative.h"
#include "runtime/eager.h"
#include "runtime/plan_model.h"
#include "runtime/random.h"
#include "runtime/worker.h"

namespace motley {

namespace {

bool is_mixed(DType compute) { return compute != DType::f64 && compute != DType::f32; }

// The plan on the graph of its model with parameters in `dtype`, computed in `compute`.
Plan in_precision(const Plan& plan, DType dtype, DType compute) {
  Plan other;
  other.engine = plan.engine;
  other.model = plan.model;
  other.batch = plan.batch;
  other.cluster = plan.cluster;
  other.ratios = plan.ratios;
  other.reductions = plan.reductions;
  other.precision = plan.precision;
  other.set_graph(is_of_zoo(plan)     ? captured_graph(plan, dtype, compute)
                  : is_mixed(compute) ? *plan.graph
                                      : in_type(*plan.graph, compute));
  MOTLEY_CHECK(other.graph->nodes.size() == plan.graph->nodes.size(),
               "the graph in {} has {} nodes, not {}", to_string(dtype), other.graph->nodes.size(),
               plan.graph->nodes.size());
  auto translate = [](const Theory& from, const Program& program, const Theory& to) {
    std::vector<Step> steps;
    for (const Step& step : program.steps)
      steps.push_back(parse_step(to, to_text(from, step), "the program in another precision"));
    return Program{std::move(steps), program.sizes};
  };
  if (!plan.pipeline) {
    if (plan.duplex)
      other.duplex =
          duplex_of(*other.theory, plan.duplex->samples, "the plan in another precision");
    other.program = translate(plan.running(), plan.program, other.running());
    return other;
  }
  const PipelinePlan& from = *plan.pipeline;
  other.pipeline = std::make_unique<PipelinePlan>();
  PipelinePlan& to = *other.pipeline;
  to.schedule = from.schedule;
  to.micro_batch = from.micro_batch;
  to.stage_of = from.stage_of;
  to.replicas = from.replicas;
  to.zero = from.zero;
  to.take_parts(*other.theory, other.batch, "the pipeline in another precision");
  to.cut(from.stages(), "the pipeline in another precision");
  for (ReplicaPlan& replica : to.replicas)
    for (int s = 0; s < to.stages(); ++s)
      replica.stages[s].program =
          translate(from.theory(s), replica.stages[s].program, to.theory(s));
  return other;
}

// One device that goes through the micro-batches of a pipeline plan one by one.
StepResult accumulate(const Plan& plan, Feeds feeds, uint64_t seed) {
  const MicroBatch& part = plan.pipeline->part();
  TensorMap batch = feeds.inputs;
  const std::vector<at::Tensor> before = interpret(part.before, feeds).outputs;
  for (size_t i = 0; i < before.size(); ++i)
    batch[part.graph.inputs[plan.graph->inputs.size() + i].name] = before[i];
  StepResult total;
  for (int m = 0; m < part.parts; ++m) {
    for (size_t i = 0; i < part.graph.inputs.size(); ++i) {
      const Input& input = part.graph.inputs[i];
      const PartCut& cut = part.inputs[i];
      at::Tensor& piece = feeds.inputs[input.name] = batch.at(input.name);
      if (cut.is_whole()) continue;
      const int64_t length = cut.size / part.parts;
      piece = piece.reshape({cut.outer, cut.size, cut.inner})
                  .narrow(1, m * length, length)
                  .reshape(part.graph.spec(input.value).shape);
    }
    InterpretOptions options;
    options.kernels = random_kernels(seed, 0, part, m);
    StepResult step = interpret(part.graph, feeds, options);
    // Buffers are those of the first replica.
    if (m < plan.pipeline->replicas[0].micro_batches) {
      total.updates = step.updates;
      for (size_t b = 0; b < part.updated_by_part.size(); ++b)
        if (part.updated_by_part[b]) {
          const std::string& name = part.graph.buffers[b].name;
          feeds.buffers[name] = step.updates.at(name);
        }
    }
    total.loss = m == 0 ? step.loss : total.loss + step.loss;
    for (auto& [name, gradient] : step.gradients) {
      auto [it, fresh] = total.gradients.try_emplace(name, gradient);
      if (!fresh) it->second = it->second + gradient;
    }
  }
  return total;
}

// What a plan's step starts from, and what one device makes of it.
struct Reference {
  Plan exact;
  Feeds feeds;
  StepResult expected;
  std::string by;
};

// The type of the parameters where the graph computes in `compute`.
DType parameters_for(const Plan& plan, DType compute) {
  return is_mixed(compute) ? dtype_of(plan) : compute;
}

// Without `result` only what the step starts from.
Reference reference_of(const Plan& plan, DType compute, uint64_t seed, bool result) {
  const DType dtype = parameters_for(plan, compute);
  Reference reference;
  reference.exact = in_precision(plan, dtype, compute);
  const Plan& exact = reference.exact;
  const Graph& graph = *exact.graph;
  Feeds& feeds = reference.feeds;
  std::shared_ptr<TrainModule> module;  // of the zoo
  if (is_of_zoo(plan)) {
    module = materialize(model_of(plan), seed, dtype);
    feeds.inputs = random_inputs(*module, plan.batch, seed + 1, dtype);
    for (const auto& [name, tensor] : parameters_of(*module))
      feeds.parameters[name] = tensor.detach();
    for (const auto& [name, tensor] : buffers_of(*module)) feeds.buffers[name] = tensor.clone();
  } else {
    feeds = drawn(graph, seed);
  }
  if (!result) return reference;

  bool random = false;
  for (const Node& node : graph.nodes) {
    const OpDef* op = find_op(node.op);
    random = random || (op != nullptr && op->random);
  }
  if (exact.pipeline && !exact.pipeline->part().exact()) {
    reference.expected = accumulate(exact, feeds, seed);
    reference.by = fmt::format(
        "the graph on one device, micro-batch by micro-batch (which is not the step of the whole "
        "batch: {})",
        normalised_by_part(graph, exact.pipeline->part()));
  } else if (random || is_mixed(compute) || module == nullptr) {
    InterpretOptions interpretation;
    interpretation.kernels = random_kernels(seed, 0);
    reference.expected = interpret(graph, feeds, interpretation);
    reference.by = "the graph on one device";
  } else {
    reference.expected = eager_step(module.get(), feeds.inputs);
    reference.by = "PyTorch on one device";
  }
  return reference;
}

// Throws UserError unless the graph is that of the plan's model, or where that is not of the zoo a
// training step by itself.
void check_reference(const Plan& plan) {
  const std::vector<std::string> problems = check_graph(plan);
  if (!problems.empty()) throw user_error("verify", "{}: {}", plan.model, problems[0]);
}

// One step of the plan on this rank; where there is a `result`, what it is worse by than the
// reference is noted in it.
void run_and_compare(const Reference& reference, Communicator& group, uint64_t seed, bool mixed,
                     std::mutex* mutex, Verification* result) {
  at::NoGradGuard no_grad;
  const Graph& graph = *reference.exact.graph;
  const Feeds& feeds = reference.feeds;
  ExecutorOptions options;
  options.seed = seed;
  const std::unique_ptr<Worker> worker = make_worker(reference.exact, group, options);
  for (size_t i = 0; i < worker->parameters().size(); ++i)
    worker->set_parameter(
        i, worker
               ->parameter_piece(
                   i, feeds.parameters.at(graph.parameters[worker->parameters()[i]].name))
               .clone());
  for (size_t i = 0; i < worker->buffers().size(); ++i)
    worker->set_buffer(
        i, worker->buffer_piece(i, feeds.buffers.at(graph.buffers[worker->buffers()[i]].name))
               .clone());
  const Worker::Result step = worker->step(0, input_pieces(reference.exact, *worker, feeds.inputs));
  // Differences are not to be rounded.
  const at::ScalarType exactly = to_torch(dtype_of(reference.exact));
  double largest = 0, norm = 0;
  for (const auto& [name, gradient] : reference.expected.gradients)
    if (gradient.numel() > 0) {
      largest = std::max(largest, gradient.abs().max().item<double>());
      norm = std::hypot(norm, gradient.to(exactly).norm().item<double>());
    }
  auto relative = [](double difference, double scale) {
    return scale > 0 ? difference / scale : difference;
  };
  size_t next = 0;  // among the worker's parameters
  for (size_t k = 0; k < graph.parameters.size(); ++k) {
    const Parameter& p = graph.parameters[k];
    const bool mine =
        next < worker->parameters().size() && worker->parameters()[next] == static_cast<int>(k);
    const at::Tensor local =
        mine && p.gradient.valid() ? step.gradients[next].to(exactly) : at::Tensor();
    next += mine;
    if (!p.gradient.valid()) continue;
    const at::Tensor whole = worker->whole_parameter(static_cast<int>(k), local, true);
    if (result == nullptr) continue;
    const at::Tensor right = reference.expected.gradients.at(p.name).to(exactly);
    const at::Tensor difference = whole - right;
    // In 16 bits, single elements mean little.
    const double error = mixed
                             ? relative(difference.norm().item<double>(),
                                        std::max(right.norm().item<double>(), 1e-2 * norm))
                             : relative(difference.abs().max().item<double>(),
                                        std::max(right.abs().max().item<double>(), 1e-6 * largest));
    std::lock_guard lock(*mutex);
    if (error > result->gradient_error || std::isnan(error)) {
      result->gradient_error = error;
      result->worst_parameter = p.name;
    }
  }
  next = 0;
  for (size_t k = 0; k < graph.buffers.size(); ++k) {
    const Buffer& b = graph.buffers[k];
    const bool mine =
        next < worker->buffers().size() && worker->buffers()[next] == static_cast<int>(k);
    const at::Tensor local = mine ? worker->buffer(next) : at::Tensor();
    next += mine;
    if (!b.update.valid()) continue;
    const at::Tensor whole = worker->whole_buffer(static_cast<int>(k), local, true);
    if (result == nullptr || whole.numel() == 0) continue;
    const at::Tensor right = reference.expected.updates.at(b.name).to(at::kDouble);
    const double error = relative((whole.to(at::kDouble) - right).abs().max().item<double>(),
                                  right.abs().max().item<double>());
    std::lock_guard lock(*mutex);
    if (error > result->buffer_error || std::isnan(error)) {
      result->buffer_error = error;
      result->worst_buffer = b.name;
    }
  }
  if (result == nullptr) return;
  const double loss = reference.expected.loss.item<double>();
  const double error = relative(std::abs(step.loss.item<double>() - loss), std::abs(loss));
  std::lock_guard lock(*mutex);
  if (error > result->loss_error || std::isnan(error)) result->loss_error = error;
}

Verification verdict(Verification result, const Reference& reference, DType compute) {
  const bool mixed = is_mixed(compute);
  result.dtype = compute;
  result.reference = reference.by;
  const double limit = mixed ? 1e-1 : compute == DType::f64 ? 1e-9 : 1e-4;
  result.equivalent = result.loss_error <= (mixed ? 1e-2 : limit) &&
                      result.gradient_error <= limit && result.buffer_error <= limit;
  return result;
}

}  // namespace

Verification verify_plan(const Plan& plan, DType compute, uint64_t seed) {
  check_reference(plan);
  DefaultDType default_type(parameters_for(plan, compute));
  const Reference reference = reference_of(plan, compute, seed, true);
  Verification result;
  std::mutex mutex;
  run_thread_group(plan.cluster.size(), [&](Communicator& group) {
    run_and_compare(reference, group, seed, is_mixed(compute), &mutex, &result);
  });
  return verdict(result, reference, compute);
}

Verification verify_plan(const Plan& plan, DType compute, uint64_t seed, Communicator& group) {
  check_reference(plan);
  DefaultDType default_type(parameters_for(plan, compute));
  const bool judges = group.rank() == 0;
  const Reference reference = reference_of(plan, compute, seed, judges);
  Verification result;
  std::mutex mutex;
  run_and_compare(reference, group, seed, is_mixed(compute), &mutex, judges ? &result : nullptr);
  return verdict(result, reference, compute);
}

}  // namespace motley
