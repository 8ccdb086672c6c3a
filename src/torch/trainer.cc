#include "torch/trainer.h"

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

#include "core/error.h"
#include "graph/canonical.h"
#include "torch/capture.h"
#include "torch/data.h"
#include "torch/dispatch.h"
#include "torch/eager.h"
#include "torch/executor.h"
#include "torch/source.h"

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

Graph captured_graph(const Plan& plan, DType dtype) {
  return canonicalize(capture(model_of(plan).text(), plan.batch, dtype).graph);
}

// Optimizers keep the same state for every parameter; by name, for checkpoints.
std::vector<std::pair<std::string, at::Tensor>> state_of(torch::optim::Optimizer& optimizer,
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

Graph graph_of_model(const Plan& plan) {
  Graph graph = captured_graph(plan, dtype_of(plan));
  if (fingerprint(graph) != fingerprint(*plan.graph))
    throw user_error("run",
                     "this is a plan for another model: its graph is that of {} ({:016x}), but its "
                     "model is {} at batch {} ({:016x}); plan that model again",
                     plan.graph->model, fingerprint(*plan.graph), plan.model, plan.batch,
                     fingerprint(graph));
  return graph;
}

struct Trainer::Impl {
  Impl(const Plan& p, Communicator& g, const TrainOptions& o)
      : plan(p),
        group(g),
        options(o),
        shares(p.ratios),
        placements(stored_placements(*p.theory, p.program)) {
    if (options.speed > 0) padding.emplace(options.speed);
    ExecutorOptions execution;
    execution.seed = options.seed;
    execution.device = options.device;
    if (padding) {
      execution.before = [this](bool compute) { padding->before(compute); };
      execution.after = [this](bool compute) { padding->after(compute); };
    }
    executor = std::make_unique<Executor>(*plan.theory, plan.program, shares, group, execution);

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
    const Tensors whole = parameters_of(*module), buffers = buffers_of(*module);
    for (const Parameter& parameter : graph.parameters) {
      at::Tensor local = piece(parameter.value, whole.at(parameter.name));
      executor->set(parameter.value, local);
      parameters.push_back(local);
    }
    for (const Buffer& buffer : graph.buffers)
      executor->set(buffer.value, piece(buffer.value, buffers.at(buffer.name)));
    make_optimizer();
    if (options.checkpoint.empty()) return;
    std::error_code error;
    std::filesystem::create_directories(options.checkpoint, error);
    if (error)
      throw user_error("run", "--checkpoint {} cannot be made: {}; give a folder",
                       options.checkpoint, error.message());
    if (std::filesystem::exists(path())) load();
  }

  // This worker's piece of a whole tensor, in memory of its own on its device.
  at::Tensor piece(ValueId value, const at::Tensor& whole) const {
    return executor->piece(value, placements[value.index], whole.detach())
        .to(at::TensorOptions(options.device), /*non_blocking=*/false, /*copy=*/true);
  }
  // On the CPU.
  at::Tensor whole(ValueId value, const at::Tensor& local) {
    return executor->gather(value, placements[value.index], local).to(at::kCPU);
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
    const Graph& graph = *plan.graph;
    at::Tensor squares = at::zeros({1}, at::TensorOptions(options.device).dtype(at::kDouble));
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      const bool cut = placements[graph.parameters[i].value.index].is_shard();
      if (cut || group.rank() == 0) squares += gradients[i].to(at::kDouble).square().sum();
    }
    group.all_reduce(squares);
    const double norm = std::sqrt(squares.item<double>());
    if (norm > options.clip)
      for (at::Tensor& gradient : gradients)
        if (gradient.defined()) gradient = gradient * (options.clip / (norm + 1e-6));
    return norm;
  }

  StepReport step() {
    const auto start = Clock::now();
    const Graph& graph = *plan.graph;
    at::NoGradGuard no_grad;
    const TensorMap batch = data->batch(next);
    for (const Input& input : graph.inputs)
      executor->set(
          input.value,
          executor->piece(input.value, placements[input.value.index], batch.at(input.name))
              .to(options.device));
    Executor::Result result = executor->step(next);
    StepReport report;
    report.step = next++;
    report.loss = result.loss.item<double>();
    if (options.clip > 0) {
      if (padding) padding->before(false);
      report.gradient_norm = clip(result.gradients);
      if (padding) padding->after(false);
    }
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].mutable_grad() = result.gradients[i];
    optimizer->step();
    if (padding) {
      padding->after(true);
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
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& parameter = graph.parameters[i];
      values[parameter.name] = whole(parameter.value, parameters[i]);
      for (const auto& [name, tensor] : state_of(*optimizer, parameters[i]))
        states[name][parameter.name] = whole(parameter.value, tensor);
    }
    for (const Buffer& buffer : graph.buffers)
      buffers[buffer.name] = whole(buffer.value, executor->get(buffer.value));
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
      const auto file = torch::pickle_load({text.begin(), text.end()}).toGenericDict();
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
        if (tensor.sizes().vec() != graph.spec(value).shape)
          throw user_error("run", "--checkpoint {}: {} has another shape than the model's",
                           options.checkpoint, name);
        return piece(value, tensor);
      };
      at::NoGradGuard no_grad;
      for (const Buffer& buffer : graph.buffers)
        executor->set(buffer.value, stored(buffers, buffer.name, buffer.value));
      for (size_t i = 0; i < parameters.size(); ++i) {
        const Parameter& parameter = graph.parameters[i];
        parameters[i].copy_(stored(values, parameter.name, parameter.value));
        if (!parameter.gradient.valid()) continue;
        std::vector<at::Tensor> states;
        for (const std::string& name : state_names(plan.optimizer))
          states.push_back(stored(file.at(name).toGenericDict(), parameter.name, parameter.value));
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
    } catch (const std::exception&) {
      throw user_error(
          "run", "{} is damaged or not a checkpoint of motley; remove it to start anew", path());
    }
  }

  const Plan& plan;
  Communicator& group;
  TrainOptions options;
  Shares shares;
  std::vector<Placement> placements;
  std::optional<Padding> padding;
  std::unique_ptr<Executor> executor;
  std::unique_ptr<Dataset> data;
  std::vector<at::Tensor> parameters;  // local, in the graph's order
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
    if (list[i].name == name) return impl_->whole(list[i].value, impl_->parameters[i]);
  MOTLEY_CHECK(false, "no parameter {}", name);
}

RunReport train(const Plan& plan, Communicator& group, const TrainOptions& options, int64_t steps,
                const std::function<void(const StepReport&)>& progress) {
  Trainer trainer(plan, group, options);
  RunReport report;
  report.data = trainer.data_description();
  std::vector<Seconds> times;
  group.barrier();
  for (int64_t i = 0; i < steps; ++i) {
    report.steps.push_back(trainer.step());
    if (i > 0 || steps == 1) times.push_back(report.steps.back().seconds);
    if (progress) progress(report.steps.back());
    if (!options.checkpoint.empty() &&
        (i + 1 == steps ||
         (options.checkpoint_every > 0 && (i + 1) % options.checkpoint_every == 0)))
      trainer.save();
  }
  std::sort(times.begin(), times.end());
  if (!times.empty())
    report.median_step_s = (times[(times.size() - 1) / 2] + times[times.size() / 2]) / 2;
  return report;
}

Verification verify_plan(const Plan& plan, DType dtype, uint64_t seed) {
  graph_of_model(plan);
  const Graph graph = captured_graph(plan, dtype);
  const Theory theory(graph);
  Program program;
  MOTLEY_CHECK(graph.nodes.size() == plan.graph->nodes.size(),
               "the graph in {} has {} nodes, not {}", to_string(dtype), graph.nodes.size(),
               plan.graph->nodes.size());
  for (const Step& step : plan.program.steps)
    program.steps.push_back(
        parse_step(theory, to_text(*plan.theory, step), "the program in another precision"));
  const Shares shares(plan.ratios);
  const std::vector<Placement> placements = stored_placements(theory, program);

  const std::shared_ptr<TrainModule> module = materialize(model_of(plan), seed, dtype);
  const TensorMap inputs = random_inputs(*module, plan.batch, seed + 1, dtype);
  Feeds feeds{{}, {}, inputs};
  for (const auto& [name, tensor] : parameters_of(*module))
    feeds.parameters[name] = tensor.detach();
  for (const auto& [name, tensor] : buffers_of(*module)) feeds.buffers[name] = tensor.clone();

  bool random = false;
  for (const Node& node : graph.nodes) {
    const OpDef* op = find_op(node.op);
    random = random || (op != nullptr && op->random);
  }
  InterpretOptions interpretation;
  interpretation.kernels = random_kernels(seed, 0);
  DefaultDType default_type(dtype);
  const StepResult expected =
      random ? interpret(graph, feeds, interpretation) : eager_step(module.get(), inputs);

  Verification result;
  result.dtype = dtype;
  result.reference = random ? "the graph on one device" : "PyTorch on one device";
  double largest = 0;
  for (const auto& [name, gradient] : expected.gradients)
    if (gradient.numel() > 0) largest = std::max(largest, gradient.abs().max().item<double>());
  std::mutex mutex;
  run_thread_group(plan.cluster.size(), [&](Communicator& group) {
    at::NoGradGuard no_grad;
    ExecutorOptions options;
    options.seed = seed;
    Executor executor(theory, program, shares, group, options);
    auto set = [&](ValueId value, const at::Tensor& whole) {
      executor.set(value, executor.piece(value, placements[value.index], whole).clone());
    };
    for (const Parameter& p : graph.parameters) set(p.value, feeds.parameters.at(p.name));
    for (const Buffer& b : graph.buffers) set(b.value, feeds.buffers.at(b.name));
    for (const Input& i : graph.inputs) set(i.value, feeds.inputs.at(i.name));
    const Executor::Result step = executor.step(0);
    auto relative = [](double difference, double scale) {
      return scale > 0 ? difference / scale : difference;
    };
    const double loss = expected.loss.item<double>();
    const double loss_error = relative(std::abs(step.loss.item<double>() - loss), std::abs(loss));
    for (size_t i = 0; i < graph.parameters.size(); ++i) {
      const Parameter& p = graph.parameters[i];
      if (!p.gradient.valid()) continue;
      const at::Tensor whole =
          executor.gather(p.gradient, placements[p.value.index], step.gradients[i]);
      const at::Tensor& exact = expected.gradients.at(p.name);
      const double difference = (whole - exact).abs().max().item<double>();
      const double error =
          relative(difference, std::max(exact.abs().max().item<double>(), 1e-6 * largest));
      std::lock_guard lock(mutex);
      if (error > result.gradient_error || std::isnan(error)) {
        result.gradient_error = error;
        result.worst_parameter = p.name;
      }
    }
    std::lock_guard lock(mutex);
    if (loss_error > result.loss_error || std::isnan(loss_error)) result.loss_error = loss_error;
  });
  const double limit = dtype == DType::f64 ? 1e-9 : 1e-4;
  result.equivalent = result.loss_error <= limit && result.gradient_error <= limit;
  return result;
}

}  // namespace motley
