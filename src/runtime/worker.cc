#include "runtime/worker.h"

#include <numeric>

#include "comm/reducing.h"
#include "core/error.h"
#include "runtime/pipeline_worker.h"

namespace motley {

namespace {

const std::vector<ReductionProgram> kNone;

// One SPMD program on all devices.
class SpmdWorker final : public Worker {
 public:
  SpmdWorker(const Plan& plan, Communicator& group, const ExecutorOptions& options)
      : graph_(*plan.graph),
        theory_(*plan.theory),
        device_(options.device),
        rank_(group.rank()),
        shares_(plan.ratios),
        // NCCL has reductions of its own.
        group_(reducing(group, device_.is_cuda() ? kNone : plan.reductions)),
        executor_(*plan.theory, plan.program, shares_, *group_, options),
        parameters_(graph_.parameters.size()),
        buffers_(graph_.buffers.size()) {
    std::iota(parameters_.begin(), parameters_.end(), 0);
    std::iota(buffers_.begin(), buffers_.end(), 0);
  }

  const std::vector<int>& parameters() const override { return parameters_; }
  const std::vector<int>& buffers() const override { return buffers_; }
  at::Tensor parameter_piece(size_t i, const at::Tensor& whole) const override {
    return piece(graph_.parameters[i].value, whole);
  }
  at::Tensor buffer_piece(size_t i, const at::Tensor& whole) const override {
    return piece(graph_.buffers[i].value, whole);
  }
  void set_parameter(size_t i, at::Tensor local) override {
    executor_.set(graph_.parameters[i].value, local.detach());
  }
  void set_buffer(size_t i, at::Tensor local) override {
    executor_.set(graph_.buffers[i].value, std::move(local));
  }
  at::Tensor buffer(size_t i) const override { return executor_.get(graph_.buffers[i].value); }

  Placement input_placement(size_t i) const override {
    return executor_.stored(graph_.inputs[i].value);
  }
  at::Tensor input_piece(size_t i, const at::Tensor& whole) const override {
    return piece(graph_.inputs[i].value, whole);
  }
  Result step(int64_t number, const std::vector<at::Tensor>& inputs) override {
    MOTLEY_CHECK(inputs.size() == graph_.inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i)
      executor_.set(graph_.inputs[i].value, inputs[i].to(device_));
    Executor::Result result = executor_.step(number);
    for (const Input& input : graph_.inputs) executor_.unset(input.value);
    return {result.loss.item<double>(), std::move(result.gradients)};
  }

  Part parameter_part(size_t i) const override { return part(graph_.parameters[i].value); }
  Part buffer_part(size_t i) const override { return part(graph_.buffers[i].value); }

  bool counts(size_t i) const override {
    return rank_ == 0 || executor_.stored(graph_.parameters[i].value).is_shard();
  }
  at::Tensor whole_parameter(int parameter, const at::Tensor& local, bool) override {
    return whole(graph_.parameters[parameter].value, local);
  }
  at::Tensor whole_buffer(int buffer, const at::Tensor& local, bool) override {
    return whole(graph_.buffers[buffer].value, local);
  }

 private:
  at::Tensor piece(ValueId value, const at::Tensor& whole) const {
    return executor_.piece(value, executor_.stored(value), whole);
  }
  at::Tensor whole(ValueId value, const at::Tensor& local) {
    return executor_.gather(value, executor_.stored(value), local);
  }
  Part part(ValueId value) const {
    return part_of(layout_of(theory_, value, executor_.stored(value), shares_), rank_, 0);
  }

  const Graph& graph_;
  const Theory& theory_;
  at::Device device_;
  int rank_;
  Shares shares_;
  std::unique_ptr<Communicator> group_;
  Executor executor_;
  std::vector<int> parameters_, buffers_;
};

}  // namespace

std::vector<at::Tensor> input_pieces(const Plan& plan, const Worker& worker,
                                     const TensorMap& batch) {
  std::vector<at::Tensor> pieces;
  for (size_t i = 0; i < plan.graph->inputs.size(); ++i)
    pieces.push_back(worker.input_piece(i, batch.at(plan.graph->inputs[i].name)));
  return pieces;
}

std::unique_ptr<Worker> make_worker(const Plan& plan, Communicator& group,
                                    const ExecutorOptions& options) {
  if (plan.pipeline) return make_pipeline_worker(plan, group, options);
  return std::make_unique<SpmdWorker>(plan, group, options);
}

}  // namespace motley
