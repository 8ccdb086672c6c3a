// One worker of a distributed step: its group, its pieces, its executor.
#include "runtime/worker.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>

#include "comm/communicator.h"
#include "core/error.h"
#include "core/fault.h"
#include "discover/discover.h"
#include "interpret/dispatch.h"
#include "python/bindings.h"
#include "python/worker_group.h"
#include "runtime/plan_model.h"
#include "runtime/second_copies.h"
#include "runtime/slow_devices.h"
#include "runtime/trainer.h"

namespace motley::python {

namespace {

// Makes gradients what work on them in place needs: of their parameters' types, dense, and alone in
// their memory. One value may be the gradient of several parameters, one element of an expanded
// tensor, a part of a larger tensor, or an input.
void own_memory(const std::vector<at::ScalarType>& types, std::vector<at::Tensor>* gradients) {
  std::map<const c10::StorageImpl*, std::vector<size_t>> of_storage;
  for (size_t i = 0; i < gradients->size(); ++i) {
    at::Tensor& g = (*gradients)[i];
    if (!g.defined()) continue;
    g = g.to(types[i]);
    of_storage[g.storage().unsafeGetStorageImpl()].push_back(i);
  }
  for (auto& [_, list] : of_storage) {
    std::sort(list.begin(), list.end(), [&](size_t a, size_t b) {
      return (*gradients)[a].data_ptr() < (*gradients)[b].data_ptr();
    });
    const auto owners = (*gradients)[list[0]].storage().use_count();
    const bool alone = owners == list.size();
    size_t end = 0;  // of the bytes that gradients have kept
    for (size_t i : list) {
      at::Tensor& g = (*gradients)[i];
      const size_t begin = static_cast<size_t>(g.storage_offset()) * g.element_size();
      if (alone && g.use_count() == 1 && g.is_non_overlapping_and_dense() && begin >= end)
        end = begin + g.nbytes();
      else
        g = g.clone(at::MemoryFormat::Contiguous);
    }
  }
}

// What a worker does for a plan whose devices are those of the workers with `ranks`. The others are
// idle: they hold nothing, and a step is the wait for its loss.
class LocalWorker {
 public:
  // `speed` of this worker where a slower device is emulated; 0: none.
  LocalWorker(std::shared_ptr<Plan> plan, std::shared_ptr<WorkerGroup> group,
              std::vector<int> ranks, uint64_t seed, double speed)
      : plan_(std::move(plan)),
        group_(std::move(group)),
        ranks_(std::move(ranks)),
        among_(group_->among(ranks_, plan_->cluster)) {
    const Graph& graph = *plan_->graph;
    for (size_t i = 0; i < graph.inputs.size(); ++i) inputs_[graph.inputs[i].name] = i;
    const ValueId loss = graph.loss;
    if (loss.valid()) loss_type_ = to_torch(graph.spec(loss).dtype);
    if (idle()) return;
    const auto rank = static_cast<size_t>(among_->rank());
    if (speed > 0) {
      padding_.emplace(speed);
      if (rank < plan_->peak_memory_bytes.size())
        reserve_memory(2 * plan_->peak_memory_bytes[rank]);
    }
    ExecutorOptions options;
    options.seed = seed;
    options.device = group_->device();
    if (options.device.is_cpu()) {
      options.before = [this](bool compute) {
        if (padding_) padding_->before(compute);
        clock_.before();
      };
      options.after = [this](bool compute, const void* instruction) {
        if (padding_) padding_->after(compute, instruction);
        clock_.after(compute, padding_.has_value());
      };
      slow_.emplace(*plan_, among_->rank());
    }
    worker_ = make_worker(*plan_, *among_, options);
    for (size_t i = 0; i < worker_->parameters().size(); ++i) {
      const Parameter& parameter = graph.parameters[worker_->parameters()[i]];
      parameters_[parameter.name] = i;
      gradient_types_.push_back(to_torch(graph.spec(parameter.value).dtype));
    }
    for (size_t i = 0; i < worker_->buffers().size(); ++i)
      buffers_[graph.buffers[worker_->buffers()[i]].name] = i;
    published_.resize(buffers_.size());
  }

  // Of parameters and buffers that this worker holds a piece of, and of inputs.
  bool holds(const std::string& kind, const std::string& name) const {
    return table(kind).count(name) > 0;
  }
  at::Tensor piece(const std::string& kind, const std::string& name,
                   const at::Tensor& whole) const {
    const size_t i = find(kind, name);
    if (idle()) return at::empty({0}, whole.options());  // of an input
    return kind == "parameter" ? worker_->parameter_piece(i, whole.detach())
           : kind == "buffer"  ? worker_->buffer_piece(i, whole.detach())
                               : worker_->input_piece(i, whole.detach());
  }
  // (outer, size, inner, begin, length, group, first, count); see Part.
  using PartOf = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int, int64_t, int64_t>;
  static PartOf numbers_of(const Part& p) {
    return {p.outer, p.size, p.inner, p.begin, p.length, p.group, p.first, p.count};
  }
  PartOf part(const std::string& kind, const std::string& name) const {
    const size_t i = find(kind, name);
    return numbers_of(kind == "parameter" ? worker_->parameter_part(i) : worker_->buffer_part(i));
  }
  // [(kind, name, part)] What is kept here of another worker's pieces (runtime/second_copies.h).
  std::vector<std::tuple<std::string, std::string, PartOf>> kept_second() {
    std::vector<std::tuple<std::string, std::string, PartOf>> list;
    if (idle()) return list;
    if (!second_) second_.emplace(*plan_, *worker_, *among_);
    for (const auto& kept : second_->parameters)
      list.emplace_back("parameter", kept.name, numbers_of(kept.part));
    for (const auto& kept : second_->buffers)
      list.emplace_back("buffer", kept.name, numbers_of(kept.part));
    return list;
  }
  // Bytes to where this worker's pieces are kept too, and those of the worker whose pieces are kept
  // here; as many as there is room for.
  void exchange_second(const at::Tensor& mine, at::Tensor theirs) {
    MOTLEY_CHECK(second_.has_value(), "kept_second() comes first");
    second_->trade(mine, theirs);
  }
  std::string input_placement(const std::string& name) const {
    const size_t i = find("input", name);
    if (!idle()) return to_string(worker_->input_placement(i));
    if (plan_->duplex) return to_string(Placement::replicated());
    const ValueId value = plan_->graph->inputs[i].value;
    return to_string(stored_placements(*plan_->theory, plan_->program)[value.index]);
  }
  bool counts(const std::string& parameter) const {
    return worker_->counts(find("parameter", parameter));
  }
  void set(const std::string& kind, const std::string& name, const at::Tensor& local) {
    const size_t i = find(kind, name);
    if (kind == "parameter")
      worker_->set_parameter(i, local);
    else
      worker_->set_buffer(i, local.detach());
  }

  // Buffers change inside of a step; what others may see of them changes here.
  void publish() {
    for (size_t i = 0; i < published_.size(); ++i) published_[i] = worker_->buffer(i);
  }
  at::Tensor buffer(const std::string& name) const { return worker_->buffer(find("buffer", name)); }
  at::Tensor published(const std::string& buffer) const {
    return published_[find("buffer", buffer)];
  }

  // All workers' rows of a tensor, of which each has counts[rank]. An idle worker's stay as they
  // are.
  at::Tensor gather_rows(const at::Tensor& local, const std::vector<int64_t>& counts) {
    if (idle()) return local;
    std::vector<at::Tensor> pieces;
    for (int r = 0; r < among_->size(); ++r) {
      std::vector<int64_t> shape = local.sizes().vec();
      shape.at(0) = counts.at(static_cast<size_t>(ranks_[r]));
      pieces.push_back(r == among_->rank() ? local.contiguous()
                                           : at::empty(shape, local.options()));
      MOTLEY_CHECK(pieces.back().size(0) == shape[0]);
    }
    among_->all_gather(pieces);
    return at::cat(pieces);
  }

  // The inputs' pieces in the graph's order; the loss and the gradients of the parameters that this
  // worker holds, undefined where there is none.
  std::pair<at::Tensor, std::vector<at::Tensor>> step(int64_t number,
                                                      const std::vector<at::Tensor>& inputs) {
    Worker::Result result;
    group_->begin_step(ranks_);
    if (!idle()) {
      result = worker_->step(number, inputs);
      own_memory(gradient_types_, &result.gradients);
    }
    return {group_->end_step(ranks_, result.loss, loss_type_), std::move(result.gradients)};
  }
  // [(device of the plan, times as long, as before or as planned)] Devices that are slower, behind a step, on the workers of the
  // plan; see runtime/slow_devices.h.
  std::vector<std::tuple<int, double, bool>> slow_devices() {
    std::vector<std::tuple<int, double, bool>> found;
    if (!slow_) return found;
    const auto sum = [&](at::Tensor rows) { among_->all_reduce(rows); };
    for (const SlowDevice& s : slow_->step(clock_.take(), sum))
      found.emplace_back(s.device, s.factor, s.before);
    return found;
  }
  // Around work that is done outside of the step, where a slower device is emulated.
  void before(bool compute) {
    if (padding_) padding_->before(compute);
  }
  void after(bool compute) {
    if (padding_) padding_->after(compute, this);  // the optimizer's step
  }

  bool idle() const { return among_ == nullptr; }

 private:
  using Table = std::map<std::string, size_t>;
  const Table& table(const std::string& kind) const {
    return kind == "parameter" ? parameters_ : kind == "buffer" ? buffers_ : inputs_;
  }
  size_t find(const std::string& kind, const std::string& name) const {
    const auto it = table(kind).find(name);
    if (it == table(kind).end()) throw user_error("python", "there is no {} '{}'", kind, name);
    return it->second;
  }

  std::shared_ptr<Plan> plan_;
  std::shared_ptr<WorkerGroup> group_;
  std::vector<int> ranks_;  // of the workers of the plan, in the order of its devices
  Communicator* among_;     // them; nullptr: this worker is idle
  std::optional<Padding> padding_;
  ComputeClock clock_;
  std::optional<SlowDeviceWatch> slow_;
  std::unique_ptr<Worker> worker_;       // null where it is idle
  std::optional<SecondCopies> second_;   // what it keeps of another one's
  Table parameters_, buffers_, inputs_;  // name: index of the worker's, of the plan's for inputs
  std::vector<at::ScalarType> gradient_types_;  // [parameter of the worker] the parameter's own
  at::ScalarType loss_type_ = at::kFloat;
  std::vector<at::Tensor> published_;  // [buffer of the worker]
};

}  // namespace

namespace {

// What workers do without a model of their own.
void bind_runs(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  // Trains a model of the zoo by the plan in a file. progress(step, loss, seconds) of every step;
  // returns the seconds of the median step and the predicted ones.
  m.def(
      "train",
      [](const std::string& path, WorkerGroup& group, int64_t steps, uint64_t seed,
         const std::string& data, const std::string& checkpoint, double learning_rate,
         const std::function<void(int64_t, double, double)>& progress) {
        const Plan plan = plan_to_run(path, group->size());
        graph_of_model(plan);
        TrainOptions options;
        options.device = group.device();
        options.seed = seed;
        options.data = data;
        options.checkpoint = checkpoint;
        options.learning_rate = learning_rate;
        std::vector<int> all(static_cast<size_t>(group->size()));
        std::iota(all.begin(), all.end(), 0);
        Communicator& used = *group.among(all, plan.cluster);
        const RunReport report = train(plan, used, options, steps, [&](const StepReport& s) {
          const py::gil_scoped_acquire lock;
          progress(s.step, s.loss, s.seconds);
        });
        used.barrier();
        return std::pair{report.median_step_s, plan.predicted_step_s};
      },
      unlocked());

  // What the workers are on; `facts` of this one. (cluster file, profile, warnings, drawing, ranks,
  // seconds, all of it as JSON); the profile on rank 0 alone.
  m.def(
      "discover",
      [](WorkerGroup& group, const std::string& facts, const std::string& name, bool profile,
         const std::string& inside, const std::function<void(const std::string&)>& progress,
         const std::function<std::function<void()>(const std::string&,
                                                   const std::vector<at::Tensor>&)>& optimizer) {
        discover::DiscoverOptions options;
        options.name = name;
        if (group->size() > 1) options.backend = group.backend().name;
        options.inside = inside;
        const discover::Facts mine = discover::parse_facts(facts, "facts");
        options.profile = profile;
        options.sockets = group.sockets_of_tensors();
        if (optimizer)
          options.optimizer = [&](Optimizer kind, const std::vector<at::Tensor>& parameters) {
            return optimizer(kind.kind == Optimizer::sgd ? "sgd" : "adamw", parameters);
          };
        options.progress = [&](const std::string& what) {
          const py::gil_scoped_acquire lock;
          progress(what);
        };
        Communicator& used =
            inside.empty() ? *group.operator->() : *group.mixed_in(mine.machine, inside);
        const discover::Discovered found = discover::discover(used, mine, options);
        group->barrier();
        return std::tuple{found.yaml,
                          profile ? to_json(found.profile).dump(1) + "\n" : "",
                          found.warnings,
                          found.drawing,
                          found.ranks,
                          found.seconds,
                          discover::to_json(found).dump()};
      },
      unlocked());
}

}  // namespace

void bind_worker(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<WorkerGroup, std::shared_ptr<WorkerGroup>>(m, "Group")
      .def(py::init([](bool outside, bool cuda, py::object make, const std::vector<int>& order) {
        MakeNamed named;
        if (!make.is_none())
          named = [held = std::shared_ptr<py::object>(
                       new py::object(std::move(make)), [](py::object* object) {
                         const py::gil_scoped_acquire lock;
                         delete object;
                       })](const std::vector<int>& ranks, const std::string& of) {
            const py::gil_scoped_acquire lock;
            return (*held)(ranks, of).cast<std::vector<std::string>>();
          };
        const py::gil_scoped_release unlock;
        return std::make_shared<WorkerGroup>(outside, cuda, std::move(named), order);
      }))
      .def("use", &WorkerGroup::use, unlocked())
      .def("tell", &WorkerGroup::tell, unlocked())
      .def("close", &WorkerGroup::close, unlocked())
      .def_property_readonly("backend", [](WorkerGroup& g) { return g.backend().name; })
      .def("gather_texts", &WorkerGroup::gather, unlocked())
      .def("cluster_over", &WorkerGroup::cluster_over)
      .def_property_readonly("rank", [](WorkerGroup& g) { return g->rank(); })
      .def_property_readonly("size", [](WorkerGroup& g) { return g->size(); })
      .def_property_readonly("device", [](WorkerGroup& g) { return g.device().str(); })
      .def_property_readonly("sockets", &WorkerGroup::sockets)
      // Why a worker is lost, in words; empty: none is.
      .def_property_readonly("lost",
                             [](WorkerGroup&) {
                               const std::string lost = Watch::lost();
                               return lost.empty() ? lost : lost + ": " + Watch::reason();
                             })
      .def(
          "all_reduce", [](WorkerGroup& g, at::Tensor tensor) { g->all_reduce(tensor); },
          unlocked())
      .def("begin_exchange", &WorkerGroup::begin_exchange, unlocked())
      .def("end_exchange", &WorkerGroup::end_exchange, unlocked())
      .def(
          "barrier", [](WorkerGroup& g) { g->barrier(); }, unlocked())
      .def(
          "limit_bandwidth",
          [](WorkerGroup& g, const Cluster& cluster, const std::vector<int>& ranks) {
            return g.limit_bandwidth(cluster, ranks);
          },
          unlocked());

  py::class_<LocalWorker>(m, "Worker")
      .def(py::init<std::shared_ptr<Plan>, std::shared_ptr<WorkerGroup>, std::vector<int>, uint64_t,
                    double>(),
           unlocked())
      .def_property_readonly("idle", &LocalWorker::idle)
      .def("holds", &LocalWorker::holds)
      .def("piece", &LocalWorker::piece)
      .def("part", &LocalWorker::part)
      .def("input_placement", &LocalWorker::input_placement)
      .def("counts", &LocalWorker::counts)
      .def("set", &LocalWorker::set)
      .def("publish", &LocalWorker::publish)
      .def("buffer", &LocalWorker::buffer)
      .def("published", &LocalWorker::published)
      .def("gather_rows", &LocalWorker::gather_rows, unlocked())
      .def("step", &LocalWorker::step, unlocked())
      .def("kept_second", &LocalWorker::kept_second)
      .def("exchange_second", &LocalWorker::exchange_second, unlocked())
      .def("slow_devices", &LocalWorker::slow_devices, unlocked())
      .def("before", &LocalWorker::before, unlocked())
      .def("after", &LocalWorker::after, unlocked());

  bind_runs(m);

  // Of this machine.
  m.def("cuda_devices", &cuda_devices);
  m.def("say_when_idle", &Watch::say_when_idle,
        "Whoever does nothing while others wait for it is lost.");
  // For tests; see core/fault.h.
  m.def("set_fault_rank", &set_fault_rank);
  m.def("fault_point", &fault_point, unlocked());
}

}  // namespace motley::python
