#include "runtime/trainer.h"

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <optional>

#include "capture/capture.h"
#include "capture/source.h"
#include "comm/launch.h"
#include "core/error.h"
#include "graph/canonical.h"
#include "graph/precision.h"
#include "interpret/dispatch.h"
#include "runtime/checkpoint.h"
#include "runtime/consistency.h"
#include "runtime/data.h"
#include "runtime/derivative.h"
#include "runtime/eager.h"
#include "runtime/random.h"
#include "runtime/worker.h"

namespace motley {

namespace {

using Clock = std::chrono::steady_clock;
using Tensors = std::map<std::string, at::Tensor>;

Seconds since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The zoo's model that the plan is for; a plan of a captured graph file names it in the graph.
ModelSpec model_of(const Plan& plan) {
  return parse_model(is_graph_file(plan.model) ? plan.graph->model : plan.model);
}

// The graph of the plan's model with parameters of a type. A plan of mixed precision computes in
// `compute`; with the type of the parameters that is the same graph, and nothing is rounded.
Graph captured_graph(const Plan& plan, int64_t samples, DType dtype, DType compute) {
  Graph graph = canonicalize(capture(model_of(plan).text(), samples, dtype).graph);
  if (plan.precision != DType::f32) graph = with_precision(graph, compute);
  if (plan.theory->segments() == 1) return graph;
  const std::vector<int> segments = original_segments(*plan.graph);
  return segments.size() == graph.nodes.size() ? with_segments(graph, segments) : graph;
}

// Optimizers keep the same state for every parameter; by name, for checkpoints.
std::map<std::string, at::Tensor> state_of(torch::optim::Optimizer& optimizer,
                                           const at::Tensor& parameter) {
  auto& state = optimizer.state();
  auto it = state.find(c10::guts::to_string(parameter.unsafeGetTensorImpl()));
  if (it == state.end()) return {};
  if (auto* adam = dynamic_cast<torch::optim::AdamWParamState*>(it->second.get()))
    return {{"exp_avg", adam->exp_avg()}, {"exp_avg_sq", adam->exp_avg_sq()}};
  auto& sgd = dynamic_cast<torch::optim::SGDParamState&>(*it->second);
  return {{"momentum", sgd.momentum_buffer()}};
}

std::vector<std::string> state_names(Optimizer optimizer) {
  if (optimizer == Optimizer::adamw) return {"exp_avg", "exp_avg_sq"};
  return {"momentum"};
}

c10::Dict<std::string, at::Tensor> dictionary(const Tensors& tensors) {
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor);
  return dict;
}

}  // namespace

DType dtype_of(const Plan& plan) {
  if (plan.graph->parameters.empty()) return DType::f32;
  return plan.graph->spec(plan.graph->parameters[0].value).dtype;
}

Graph captured_graph(const Plan& plan) {
  return captured_graph(plan, plan.batch, dtype_of(plan), plan.precision);
}

Graph graph_of_model(const Plan& plan) {
  Graph graph = captured_graph(plan);
  if (fingerprint(graph) != fingerprint(*plan.graph))
    throw user_error("run",
                     "this is a plan for another model: its graph is that of {} ({:016x}), but its "
                     "model is {} at batch {} ({:016x}); plan that model again",
                     plan.graph->model, fingerprint(*plan.graph), plan.model, plan.batch,
                     fingerprint(graph));
  return graph;
}

struct Trainer::Impl {
  Impl(const Plan& p, Communicator& g, const TrainOptions& o) : plan(p), group(g), options(o) {
    if (options.speed > 0) padding.emplace(options.speed);
    ExecutorOptions execution;
    execution.seed = options.seed;
    execution.device = options.device;
    if (padding) {
      execution.before = [this](bool compute) { padding->before(compute); };
      execution.after = [this](bool compute, const void* instruction) {
        padding->after(compute, instruction);
      };
    }
    const auto rank = static_cast<size_t>(group.rank());
    if (padding && rank < plan.peak_memory_bytes.size())
      reserve_memory(2 * plan.peak_memory_bytes[rank]);
    worker = make_worker(plan, group, execution);

    const Graph& graph = *plan.graph;
    const DType dtype = dtype_of(plan);
    DefaultDType default_type(dtype);
    std::shared_ptr<TrainModule> module;
    {
      // Devices that are threads share torch's generator.
      static std::mutex mutex;
      std::lock_guard lock(mutex);
      module = materialize(model_of(plan), options.seed, dtype);
    }
    data = std::make_unique<Dataset>(module->inputs(plan.batch), options.data, options.seed);
    initial = parameters_of(*module);
    initial_buffers = buffers_of(*module);
    for (size_t i = 0; i < worker->parameters().size(); ++i) {
      at::Tensor local = own(worker->parameter_piece(i, initial.at(parameter(i).name).detach()));
      worker->set_parameter(i, local);
      parameters.push_back(local);
    }
    for (size_t i = 0; i < worker->buffers().size(); ++i)
      worker->set_buffer(i, own(worker->buffer_piece(i, initial_buffers.at(buffer(i).name))));
    // Whoever holds it has its piece; what nobody holds stays as it is.
    for (const Parameter& trained : graph.parameters)
      if (trained.gradient.valid()) initial.erase(trained.name);
    make_optimizer();
    if (options.checkpoint.empty()) return;
    if (group.rank() == 0) folder.emplace(options.checkpoint);
    group.barrier();
    if (std::filesystem::exists(path())) load();
  }

  const Parameter& parameter(size_t i) const {
    return plan.graph->parameters[worker->parameters()[i]];
  }
  const Buffer& buffer(size_t i) const { return plan.graph->buffers[worker->buffers()[i]]; }
  // A piece in memory of its own on this worker's device.
  at::Tensor own(const at::Tensor& piece) const {
    return piece.to(at::TensorOptions(options.device), /*non_blocking=*/false, /*copy=*/true);
  }
  // Which of the worker's parameters the k-th of the plan is; -1: none.
  int held(const std::vector<int>& list, size_t k) const {
    auto it = std::lower_bound(list.begin(), list.end(), static_cast<int>(k));
    return it != list.end() && *it == static_cast<int>(k) ? static_cast<int>(it - list.begin())
                                                          : -1;
  }
  // On rank 0, or everywhere, on the CPU; `state` picks a tensor that is placed as the parameter.
  template <typename F>
  at::Tensor whole(size_t k, bool everywhere, F state) {
    const int i = held(worker->parameters(), k);
    const at::Tensor tensor = worker->whole_parameter(
        static_cast<int>(k), i < 0 ? at::Tensor() : state(parameters[i]), everywhere);
    return tensor.defined() ? tensor.to(at::kCPU) : tensor;
  }
  std::string path() const { return options.checkpoint + "/checkpoint.pt"; }

  void make_optimizer() {
    if (plan.optimizer == Optimizer::adamw) {
      torch::optim::AdamWOptions settings(options.learning_rate > 0 ? options.learning_rate : 1e-3);
      optimizer = std::make_unique<torch::optim::AdamW>(parameters, settings);
    } else {
      torch::optim::SGDOptions settings(options.learning_rate > 0 ? options.learning_rate : 1e-2);
      settings.momentum(0.9);
      optimizer = std::make_unique<torch::optim::SGD>(parameters, settings);
    }
  }

  // The norm of the whole gradient; scales the gradients if it is larger than the limit.
  double clip(std::vector<at::Tensor>& gradients) {
    at::Tensor squares = at::zeros({1}, at::TensorOptions(options.device).dtype(at::kDouble));
    for (size_t i = 0; i < gradients.size(); ++i)
      if (gradients[i].defined() && worker->counts(i))
        squares += gradients[i].to(at::kDouble).square().sum();
    group.all_reduce(squares);
    const double norm = std::sqrt(squares.item<double>());
    if (norm > options.clip)
      for (at::Tensor& gradient : gradients)
        if (gradient.defined()) gradient = gradient * (options.clip / (norm + 1e-6));
    return norm;
  }

  StepReport step() {
    const auto start = Clock::now();
    at::NoGradGuard no_grad;
    Worker::Result result = worker->step(next, input_pieces(plan, *worker, data->batch(next)));
    StepReport report;
    report.step = next++;
    report.loss = result.loss;
    if (options.clip > 0) {
      if (padding) padding->before(false);
      report.gradient_norm = clip(result.gradients);
      if (padding) padding->after(false);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor& gradient = result.gradients[i];
      if (gradient.defined()) gradient = gradient.to(parameters[i].scalar_type());
      parameters[i].mutable_grad() = gradient;
    }
    if (!parameters.empty()) optimizer->step();
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
    if (padding) {
      padding->after(true, optimizer.get());
      padding->before(false);
    }
    report.seconds = since(start);
    return report;
  }

  void save() {
    const Graph& graph = *plan.graph;
    Tensors values, buffers;
    std::map<std::string, Tensors> states;
    for (const std::string& name : state_names(plan.optimizer)) states[name];
    auto same = [](const at::Tensor& parameter) { return parameter; };
    for (size_t k = 0; k < graph.parameters.size(); ++k) {
      const Parameter& p = graph.parameters[k];
      at::Tensor value = whole(k, false, same);
      values[p.name] = value.defined() || group.rank() != 0 ? value : initial.at(p.name).detach();
      if (!p.gradient.valid() || next == 0) continue;
      for (auto& [name, tensors] : states)
        tensors[p.name] = whole(k, false, [&](const at::Tensor& parameter) {
          return state_of(*optimizer, parameter).at(name);
        });
    }
    for (size_t k = 0; k < graph.buffers.size(); ++k) {
      const int i = held(worker->buffers(), k);
      at::Tensor value = worker->whole_buffer(static_cast<int>(k),
                                              i < 0 ? at::Tensor() : worker->buffer(i), false);
      buffers[graph.buffers[k].name] =
          value.defined() ? value.to(at::kCPU) : initial_buffers.at(graph.buffers[k].name);
    }
    if (group.rank() == 0) {
      c10::impl::GenericDict file(c10::StringType::get(), c10::AnyType::get());
      file.insert("model", plan.model);
      file.insert("optimizer", std::string(to_string(plan.optimizer)));
      file.insert("seed", static_cast<int64_t>(options.seed));
      file.insert("step", next);
      file.insert("parameters", dictionary(values));
      file.insert("buffers", dictionary(buffers));
      for (const auto& [name, tensors] : states) file.insert(name, dictionary(tensors));
      const std::vector<char> bytes = torch::pickle_save(file);
      write_file(path(), std::string(bytes.begin(), bytes.end()));
    }
    group.barrier();
  }

  void load() {
    const Graph& graph = *plan.graph;
    const std::string text = read_file(path(), size_t{1} << 40);
    try {
      const auto file = read_archive(text).toGenericDict();
      const std::string model = file.at("model").toStringRef(),
                        kind = file.at("optimizer").toStringRef();
      if (model != plan.model)
        throw user_error("run", "--checkpoint {} is of model {}; the plan's is {}",
                         options.checkpoint, model, plan.model);
      if (kind != to_string(plan.optimizer))
        throw user_error("run", "--checkpoint {} is of optimizer {}; the plan's is {}",
                         options.checkpoint, kind, to_string(plan.optimizer));
      next = file.at("step").toInt();
      const auto values = file.at("parameters").toGenericDict(),
                 buffers = file.at("buffers").toGenericDict();
      auto stored = [&](const c10::impl::GenericDict& dict, const std::string& name,
                        ValueId value) {
        const at::Tensor tensor = dict.at(name).toTensor();
        if (spec_of(tensor) != graph.spec(value))
          throw user_error("run", "--checkpoint {}: {} is {}; the model's is {}",
                           options.checkpoint, name, to_string(spec_of(tensor)),
                           to_string(graph.spec(value)));
        return tensor;
      };
      auto source = [&](const auto& list, const std::string& name) {
        for (const auto& item : list)
          if (item.name == name) return item.value;
        throw std::runtime_error("no " + name);
      };
      at::NoGradGuard no_grad;
      for (auto& [name, tensor] : initial_buffers)
        tensor = stored(buffers, name, source(graph.buffers, name));
      for (auto& [name, tensor] : initial)
        tensor = stored(values, name, source(graph.parameters, name));
      for (size_t i = 0; i < worker->buffers().size(); ++i)
        worker->set_buffer(
            i, own(worker->buffer_piece(i, stored(buffers, buffer(i).name, buffer(i).value))));
      for (size_t i = 0; i < parameters.size(); ++i) {
        const Parameter& p = parameter(i);
        parameters[i].copy_(worker->parameter_piece(i, stored(values, p.name, p.value)));
        if (!p.gradient.valid()) continue;
        std::vector<at::Tensor> states;
        for (const std::string& name : state_names(plan.optimizer))
          states.push_back(own(
              worker->parameter_piece(i, stored(file.at(name).toGenericDict(), p.name, p.value))));
        auto& slot = optimizer->state()[c10::guts::to_string(parameters[i].unsafeGetTensorImpl())];
        if (plan.optimizer == Optimizer::adamw) {
          auto state = std::make_unique<torch::optim::AdamWParamState>();
          state->step(next).exp_avg(states[0]).exp_avg_sq(states[1]);
          slot = std::move(state);
        } else {
          auto state = std::make_unique<torch::optim::SGDParamState>();
          state->momentum_buffer(states[0]);
          slot = std::move(state);
        }
      }
    } catch (const UserError&) {
      throw;
    } catch (const std::exception& e) {
      const std::string why = e.what();
      throw user_error("run",
                       "{} is damaged or not a checkpoint of motley ({}); remove it to start anew",
                       path(), why.substr(0, why.find('\n')));
    }
  }

  const Plan& plan;
  Communicator& group;
  TrainOptions options;
  std::optional<CheckpointFolder> folder;  // of rank 0
  std::optional<Padding> padding;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<Dataset> data;
  Tensors initial, initial_buffers;    // whole: parameters nobody trains, all buffers
  std::vector<at::Tensor> parameters;  // pieces, of worker->parameters()
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  int64_t next = 0;
};

Trainer::Trainer(const Plan& plan, Communicator& group, const TrainOptions& options)
    : impl_(std::make_unique<Impl>(plan, group, options)) {}
Trainer::~Trainer() = default;
StepReport Trainer::step() { return impl_->step(); }
int64_t Trainer::next_step() const { return impl_->next; }
const std::string& Trainer::data_description() const { return impl_->data->description(); }
void Trainer::save() { impl_->save(); }

at::Tensor Trainer::parameter(const std::string& name) {
  const auto& list = impl_->plan.graph->parameters;
  for (size_t i = 0; i < list.size(); ++i)
    if (list[i].name == name)
      return impl_->whole(i, true, [](const at::Tensor& parameter) { return parameter; });
  MOTLEY_CHECK(false, "no parameter {}", name);
}

std::vector<int> Trainer::in_flight() {
  at::Tensor most =
      at::zeros({impl_->group.size()}, at::TensorOptions(impl_->options.device).dtype(at::kDouble));
  most[impl_->group.rank()] = impl_->worker->most_in_flight();
  impl_->group.all_reduce(most);
  most = most.cpu();
  std::vector<int> list;
  for (int64_t r = 0; r < most.numel(); ++r) list.push_back(most[r].item<int>());
  return list;
}

namespace {

// Whether to save now, and to stop: all workers have to do it at the same step, and learn of
// signals and of time at different ones. So they vote, about once a second.
class Votes {
 public:
  Votes(Communicator& group, const TrainOptions& options)
      : group_(group), options_(options), saved_(Clock::now()) {}

  // After a step that took `seconds`. Collective.
  void cast(Seconds seconds) {
    save = false;
    if (++steps_ < next_) return;
    const bool first = group_.rank() == 0;
    at::Tensor vote = at::zeros({3}, at::kDouble);
    vote[0] = options_.stop_signal ? options_.stop_signal() : 0;
    vote[1] = first && options_.checkpoint_every == 0 && since(saved_) >= options_.save_seconds;
    vote[2] = first ? std::clamp(std::floor(kVoteSeconds / std::max(seconds, 1e-6)), 1.0, 1e6) : 0;
    vote = vote.to(options_.device);
    group_.all_reduce(vote, Reduction::max);
    vote = vote.cpu();
    stop = static_cast<int>(vote[0].item<double>());
    save = vote[1].item<double>() > 0;
    next_ = steps_ + vote[2].item<int64_t>();
    if (save) saved_ = Clock::now();
  }
  int stop = 0;  // the signal; 0: none
  bool save = false;

 private:
  static constexpr Seconds kVoteSeconds = 1;
  Communicator& group_;
  const TrainOptions& options_;
  Clock::time_point saved_;
  int64_t steps_ = 0, next_ = 1;
};

}  // namespace

RunReport train(const Plan& plan, Communicator& group, const TrainOptions& options, int64_t steps,
                const std::function<void(const StepReport&)>& progress) {
  Trainer trainer(plan, group, options);
  RunReport report;
  report.data = trainer.data_description();
  std::vector<Seconds> times;
  group.barrier();
  Votes votes(group, options);
  for (int64_t i = 0; i < steps; ++i) {
    report.steps.push_back(trainer.step());
    if (i > 0 || steps == 1) times.push_back(report.steps.back().seconds);
    if (progress) progress(report.steps.back());
    if (options.checkpoint.empty()) continue;
    votes.cast(report.steps.back().seconds);
    if (votes.save || votes.stop != 0 || i + 1 == steps ||
        (options.checkpoint_every > 0 && (i + 1) % options.checkpoint_every == 0))
      trainer.save();
    if (votes.stop == 0) continue;
    report.stopped = votes.stop;
    break;
  }
  report.in_flight = trainer.in_flight();
  std::sort(times.begin(), times.end());
  if (!times.empty())
    report.median_step_s = (times[(times.size() - 1) / 2] + times[times.size() / 2]) / 2;
  return report;
}

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
  other.set_graph(is_of_zoo(plan)     ? captured_graph(plan, plan.batch, dtype, compute)
                  : is_mixed(compute) ? *plan.graph
                                      : in_type(*plan.graph, compute));
  MOTLEY_CHECK(other.graph->nodes.size() == plan.graph->nodes.size(),
               "the graph in {} has {} nodes, not {}", to_string(dtype), other.graph->nodes.size(),
               plan.graph->nodes.size());
  auto translate = [](const Theory& from, const Program& program, const Theory& to) {
    Program result;
    for (const Step& step : program.steps)
      result.steps.push_back(
          parse_step(to, to_text(from, step), "the program in another precision"));
    return result;
  };
  if (!plan.pipeline) {
    other.program = translate(*plan.theory, plan.program, *other.theory);
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
  const double error = relative(std::abs(step.loss - loss), std::abs(loss));
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
