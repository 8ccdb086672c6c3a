// One worker of a distributed step: its group, its pieces, its executor.
#include "runtime/worker.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>

#include "comm/backend.h"
#include "comm/communicator.h"
#include "comm/gloo.h"
#include "comm/launch.h"
#include "comm/mixed.h"
#include "comm/process_group.h"
#include "comm/staged.h"
#include "comm/store.h"
#include "comm/subgroup.h"
#include "core/error.h"
#include "discover/discover.h"
#include "interpret/dispatch.h"
#include "python/bindings.h"
#include "runtime/emulate.h"
#include "runtime/plan_model.h"
#include "runtime/trainer.h"

#if MOTLEY_TORCH_AT_LEAST(2, 4)
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#endif

namespace motley::python {

namespace {

constexpr int kIdleTag = 1 << 20;  // of messages from and to idle workers
constexpr int kDigestTag = kIdleTag + 1;
constexpr int kPartTag = kIdleTag + 2;  // of what a part of the cluster tells itself

// Makes process groups of torch.distributed: of these ranks of the launch, over a backend; called by
// all of them. The names under which c10d knows them: of collectives, of messages to higher and to
// lower ranks.
using MakeNamed = std::function<std::vector<std::string>(const std::vector<int>& ranks,
                                                         const std::string& backend)>;

ProcessGroup group_named([[maybe_unused]] const std::string& name) {
#if MOTLEY_TORCH_AT_LEAST(2, 4)
  return c10d::resolve_process_group(name);
#else
  throw user_error("python",
                   "groups of torch.distributed need torch 2.4 or newer; leave out backend=");
#endif
}

// The workers that a launcher started; this process alone if none did. They always have a group of
// gloo on the CPU, for what they tell one another; tensors of plans take it too, unless they are
// on a CUDA device or another backend is asked for.
class WorkerGroup {
 public:
  // `store_outside`: torch.distributed holds the store at MASTER_PORT.
  WorkerGroup(bool store_outside, bool cuda, MakeNamed make) : make_(std::move(make)) {
    std::optional<Rendezvous> where = rendezvous_from_environment();
    if (!where) {
      store_ = std::make_unique<RendezvousStore>(0);
      where = store_->member(0, 1);
    } else if (store_outside && !where->store_outside) {
      where->store_outside = where->of_torch = true;
    }
    if (cuda)
      device_ = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(cuda_device_of(*where)));
    else
      keep_freed_memory();  // as in the workers of motley run
    where_ = *where;
    static std::atomic<int> made{0};  // by this process, as by the others
    if (const int number = made++; number > 0)
      where_ = part_of(*where, everyone(), fmt::format("/group{}", number));
    all_ = join(where_);
    over(&all_, everyone());
  }
  // From now on tensors go over groups of this backend; collective, before any step.
  void use(const std::string& backend) {
    backend_ = backend;
    over(&all_, everyone());
  }
  // Adds up what the workers give, on the CPU.
  void tell(at::Tensor tensor) { all_.control->all_reduce(tensor); }
  // On the device.
  Communicator* operator->() { return all_.used(); }
  at::Device device() const { return device_; }
  // [rank] The connected socket to each peer, -1 where there is none.
  std::vector<int> sockets() const { return all_.control->sockets(); }
  // The same; none where tensors do not go over them.
  std::vector<int> sockets_of_tensors() const {
    return all_.over == nullptr ? sockets() : std::vector<int>{};
  }
  bool has_messages() const { return all_.used()->has_messages(); }
  // The group of workers with these ranks, ascending; nullptr if this worker is none of them.
  // Collective among them; one that has been joined stays. Parts of the cluster that have a backend
  // of their own talk over it.
  Communicator* among(const std::vector<int>& ranks, const Cluster& cluster) {
    Joined* part = joined(ranks);
    if (part == nullptr) return nullptr;
    return mix(part, ranks, cluster);
  }
  // Limits the bandwidth between these ranks, whose devices are those of the cluster.
  std::string limit_bandwidth(const Cluster& cluster, const std::vector<int>& ranks) {
    const Joined* part = joined(ranks);
    if (part == nullptr) return "off";
    if (part->over != nullptr)
      throw user_error("python",
                       "emulate works on the CPU over gloo; give it without device= and backend=");
    return emulate_links(*part->control, cluster);
  }

  // A step in which only the workers with `ranks` compute. Whoever is idle waits for its loss, and
  // the first of `ranks` does not begin before all have come: so nobody is a step ahead of an idle
  // worker that asks for the state. All of it is nothing where no worker is idle.
  void begin_step(const std::vector<int>& ranks) {
    if (all_.control->rank() != ranks[0]) return;
    std::vector<std::unique_ptr<Message>> coming;
    std::vector<at::Tensor> here;
    for (int rank : idle(ranks)) {
      here.push_back(at::empty({1}, at::kByte));
      coming.push_back(all_.control->receive(here.back(), rank, kIdleTag));
    }
    for (auto& message : coming) message->wait();
    for (auto& message : going_) message->wait();
    going_.clear();
  }
  // Every worker gives a number and gets that of the worker before it in the ring of ranks, so that
  // any two that differ are noticed. The numbers travel between the two calls, and a worker that
  // waits in the second one needs nothing of the others but their first.
  void begin_exchange(int64_t number) {
    const int size = all_.control->size(), rank = all_.control->rank();
    before_ = at::full({1}, number, at::TensorOptions(at::kLong));
    exchanged_.clear();
    if (size == 1) return;
    mine_ = before_.clone();
    exchanged_.push_back(all_.control->receive(before_, (rank + size - 1) % size, kDigestTag));
    exchanged_.push_back(all_.control->send(mine_, (rank + 1) % size, kDigestTag));
  }
  int64_t end_exchange() {
    for (auto& message : exchanged_) message->wait();
    exchanged_.clear();
    return before_.item<int64_t>();
  }
  // The loss, which the workers with `ranks` give, everywhere. It is sent and not waited for.
  double end_step(const std::vector<int>& ranks, double loss) {
    const std::vector<int> others = idle(ranks);
    const int rank = all_.control->rank();
    if (others.empty()) return loss;
    at::Tensor value = at::full({1}, loss, at::TensorOptions(at::kDouble));
    if (rank == ranks[0]) {
      for (int other : others) going_.push_back(all_.control->send(value, other, kIdleTag));
    } else if (std::find(others.begin(), others.end(), rank) != others.end()) {
      const auto here = all_.control->send(at::zeros({1}, at::kByte), ranks[0], kIdleTag);
      all_.control->receive(value, ranks[0], kIdleTag)->wait();
      here->wait();
    }
    return value.item<double>();
  }

 private:
  // A group and a part of the cluster in it.
  struct Mixed {
    std::unique_ptr<Communicator> control, part, both;
  };
  struct Joined {
    std::unique_ptr<ProcessCommunicator> control;
    std::unique_ptr<Communicator> over;  // by process groups, or copies to the CPU; null: control
    std::map<std::pair<std::string, std::vector<int>>, Mixed> mixed;  // by backend and members
    Communicator* used() const { return over ? over.get() : control.get(); }
  };
  Joined join(const Rendezvous& where) {
    Joined made;
    made.control = join_group(where);
    return made;
  }
  std::vector<int> everyone() const {
    std::vector<int> ranks(static_cast<size_t>(where_.size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  std::unique_ptr<Communicator> made_by_torch(const std::vector<int>& ranks,
                                              const std::string& backend, Communicator* control) {
    Watch::exit_when_lost();  // what waits for a lost worker in another backend may wait for ever
    OverProcessGroups groups;
    groups.ranks = ranks;
    groups.backend = backend_named(backend);
    groups.device = device_;
    groups.control = control;
    groups.number = where_.rank;
    groups.make = [this, backend](const std::vector<int>& of) {
      const std::vector<std::string> names = make_(of, backend);
      ProcessGroups made;
      made.collectives = group_named(names.at(0));
      made.up = group_named(names.at(1));
      made.down = group_named(names.at(2));
      return made;
    };
    return communicator_over(std::move(groups));
  }
  void over(Joined* joined, const std::vector<int>& ranks) {
    if (!backend_.empty() && ranks.size() > 1)
      joined->over = made_by_torch(ranks, backend_, joined->control.get());
    else if (device_.is_cuda())
      joined->over = staged(*joined->control, device_);
  }
  // The group with the workers of this one's part of the cluster over what its file says; the group
  // itself if it says nothing.
  Communicator* mix(Joined* joined, const std::vector<int>& ranks, const Cluster& cluster) {
    const Group* part = nullptr;  // the innermost
    const int me = joined->control->rank();
    for (const Group& group : cluster.groups)
      if (group.parent.valid() && !group.backend.empty() && group.device_count > 1 &&
          me >= group.first_device && me < group.first_device + group.device_count)
        part = &group;
    if (part == nullptr) return joined->used();
    std::vector<int> members, of_launch;
    for (int d = part->first_device; d < part->first_device + part->device_count; ++d) {
      members.push_back(d);
      of_launch.push_back(ranks[static_cast<size_t>(d)]);
    }
    Mixed& made = joined->mixed[{part->backend, members}];
    if (made.both == nullptr) {
      made.control = subgroup(*joined->control, members, kPartTag);
      made.part = made_by_torch(of_launch, part->backend, made.control.get());
      made.both = mixed(*joined->used(), std::move(members), *made.part);
    }
    return made.both.get();
  }
  Joined* joined(const std::vector<int>& ranks) {
    if (static_cast<int>(ranks.size()) == where_.size) return &all_;
    if (std::find(ranks.begin(), ranks.end(), where_.rank) == ranks.end()) return nullptr;
    auto it = parts_.find(ranks);
    if (it == parts_.end()) {
      const std::string name = fmt::format("/devices_{}", fmt::join(ranks, "_"));
      it = parts_.emplace(ranks, join(part_of(where_, ranks, name))).first;
      over(&it->second, ranks);
    }
    return &it->second;
  }
  std::vector<int> idle(const std::vector<int>& ranks) const {
    std::vector<int> others;
    for (int rank = 0; rank < where_.size; ++rank)
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) others.push_back(rank);
    return others;
  }

  std::string backend_;
  MakeNamed make_;
  std::unique_ptr<RendezvousStore> store_;
  Rendezvous where_;
  at::Device device_ = at::kCPU;
  Joined all_;
  std::map<std::vector<int>, Joined> parts_;     // by ranks
  std::vector<std::unique_ptr<Message>> going_;  // losses, to idle workers
  at::Tensor mine_, before_;                     // numbers of an exchange
  std::vector<std::unique_ptr<Message>> exchanged_;
};

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
    if (padding_) {
      options.before = [this](bool compute) { padding_->before(compute); };
      options.after = [this](bool compute, const void* instruction) {
        padding_->after(compute, instruction);
      };
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
  std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int, int64_t, int64_t> part(
      const std::string& kind, const std::string& name) const {
    const size_t i = find(kind, name);
    const Part p = kind == "parameter" ? worker_->parameter_part(i) : worker_->buffer_part(i);
    return {p.outer, p.size, p.inner, p.begin, p.length, p.group, p.first, p.count};
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
    result.loss = group_->end_step(ranks_, result.loss);
    return {at::scalar_tensor(result.loss, loss_type_), std::move(result.gradients)};
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
  std::unique_ptr<Worker> worker_;       // null where it is idle
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
         const std::function<void(const std::string&)>& progress) {
        discover::DiscoverOptions options;
        options.name = name;
        options.profile = profile;
        options.sockets = group.sockets_of_tensors();
        options.progress = [&](const std::string& what) {
          const py::gil_scoped_acquire lock;
          progress(what);
        };
        const discover::Discovered found =
            discover::discover(*group.operator->(), discover::parse_facts(facts, "facts"), options);
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
      .def(py::init([](bool outside, bool cuda, py::object make) {
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
        return std::make_shared<WorkerGroup>(outside, cuda, std::move(named));
      }))
      .def("use", &WorkerGroup::use, unlocked())
      .def("tell", &WorkerGroup::tell, unlocked())
      .def_property_readonly("has_messages", &WorkerGroup::has_messages)
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
      .def("before", &LocalWorker::before, unlocked())
      .def("after", &LocalWorker::after, unlocked());

  bind_runs(m);

  // Of this machine.
  m.def("cuda_devices", &cuda_devices);
}

}  // namespace motley::python
