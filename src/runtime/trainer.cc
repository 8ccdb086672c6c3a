#include "runtime/trainer.h"

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <optional>
#include <random>

#include "comm/launch.h"
#include "core/error.h"
#include "core/fault.h"
#include "core/file.h"
#include "core/median.h"
#include "interpret/dispatch.h"
#include "interpret/torch_version.h"
#include "runtime/checkpoint_folder.h"
#include "runtime/data.h"
#include "runtime/eager.h"
#include "runtime/recent.h"
#include "runtime/second_copies.h"
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

std::vector<std::string> state_names(Optimizer::Kind optimizer) {
  if (optimizer == Optimizer::adamw) return {"exp_avg", "exp_avg_sq"};
  if (optimizer == Optimizer::amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return {"momentum"};
}

}  // namespace

struct Trainer::Impl {
  Impl(const Plan& p, Communicator& g, const TrainOptions& o) : plan(p), group(g), options(o) {
    if (options.speed > 0) padding.emplace(options.speed);
    ExecutorOptions execution;
    execution.seed = options.seed;
    execution.device = options.device;
    execution.overlap = options.overlap;
    if (options.device.is_cpu()) {
      execution.before = [this](bool compute) {
        if (padding) padding->before(compute);
        clock.before();
      };
      execution.after = [this](bool compute, const void* instruction) {
        if (padding) padding->after(compute, instruction);
        clock.after(compute, padding.has_value());
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
    if (plan.redundancy > 0) {
      second.emplace(plan, *worker, group);
      for (SecondCopies::Kept& kept : second->parameters)
        kept.piece = own(kept.of(initial.at(kept.name).detach()));
      for (SecondCopies::Kept& kept : second->buffers)
        kept.piece = own(kept.of(initial_buffers.at(kept.name)));
    }
    // Whoever holds it has its piece; what nobody holds stays as it is.
    for (const Parameter& trained : graph.parameters)
      if (trained.gradient.valid()) initial.erase(trained.name);
    make_optimizer();
    const bool taken_over = !options.recent.empty() && take_over();
    if (!options.recent.empty()) recent.emplace(options.recent, options.attempt, group.rank());
    if (options.checkpoint.empty()) return;
    if (group.rank() == 0) folder.emplace(options.checkpoint);
    group.barrier();
    writer.emplace(options.checkpoint, group.rank(), group.size(), options.checkpoint_keep);
    if (!taken_over) load();
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
  at::Tensor whole(size_t k) {
    const int i = held(worker->parameters(), k);
    const at::Tensor tensor = worker->whole_parameter(
        static_cast<int>(k), i < 0 ? at::Tensor() : parameters[i], /*everywhere=*/true);
    return tensor.defined() ? tensor.to(at::kCPU) : tensor;
  }

  void make_optimizer() {
    std::vector<at::Tensor> all = parameters;
    if (second)
      for (const SecondCopies::Kept& kept : second->parameters) all.push_back(kept.piece);
    if (plan.optimizer.kind != Optimizer::sgd) {
      torch::optim::AdamWOptions settings(options.learning_rate > 0 ? options.learning_rate : 1e-3);
      settings.amsgrad(plan.optimizer.kind == Optimizer::amsgrad);
      optimizer = std::make_unique<torch::optim::AdamW>(all, settings);
    } else {
      torch::optim::SGDOptions settings(options.learning_rate > 0 ? options.learning_rate : 1e-2);
      settings.momentum(0.9);
      optimizer = std::make_unique<torch::optim::SGD>(all, settings);
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
    fault_point("step");
    const auto start = Clock::now();
    at::NoGradGuard no_grad;
    Worker::Result result = worker->step(next, input_pieces(plan, *worker, data->batch(next)));
    StepReport report;
    report.step = next++;
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
    if (second) {
      if (padding) padding->before(false);
      second->receive(parameters);
      // Whoever comes to leave this step's pieces knows that all have left those of the one before.
      if (recent) recent->settle(), group.barrier();
      if (padding) padding->after(false);
    }
    if (!parameters.empty()) optimizer->step();
    for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
    if (second)
      for (const SecondCopies::Kept& kept : second->parameters) kept.piece.mutable_grad().reset();
    if (padding) {
      padding->after(true, optimizer.get());
      padding->before(false);
    }
    if (recent) {
      CheckpointOf of = identity();
      report.loss = result.loss.item<double>();
      recent->leave(of, copied(pieces(false)),
                    {report.step, report.loss, since(start), report.gradient_norm});
    }
    report.loss = result.loss.item<double>();  // all of the step has been given to the device
    report.seconds = since(start);
    report.computed = clock.take();
    return report;
  }

  // ---- Checkpoints

  // On the CPU, in memory of their own: training goes on in theirs.
  static std::vector<HeldPiece> copied(std::vector<HeldPiece> list) {
    for (HeldPiece& piece : list)
      piece.tensor =
          piece.tensor.detach().to(at::kCPU, piece.tensor.scalar_type(), false, /*copy=*/true);
    return list;
  }

  CheckpointOf identity() const {
    return {plan.model, to_string(plan.optimizer.kind), options.seed, next, 0};
  }

  // The pieces that this worker has; `once`: that it counts among all. What no worker may hold
  // comes behind, as it was at the beginning, under names of its own.
  std::vector<HeldPiece> pieces(bool once) const {
    std::vector<HeldPiece> list;
    const auto add = [&](const Parameter& p, const Part& part, const at::Tensor& piece) {
      list.push_back({"parameter/" + p.name, part, piece});
      if (!p.gradient.valid()) return;
      for (const auto& [name, tensor] : state_of(*optimizer, piece))
        if (tensor.defined()) list.push_back({name + "/" + p.name, part, tensor});
    };
    for (size_t i = 0; i < parameters.size(); ++i)
      if (!once || worker->counts(i)) add(parameter(i), worker->parameter_part(i), parameters[i]);
    for (size_t i = 0; i < worker->buffers().size(); ++i)
      list.push_back({"buffer/" + buffer(i).name, worker->buffer_part(i), worker->buffer(i)});
    if (second && !once) {
      for (const SecondCopies::Kept& k : second->parameters)
        add(parameter(k.index), k.part, k.piece);
      for (const SecondCopies::Kept& k : second->buffers)
        list.push_back({"buffer/" + k.name, k.part, k.piece});
    }
    if (once && group.rank() != 0) return list;
    for (const auto& [name, tensor] : initial)
      list.push_back({"initial/parameter/" + name, whole_part(tensor.numel()), tensor.detach()});
    for (const auto& [name, tensor] : initial_buffers)
      list.push_back({"initial/buffer/" + name, whole_part(tensor.numel()), tensor});
    return list;
  }

  // What pieces may be of.
  std::map<std::string, TensorSpec> specs() const {
    std::map<std::string, TensorSpec> list;
    const Graph& graph = *plan.graph;
    for (const Parameter& p : graph.parameters) {
      list["parameter/" + p.name] = list["initial/parameter/" + p.name] = graph.spec(p.value);
      if (!p.gradient.valid()) continue;
      for (const std::string& name : state_names(plan.optimizer.kind))
        list[name + "/" + p.name] = graph.spec(p.value);
    }
    for (const Buffer& b : graph.buffers)
      list["buffer/" + b.name] = list["initial/buffer/" + b.name] = graph.spec(b.value);
    return list;
  }

  // A tensor that take() needs and `all` has not; empty: none.
  std::string missing(const Assembly& all, int64_t step) const {
    for (const auto& [name, spec] : specs()) {
      if (name.starts_with("initial/") || all.complete(name)) continue;
      const bool kept = name.starts_with("parameter/") || name.starts_with("buffer/");
      if (kept ? !all.complete("initial/" + name) : step > 0)
        return "parts of " + name + " are missing";
    }
    return "";
  }

  // Goes on behind `step` steps with what `all` has. REQUIRES: nothing is missing.
  void take(const Assembly& all, int64_t step) {
    const Graph& graph = *plan.graph;
    auto held = [&](const std::string& name) {
      return all.whole(all.complete(name) ? name : "initial/" + name);
    };
    Tensors values, buffers;
    std::map<std::string, Tensors> states;
    for (const Parameter& p : graph.parameters) {
      values[p.name] = held("parameter/" + p.name);
      if (p.gradient.valid() && step > 0)
        for (const std::string& name : state_names(plan.optimizer.kind))
          states[name][p.name] = all.whole(name + "/" + p.name);
    }
    for (const Buffer& b : graph.buffers) buffers[b.name] = held("buffer/" + b.name);

    at::NoGradGuard no_grad;
    next = step;
    for (auto& [name, tensor] : initial_buffers) tensor = buffers.at(name);
    for (auto& [name, tensor] : initial) tensor = values.at(name);
    for (size_t i = 0; i < worker->buffers().size(); ++i)
      worker->set_buffer(i, own(worker->buffer_piece(i, buffers.at(buffer(i).name))));
    const auto take_piece_of = [&](at::Tensor& mine, const Parameter& p, const auto& piece) {
      mine.copy_(piece(values.at(p.name)));
      optimizer->state().erase(optimizer_key(mine));
      if (!p.gradient.valid() || step == 0) return;
      std::vector<at::Tensor> list;
      for (const std::string& name : state_names(plan.optimizer.kind))
        list.push_back(own(piece(states.at(name).at(p.name))));
      auto& slot = optimizer->state()[optimizer_key(mine)];
      if (plan.optimizer.kind != Optimizer::sgd) {
        auto state = std::make_unique<torch::optim::AdamWParamState>();
        state->step(next).exp_avg(list[0]).exp_avg_sq(list[1]);
        if (list.size() > 2) state->max_exp_avg_sq(list[2]);
        slot = std::move(state);
      } else {
        auto state = std::make_unique<torch::optim::SGDParamState>();
        state->momentum_buffer(list[0]);
        slot = std::move(state);
      }
    };
    for (size_t i = 0; i < parameters.size(); ++i)
      take_piece_of(parameters[i], parameter(i),
                    [&](const at::Tensor& whole) { return worker->parameter_piece(i, whole); });
    if (!second) return;
    for (SecondCopies::Kept& kept : second->parameters)
      take_piece_of(kept.piece, parameter(kept.index),
                    [&](const at::Tensor& whole) { return kept.of(whole); });
    for (SecondCopies::Kept& kept : second->buffers)
      kept.piece = own(kept.of(buffers.at(kept.name)));
  }

  // The same number on all workers. Collective.
  int64_t of_rank_0(int64_t number) {
    at::Tensor shared = at::full({1}, group.rank() == 0 ? number : 0,
                                 at::TensorOptions(options.device).dtype(at::kLong));
    group.all_reduce(shared);
    return shared.item<int64_t>();
  }
  bool any(bool here) {
    at::Tensor flag =
        at::full({1}, here ? 1 : 0, at::TensorOptions(options.device).dtype(at::kInt));
    group.all_reduce(flag, Reduction::max);
    return flag.item<int>() != 0;
  }

  void save() {
    CheckpointOf of = identity();
    of.run = of_rank_0(static_cast<int64_t>(std::random_device{}()));
    writer->begin(of, copied(pieces(true)));
  }

  Trainer::Written conclude() {
    std::string why = writer->failure();
    const bool failed = any(!why.empty());
    const std::string last = writer->conclude(!failed);
    if (why.empty()) why = last;
    return {!any(!why.empty()), why};
  }

  // From what the workers of attempts before left; false: it is not all there. Collective.
  bool take_over() {
    const std::vector<RecentStep> all_steps = recent_steps(options.recent, options.attempt);
    const auto count = of_rank_0(static_cast<int64_t>(all_steps.size()));
    for (int64_t i = 0; i < count; ++i) {
      // Nobody writes there any more: all workers see the same.
      MOTLEY_CHECK(static_cast<int64_t>(all_steps.size()) == count, "steps in {}", options.recent);
      const RecentStep& from = all_steps[static_cast<size_t>(i)];
      Assembly all(specs());
      read_recent(options.recent, from, &all);
      if (any(!missing(all, from.step).empty())) continue;
      take(all, from.step);
      return true;
    }
    return false;
  }

  // From the newest checkpoint that can be read; the same on every worker. Collective.
  void load() {
    std::vector<int64_t> steps;
    if (group.rank() == 0) steps = checkpoints_in(options.checkpoint);
    const auto count = static_cast<size_t>(of_rank_0(static_cast<int64_t>(steps.size())));
    steps.resize(count);
    for (size_t i = 0; i < count; ++i) {
      const int64_t step = of_rank_0(steps[i]);
      Assembly all(specs());
      std::string why;
      try {
        read_checkpoint(options.checkpoint, step, identity(), &all);
        why = missing(all, step);
      } catch (const UserError&) {
        throw;
      } catch (const std::exception& e) {
        why = e.what();
        why = why.empty() ? "it cannot be read" : why.substr(0, why.find('\n'));
      }
      if (!any(!why.empty())) return take(all, step);
      const bool told = of_rank_0(why.empty() ? 0 : 1) != 0;  // by rank 0
      if (!why.empty() && (group.rank() == 0 || !told))
        std::fprintf(stderr, "motley: [run] --checkpoint %s: that of step %lld is damaged (%s)%s\n",
                     options.checkpoint.c_str(), static_cast<long long>(step), why.c_str(),
                     i + 1 == count ? "" : "; the one before it is used");
    }
    if (count > 0)
      throw user_error("run",
                       "--checkpoint {}: no checkpoint in it can be read; remove it to start anew",
                       options.checkpoint);
  }

  const Plan& plan;
  Communicator& group;
  TrainOptions options;
  std::optional<CheckpointFolder> folder;  // of rank 0
  std::optional<CheckpointWriter> writer;
  std::optional<Recent> recent;
  std::optional<Padding> padding;
  ComputeClock clock;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<Dataset> data;
  Tensors initial, initial_buffers;    // whole: parameters nobody trains, all buffers
  std::vector<at::Tensor> parameters;  // pieces, of worker->parameters()
  std::optional<SecondCopies> second;  // of another worker's; none: nothing is kept twice
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  int64_t next = 0;
};

Trainer::Trainer(const Plan& plan, Communicator& group, const TrainOptions& options)
    : impl_(std::make_unique<Impl>(plan, group, options)) {}
Trainer::~Trainer() = default;
StepReport Trainer::step() { return impl_->step(); }
int64_t Trainer::next() const { return impl_->next; }
const std::string& Trainer::data_description() const { return impl_->data->description(); }
void Trainer::save() { impl_->save(); }
bool Trainer::saving() const { return impl_->writer && impl_->writer->under_way(); }
bool Trainer::written() const { return !saving() || impl_->writer->finished(); }
Trainer::Written Trainer::conclude() { return impl_->conclude(); }

at::Tensor Trainer::parameter(const std::string& name) {
  const auto& list = impl_->plan.graph->parameters;
  for (size_t i = 0; i < list.size(); ++i)
    if (list[i].name == name) return impl_->whole(i);
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

  // After a step that took `seconds`; `writing`: this worker writes its part of a checkpoint.
  // Collective.
  void cast(Seconds seconds, bool writing) {
    save = written = false;
    if (++steps_ < next_) return;
    const bool first = group_.rank() == 0;
    at::Tensor vote = at::zeros({4}, at::kDouble);
    vote[0] = options_.stop_signal ? options_.stop_signal() : 0;
    vote[1] = first && options_.checkpoint_every == 0 && since(saved_) >= options_.save_seconds;
    vote[2] = first ? std::clamp(std::floor(kVoteSeconds / std::max(seconds, 1e-6)), 1.0, 1e6) : 0;
    vote[3] = writing;
    vote = vote.to(options_.device);
    group_.all_reduce(vote, Reduction::max);
    vote = vote.cpu();
    stop = static_cast<int>(vote[0].item<double>());
    save = vote[1].item<double>() > 0;
    next_ = steps_ + vote[2].item<int64_t>();
    written = vote[3].item<double>() == 0;
    if (save) saved_ = Clock::now();
  }
  int stop = 0;  // the signal; 0: none
  bool save = false, written = false;

 private:
  static constexpr Seconds kVoteSeconds = 1;
  Communicator& group_;
  const TrainOptions& options_;
  Clock::time_point saved_;
  int64_t steps_ = 0, next_ = 1;
};

// Ends the checkpoint that is under way. One that could not be written is told of; the last one has
// to be. Collective.
void conclude(Trainer& trainer, const TrainOptions& options, bool last) {
  if (!trainer.saving()) return;
  const auto [all, why] = trainer.conclude();
  if (all) return;
  if (last && why.empty()) throw PeerLost("[run] another worker could not write its checkpoint");
  if (last) throw user_error("run", "--checkpoint {} was not written: {}", options.checkpoint, why);
  if (why.empty()) return;
  std::fprintf(stderr, "motley: [run] --checkpoint %s was not written, training goes on: %s\n",
               options.checkpoint.c_str(), why.c_str());
}

// The first step of a run; `next` of its first attempt, which says so to later ones.
int64_t begin_of_run(const TrainOptions& options, int64_t next) {
  if (options.recent.empty()) return next;
  const std::string file = begin_file(options.recent);
  if (options.attempt > 0) {
    int64_t begun = 0;
    if (std::ifstream(file) >> begun) return begun;
  }
  write_file(file, std::to_string(next));
  return next;
}

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
  SlowDeviceWatch slow(plan, group.rank());
  // What attempts before have taken.
  const int64_t begun = begin_of_run(options, trainer.next());
  for (const StepLoss& s : options.recent.empty()
                               ? std::vector<StepLoss>{}
                               : recent_losses(options.recent, options.attempt, trainer.next()))
    report.steps.push_back({s.step, s.loss, s.gradient_norm, s.seconds});
  const int64_t lost = trainer.next() - begun - static_cast<int64_t>(report.steps.size());
  if (lost > 0 && group.rank() == 0)
    std::fprintf(stderr, "motley: [run] the losses of %d earlier steps are left nowhere\n",
                 static_cast<int>(lost));
  for (int64_t i = trainer.next() - begun; i < steps; ++i) {
    report.steps.push_back(trainer.step());
    const bool warming = times.empty() && first.empty() && i + 1 < steps;
    if (!warming) times.push_back(report.steps.back().seconds);
    if (warming) first = trainer.communication();
    if (progress) progress(report.steps.back());
    if (options.slow && options.device.is_cpu())
      for (const SlowDevice& device : slow.step(report.steps.back().computed,
                                                [&](at::Tensor rows) { group.all_reduce(rows); }))
        options.slow(report.steps.back().step, device);
    if (options.checkpoint.empty()) continue;
    votes.cast(report.steps.back().seconds, !trainer.written());
    const bool last = i + 1 == steps || votes.stop != 0;
    const bool due = votes.save || last ||
                     (options.checkpoint_every > 0 && (i + 1) % options.checkpoint_every == 0);
    if (due || votes.written) conclude(trainer, options, false);
    if (due) trainer.save();
    if (last) conclude(trainer, options, true);
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
  if (!times.empty()) report.median_step_s = median(times);
  return report;
}

}  // namespace motley
