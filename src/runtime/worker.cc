#include "runtime/worker.h"

#include <numeric>

#include "comm/moment.h"
#include "comm/reducing.h"
#include "core/error.h"
#include "runtime/pipeline_worker.h"

namespace motley {

Part Worker::parameter_part_of(size_t, int) const {
  MOTLEY_CHECK(false, "a part of another worker of a pipeline");
}
Part Worker::buffer_part_of(size_t, int) const {
  MOTLEY_CHECK(false, "a part of another worker of a pipeline");
}
bool Worker::parameter_is_cut(size_t) const {
  MOTLEY_CHECK(false, "pieces of a pipeline's parameter");
}
bool Worker::buffer_is_cut(size_t) const { MOTLEY_CHECK(false, "pieces of a pipeline's buffer"); }

namespace {

const std::vector<ReductionProgram> kNone;

ExecutorOptions executing(const Plan& plan, ExecutorOptions options) {
  if (!plan.duplex) return options;
  options.asynchronous = options.overlap;
  options.duplex = plan.duplex.get();
  for (NodeId id : plan.duplex->node_of) options.random_stream.push_back(id.index);
  return options;
}

// One SPMD program on all devices. Of a batch in parts every device takes the whole, and cuts it.
class SpmdWorker final : public Worker {
 public:
  SpmdWorker(const Plan& plan, Communicator& group, const ExecutorOptions& options)
      : plan_(plan),
        graph_(plan.running().graph()),
        theory_(plan.running()),
        device_(options.device),
        rank_(group.rank()),
        shares_(plan.ratios),
        group_(reducing(group, group.has_messages() ? plan.reductions : kNone)),
        executor_(theory_, plan.program, shares_, *group_, executing(plan, options)),
        before_(options.before),
        after_(options.after),
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
    return plan_.duplex ? Placement::replicated() : executor_.stored(graph_.inputs[i].value);
  }
  at::Tensor input_piece(size_t i, const at::Tensor& whole) const override {
    return plan_.duplex ? whole : piece(graph_.inputs[i].value, whole);
  }
  Result step(int64_t number, const std::vector<at::Tensor>& inputs) override {
    MOTLEY_CHECK(inputs.size() == plan_.graph->inputs.size());
    if (plan_.duplex)
      set_parts(inputs);
    else
      for (size_t i = 0; i < inputs.size(); ++i)
        executor_.set(graph_.inputs[i].value, moved_to(inputs[i], device_));
    Executor::Result result = executor_.step(number);
    for (const Input& input : graph_.inputs) executor_.unset(input.value);
    return {std::move(result.loss), std::move(result.gradients)};
  }

  Part parameter_part(size_t i) const override { return part(graph_.parameters[i].value, rank_); }
  Part buffer_part(size_t i) const override { return part(graph_.buffers[i].value, rank_); }
  Part parameter_part_of(size_t i, int rank) const override {
    return part(graph_.parameters[i].value, rank);
  }
  Part buffer_part_of(size_t i, int rank) const override {
    return part(graph_.buffers[i].value, rank);
  }
  bool parameter_is_cut(size_t i) const override {
    return executor_.stored(graph_.parameters[i].value).is_shard();
  }
  bool buffer_is_cut(size_t i) const override {
    return executor_.stored(graph_.buffers[i].value).is_shard();
  }

  bool counts(size_t i) const override {
    return rank_ == 0 || executor_.stored(graph_.parameters[i].value).is_shard();
  }
  at::Tensor whole_parameter(int parameter, const at::Tensor& local, bool) override {
    return whole(graph_.parameters[parameter].value, local);
  }
  at::Tensor whole_buffer(int buffer, const at::Tensor& local, bool) override {
    return whole(graph_.buffers[buffer].value, local);
  }

  Communication communication() override {
    const Executor::Communication c = executor_.communication();
    return {c.seconds, c.waited};
  }

 private:
  // This device's pieces of every part of a batch.
  void set_parts(const std::vector<at::Tensor>& inputs) {
    const Duplex& duplex = *plan_.duplex;
    std::vector<at::Tensor> whole = inputs;
    if (!duplex.before.outputs.empty()) {
      if (before_) before_(true);
      Feeds feeds;
      for (const Input& i : duplex.before.inputs)
        for (size_t k = 0; k < inputs.size(); ++k)
          if (plan_.graph->inputs[k].name == i.name)
            feeds.inputs[i.name] = moved_to(inputs[k], device_);
      InterpretOptions options;
      options.device = device_;
      for (at::Tensor& made : interpret(duplex.before, feeds, options).outputs)
        whole.push_back(std::move(made));
      if (after_) after_(true, &duplex);
    }
    for (size_t i = 0; i < graph_.inputs.size(); ++i) {
      const Duplex::Rows& rows = duplex.inputs[i];
      const ValueId value = graph_.inputs[i].value;
      at::Tensor part = whole.at(duplex.input_of[i]);
      if (rows.length > 0)
        part = part.reshape({rows.cut.outer, rows.cut.size, rows.cut.inner})
                   .narrow(1, rows.begin, rows.length)
                   .reshape(graph_.spec(value).shape);
      executor_.set(value, moved_to(piece(value, part), device_));
    }
  }

  at::Tensor piece(ValueId value, const at::Tensor& whole) const {
    return executor_.piece(value, executor_.stored(value), whole);
  }
  at::Tensor whole(ValueId value, const at::Tensor& local) {
    return executor_.gather(value, executor_.stored(value), local);
  }
  Part part(ValueId value, int rank) const {
    return part_of(layout_of(theory_, value, executor_.stored(value), shares_), rank, 0);
  }

  const Plan& plan_;
  const Graph& graph_;  // of the program
  const Theory& theory_;
  at::Device device_;
  int rank_;
  Shares shares_;
  std::unique_ptr<Communicator> group_;
  Executor executor_;
  std::function<void(bool compute)> before_;  // as in ExecutorOptions
  std::function<void(bool compute, const void* instruction)> after_;
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
