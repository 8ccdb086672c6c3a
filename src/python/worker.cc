// One worker of a distributed step: its group, its pieces, its executor.
#include <ATen/ATen.h>

#include <optional>

#include "core/error.h"
#include "python/bindings.h"
#include "torch/communicator.h"
#include "torch/emulate.h"
#include "torch/executor.h"
#include "torch/gloo.h"
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
      std::unique_ptr<ProcessCommunicator> processes = join_group(*where);
      sockets_ = processes.get();
      group_ = std::move(processes);
    }
  }
  Communicator& operator*() { return *group_; }
  Communicator* operator->() { return group_.get(); }
  at::Device device() const { return device_; }
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
    if (plan_->pipeline)
      throw user_error(
          "distribute",
          "the plan is a pipeline; run it with motley run, or plan with motley.plan()");
    if (speed > 0) padding_.emplace(speed);
    ExecutorOptions options;
    options.seed = seed;
    options.device = group_->device();
    if (padding_) {
      options.before = [this](bool compute) { padding_->before(compute); };
      options.after = [this](bool compute) { padding_->after(compute); };
    }
    executor_ = std::make_unique<Executor>(*plan_->theory, plan_->program, Shares(plan_->ratios),
                                           **group_, options);
    const Graph& graph = *plan_->graph;
    for (const Parameter& p : graph.parameters) ids_["parameter"][p.name] = p.value;
    for (const Buffer& b : graph.buffers) ids_["buffer"][b.name] = b.value;
    for (const Input& i : graph.inputs) ids_["input"][i.name] = i.value;
  }

  at::Tensor piece(const std::string& kind, const std::string& name, const at::Tensor& whole) {
    const ValueId id = find(kind, name);
    return executor_->piece(id, executor_->stored(id), whole.detach());
  }
  Shape local_shape(const std::string& kind, const std::string& name) {
    const ValueId id = find(kind, name);
    return executor_->local_shape(id, executor_->stored(id));
  }
  std::string placement(const std::string& kind, const std::string& name) {
    return to_string(executor_->stored(find(kind, name)));
  }
  void set(const std::string& kind, const std::string& name, const at::Tensor& local) {
    executor_->set(find(kind, name), local.detach());
  }
  at::Tensor get(const std::string& kind, const std::string& name) {
    return executor_->get(find(kind, name));
  }
  at::Tensor gather(const std::string& kind, const std::string& name, const at::Tensor& local) {
    const ValueId id = find(kind, name);
    return executor_->gather(id, executor_->stored(id), local.detach());
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

  // The inputs' pieces in the graph's order; the loss and the gradients' pieces, undefined where
  // there is none.
  std::pair<at::Tensor, std::vector<at::Tensor>> step(int64_t number,
                                                      const std::vector<at::Tensor>& inputs) {
    const Graph& graph = *plan_->graph;
    MOTLEY_CHECK(inputs.size() == graph.inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) executor_->set(graph.inputs[i].value, inputs[i]);
    Executor::Result result = executor_->step(number);
    return {result.loss, std::move(result.gradients)};
  }
  // Around work that is done outside of the step, where a slower device is emulated.
  void before(bool compute) {
    if (padding_) padding_->before(compute);
  }
  void after(bool compute) {
    if (padding_) padding_->after(compute);
  }

 private:
  ValueId find(const std::string& kind, const std::string& name) const {
    const auto& names = ids_.at(kind);
    const auto it = names.find(name);
    if (it == names.end()) throw user_error("python", "the plan has no {} '{}'", kind, name);
    return it->second;
  }

  std::shared_ptr<Plan> plan_;
  std::shared_ptr<WorkerGroup> group_;
  std::optional<Padding> padding_;
  std::unique_ptr<Executor> executor_;
  std::map<std::string, std::map<std::string, ValueId>> ids_;
};

}  // namespace

void bind_worker(py::module_& m) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<WorkerGroup, std::shared_ptr<WorkerGroup>>(m, "Group")
      .def(py::init<bool, bool>(), unlocked())
      .def_property_readonly("rank", [](WorkerGroup& g) { return g->rank(); })
      .def_property_readonly("size", [](WorkerGroup& g) { return g->size(); })
      .def_property_readonly("device", [](WorkerGroup& g) { return g.device().str(); })
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
      .def("piece", &LocalWorker::piece)
      .def("local_shape", &LocalWorker::local_shape)
      .def("placement", &LocalWorker::placement)
      .def("set", &LocalWorker::set)
      .def("get", &LocalWorker::get)
      .def("gather", &LocalWorker::gather, unlocked())
      .def("gather_rows", &LocalWorker::gather_rows, unlocked())
      .def("step", &LocalWorker::step, unlocked())
      .def("before", &LocalWorker::before, unlocked())
      .def("after", &LocalWorker::after, unlocked());

  // Whether this build talks over NCCL, and to how many devices of this machine.
  m.def("cuda_devices", [] { return has_nccl() ? cuda_devices() : 0; });
}

}  // namespace motley::python
