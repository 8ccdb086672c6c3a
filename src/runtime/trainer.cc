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

#include "comm/launch.h"
#include "core/error.h"
#include "interpret/dispatch.h"
#include "interpret/torch_version.h"
#include "runtime/checkpoint.h"
#include "runtime/data.h"
#include "runtime/eager.h"
#include "runtime/worker.h"

namespace motley {

namespace {

using Clock = std::chrono::steady_clock;
using Tensors = std::map<std::string, at::Tensor>;

Seconds since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Optimizers keep the same state for every parameter; by name, for checkpoints.
std::map<std::string, at::Tensor> state_of(torch::optim::Optimizer& optimizer,
                                           const at::Tensor& parameter) {
  auto& state = optimizer.state();
  auto it = state.find(optimizer_key(parameter));
  if (it == state.end()) return {};
  if (auto* adam = dynamic_cast<torch::optim::AdamWParamState*>(it->second.get()))
    return {{"exp_avg", adam->exp_avg()},
            {"exp_avg_sq", adam->exp_avg_sq()},
            {"max_exp_avg_sq", adam->max_exp_avg_sq()}};
  auto& sgd = dynamic_cast<torch::optim::SGDParamState&>(*it->second);
  return {{"momentum", sgd.momentum_buffer()}};
}

std::vector<std::string> state_names(Optimizer optimizer) {
  if (optimizer == Optimizer::adamw) return {"exp_avg", "exp_avg_sq"};
  if (optimizer == Optimizer::amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return {"momentum"};
}

c10::Dict<std::string, at::Tensor> dictionary(const Tensors& tensors) {
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor);
  return dict;
}

}  // namespace

struct Trainer::Impl {
  Impl(const Plan& p, Communicator& g, const TrainOptions& o) : plan(p), group(g), options(o) {
    if (options.speed > 0) padding.emplace(options.speed);
    ExecutorOptions execution;
    execution.seed = options.seed;
    execution.device = options.device;
    execution.overlap = options.overlap;
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
    if (plan.optimizer != Optimizer::sgd) {
      torch::optim::AdamWOptions settings(options.learning_rate > 0 ? options.learning_rate : 1e-3);
      settings.amsgrad(plan.optimizer == Optimizer::amsgrad);
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
        auto& slot = optimizer->state()[optimizer_key(parameters[i])];
        if (plan.optimizer != Optimizer::sgd) {
          auto state = std::make_unique<torch::optim::AdamWParamState>();
          state->step(next).exp_avg(states[0]).exp_avg_sq(states[1]);
          if (states.size() > 2) state->max_exp_avg_sq(states[2]);
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

std::vector<Worker::Communication> Trainer::communication() {
  const Worker::Communication own = impl_->worker->communication();
  at::Tensor all = at::zeros({impl_->group.size(), 2}, at::kDouble);
  all[impl_->group.rank()][0] = own.seconds;
  all[impl_->group.rank()][1] = own.waited;
  all = all.to(impl_->options.device);
  impl_->group.all_reduce(all);
  all = all.cpu();
  std::vector<Worker::Communication> list;
  for (int64_t r = 0; r < all.size(0); ++r)
    list.push_back({all[r][0].item<double>(), all[r][1].item<double>()});
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
  std::vector<Worker::Communication> first;
  group.barrier();
  Votes votes(group, options);
  for (int64_t i = 0; i < steps; ++i) {
    report.steps.push_back(trainer.step());
    if (i > 0 || steps == 1) times.push_back(report.steps.back().seconds);
    if (i == 0 && steps > 1) first = trainer.communication();
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
  report.communication = trainer.communication();
  const auto counted = static_cast<double>(std::max<size_t>(1, times.size()));
  for (size_t r = 0; r < report.communication.size(); ++r) {
    Worker::Communication& c = report.communication[r];
    if (!first.empty()) c.seconds -= first[r].seconds, c.waited -= first[r].waited;
    c.seconds /= counted;
    c.waited /= counted;
  }
  std::sort(times.begin(), times.end());
  if (!times.empty())
    report.median_step_s = (times[(times.size() - 1) / 2] + times[times.size() / 2]) / 2;
  return report;
}

}  // namespace motley
