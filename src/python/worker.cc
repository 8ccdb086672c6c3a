// One worker of a distributed step: its group, its pieces, its executor.
#include "torch/worker.h"

#include <ATen/ATen.h>

#include <map>
#include <optional>
#include <tuple>

#include "core/error.h"
#include "python/bindings.h"
#include "torch/communicator.h"
#include "torch/dispatch.h"
#include "torch/emulate.h"
#include "torch/gloo.h"
#include "torch/launch.h"
#include "torch/nccl.h"

namespace motley::python {

namespace {

// The workers that a launcher started; this process alone if none did.
class WorkerGroup {
 public:
  // `store_outside`: torch.distributed holds the store at MASTER_PORT.
  WorkerGroup(bool store_outside, bool cuda) {
    std::optional<Rendezvous> where = rendezvous_from_environment();
    if (!where) {
      store_ = std::make_unique<RendezvousStore>(0);
      where.emplace();
      where->port = store_->port();
      where->store_outside = true;
    }
    where->store_outside = where->store_outside || store_outside;
    if (cuda) {
      const int index = cuda_device_of(*where);
      device_ = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
      group_ = join_nccl(*where, index);
    } else {
      keep_freed_memory();  // as in the workers of motley run
      std::unique_ptr<ProcessCommunicator> processes = join_group(*where);
      sockets_ = processes.get();
      group_ = std::move(processes);
    }
  }
  Communicator& operator*() { return *group_; }
  Communicator* operator->() { return group_.get(); }
  at::Device device() const { return device_; }
  // [rank] The connected socket to each peer, -1 where there is none; empty over NCCL.
  std::vector<int> sockets() const {
    return sockets_ == nullptr ? std::vector<int>() : sockets_->sockets();
  }
  std::string pace(const Cluster& cluster) {
    if (sockets_ == nullptr)
      throw user_error("python", "emulate works on the CPU; give it without device='cuda'");
    return emulate_links(*sockets_, cluster);
  }

 private:
  std::unique_ptr<RendezvousStore> store_;
  std::unique_ptr<Communicator> group_;
  ProcessCommunicator* sockets_ = nullptr;  // the group, where it can be paced
  at::Device device_ = at::kCPU;
};

class LocalWorker {
 public:
  // `speed` of this worker where a slower device is emulated; 0: none.
  LocalWorker(std::shared_ptr<Plan> plan, std::shared_ptr<WorkerGroup> group, uint64_t seed,
              double speed)
      : plan_(std::move(plan)), group_(std::move(group)) {
    const auto rank = static_cast<size_t>((*group_)->rank());
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
    worker_ = make_worker(*plan_, **group_, options);
    const Graph& graph = *plan_->graph;
    for (size_t i = 0; i < graph.inputs.size(); ++i) inputs_[graph.inputs[i].name] = i;
    for (size_t i = 0; i < worker_->parameters().size(); ++i)
      parameters_[graph.parameters[worker_->parameters()[i]].name] = i;
    for (size_t i = 0; i < worker_->buffers().size(); ++i)
      buffers_[graph.buffers[worker_->buffers()[i]].name] = i;
    const ValueId loss = graph.loss;
    if (loss.valid()) loss_type_ = to_torch(graph.spec(loss).dtype);
    published_.resize(buffers_.size());
  }

  // Of parameters and buffers that this worker holds a piece of, and of inputs.
  bool holds(const std::string& kind, const std::string& name) const {
    return table(kind).count(name) > 0;
  }
  at::Tensor piece(const std::string& kind, const std::string& name,
                   const at::Tensor& whole) const {
    const size_t i = find(kind, name);
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
    return to_string(worker_->input_placement(find("input", name)));
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
  at::Tensor published(const std::string& buffer) const {
    return published_[find("buffer", buffer)];
  }

  // All workers' rows of a tensor, of which each has counts[rank].
  at::Tensor gather_rows(const at::Tensor& local, const std::vector<int64_t>& counts) {
    std::vector<at::Tensor> pieces;
    for (int r = 0; r < (*group_)->size(); ++r) {
      std::vector<int64_t> shape = local.sizes().vec();
      shape.at(0) = counts.at(static_cast<size_t>(r));
      pieces.push_back(r == (*group_)->rank() ? local.contiguous()
                                              : at::empty(shape, local.options()));
    }
    MOTLEY_CHECK(local.size(0) == counts[static_cast<size_t>((*group_)->rank())]);
    (*group_)->all_gather(pieces);
    return at::cat(pieces);
  }

  // The inputs' pieces in the graph's order; the loss and the gradients of the parameters that this
  // worker holds, undefined where there is none.
  std::pair<at::Tensor, std::vector<at::Tensor>> step(int64_t number,
                                                      const std::vector<at::Tensor>& inputs) {
    Worker::Result result = worker_->step(number, inputs);
    return {at::scalar_tensor(result.loss, loss_type_), std::move(result.gradients)};
  }
  // Around work that is done outside of the step, where a slower device is emulated.
  void before(bool compute) {
    if (padding_) padding_->before(compute);
  }
  void after(bool compute) {
    if (padding_) padding_->after(compute, this);  // the optimizer's step
  }

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
  std::optional<Padding> padding_;
  std::unique_ptr<Worker> worker_;
  Table parameters_, buffers_, inputs_;  // name: index of the worker's, of the plan's for inputs
  at::ScalarType loss_type_ = at::kFloat;
  std::vector<at::Tensor> published_;  // [buffer of the worker]
};

}  // namespace

void bind_worker(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<WorkerGroup, std::shared_ptr<WorkerGroup>>(m, "Group")
      .def(py::init<bool, bool>(), unlocked())
      .def_property_readonly("rank", [](WorkerGroup& g) { return g->rank(); })
      .def_property_readonly("size", [](WorkerGroup& g) { return g->size(); })
      .def_property_readonly("device", [](WorkerGroup& g) { return g.device().str(); })
      .def_property_readonly("sockets", &WorkerGroup::sockets)
      .def(
          "all_reduce", [](WorkerGroup& g, at::Tensor tensor) { g->all_reduce(tensor); },
          unlocked())
      .def(
          "barrier", [](WorkerGroup& g) { g->barrier(); }, unlocked())
      .def(
          "pace", [](WorkerGroup& g, const Cluster& cluster) { return g.pace(cluster); },
          unlocked());

  py::class_<LocalWorker>(m, "Worker")
      .def(py::init<std::shared_ptr<Plan>, std::shared_ptr<WorkerGroup>, uint64_t, double>(),
           unlocked())
      .def("holds", &LocalWorker::holds)
      .def("piece", &LocalWorker::piece)
      .def("part", &LocalWorker::part)
      .def("input_placement", &LocalWorker::input_placement)
      .def("counts", &LocalWorker::counts)
      .def("set", &LocalWorker::set)
      .def("publish", &LocalWorker::publish)
      .def("published", &LocalWorker::published)
      .def("gather_rows", &LocalWorker::gather_rows, unlocked())
      .def("step", &LocalWorker::step, unlocked())
      .def("before", &LocalWorker::before, unlocked())
      .def("after", &LocalWorker::after, unlocked());

  // Whether this build talks over NCCL, and to how many devices of this machine.
  m.def("cuda_devices", [] { return has_nccl() ? cuda_devices() : 0; });
}

}  // namespace motley::python
