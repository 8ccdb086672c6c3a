#include "capture/capture.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/library.h>

#include <chrono>
#include <map>
#include <new>
#include <set>
#include <stdexcept>
#include <typeinfo>

#include "capture/autocast.h"
#include "capture/recorder.h"
#include "core/error.h"
#include "graph/op.h"
#include "interpret/dispatch.h"
#include "interpret/torch_version.h"
#include "zoo/module.h"

namespace motley {
namespace {

using recording::Recorder;
using torch::jit::Stack;

thread_local Recorder* current = nullptr;
thread_local int operators = 0;  // that are being recorded, one inside another

void fallback(const c10::OperatorHandle& handle, Stack* stack) {
  MOTLEY_CHECK(current != nullptr);
  struct Inside {
    Inside() { operators++; }
    ~Inside() { operators--; }
  } inside;
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::Fake);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  current->handle(handle, stack);
}

void register_fallback() {
  // Never freed: the dispatcher outlives it.
  static const torch::Library* library = [] {
    auto* l =
        new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::Fake, __FILE__, __LINE__);
    l->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    if constexpr (!kFollowsCustomOperators) {
      static torch::Library autograd(torch::Library::IMPL, "_", c10::DispatchKey::AutogradMeta,
                                     __FILE__, __LINE__);
      autograd.fallback(torch::CppFunction::makeFallthrough());
    }
    return l;
  }();
  MOTLEY_CHECK(library != nullptr);
}

class Recording {
 public:
  explicit Recording(Recorder* recorder) : include_(c10::DispatchKey::Fake) {
    MOTLEY_CHECK(current == nullptr);
    register_fallback();
    current = recorder;
  }
  ~Recording() { current = nullptr; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
};

using Clock = std::chrono::steady_clock;

// Whether a function of the autograd graph computes something else than its derivative: it is the
// user's own, or has hooks.
bool is_changed(torch::autograd::Node& function) {
  if (has_hooks(function)) return true;
  const std::string type = c10::demangle(typeid(function).name());
  return type.find("PyNode") != std::string::npos || type.find("CppNode") != std::string::npos;
}

// The leaves whose gradients come through such a function.
std::set<const c10::TensorImpl*> changed_by_hand(const at::Tensor& loss) {
  using Function = torch::autograd::Node;
  std::set<const c10::TensorImpl*> leaves;
  std::map<Function*, bool> seen;  // whether by way of such a function
  std::vector<std::pair<Function*, bool>> next = {{loss.grad_fn().get(), false}};
  while (!next.empty()) {
    auto [function, changed] = next.back();
    next.pop_back();
    if (function == nullptr) continue;
    changed = changed || is_changed(*function);
    const auto [it, fresh] = seen.try_emplace(function, changed);
    if (!fresh && (it->second || !changed)) continue;
    it->second = changed;
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(function); leaf && changed)
      leaves.insert(leaf->variable.unsafeGetTensorImpl());
    for (const torch::autograd::Edge& edge : function->next_edges())
      next.emplace_back(edge.function.get(), changed);
  }
  return leaves;
}

// Takes out nodes that stop gradients where none would flow: on the way to integers, or to what the
// loss does not depend on.
void leave_out_detached(Graph* graph) {
  std::vector<bool> matters(graph->values.size());
  if (graph->loss.valid()) matters[graph->loss.index] = true;
  for (size_t n = graph->nodes.size(); n-- > 0;) {
    const Node& node = graph->nodes[n];
    bool any = false;
    for (ValueId v : node.outputs)
      any = any || (v.valid() && matters[v.index] && is_float(graph->spec(v).dtype));
    if (any)
      for (ValueId v : graph->inputs_of(node)) matters[v.index] = true;
  }
  std::vector<ValueId> stands_for(graph->values.size());
  for (size_t v = 0; v < graph->values.size(); ++v) stands_for[v] = ValueId(v);
  const auto replace = [&](ValueId& v) {
    if (v.valid()) v = stands_for[v.index];
  };
  for (Node& node : graph->nodes) {
    for (Arg& arg : node.args) {
      if (auto* v = std::get_if<ValueId>(&arg)) replace(*v);
      if (auto* list = std::get_if<std::vector<ValueId>>(&arg))
        for (ValueId& v : *list) replace(v);
    }
    if (node.op == "aten::detach" && !matters[node.outputs[0].index])
      stands_for[node.outputs[0].index] = std::get<ValueId>(node.args[0]);
  }
  replace(graph->loss);
  for (Parameter& p : graph->parameters) replace(p.gradient);
  for (Buffer& b : graph->buffers) replace(b.update);
}

constexpr const char* kSameTwice[] = {"aten::clamp", "aten::clamp_min", "aten::clamp_max",
                                      "aten::relu",  "aten::abs",       "aten::nan_to_num"};

// Takes out of the graph what changes a parameter, now `changed`, before anything reads it. False:
// it is read before, or is changed otherwise.
bool take_out(Graph* graph, const Parameter& parameter, ValueId changed,
              std::vector<Preparation>* prepared) {
  std::vector<int> readers(graph->values.size(), 0);
  for (const Node& node : graph->nodes)
    for (ValueId v : graph->inputs_of(node)) ++readers[v.index];
  std::vector<Preparation> found;
  for (ValueId at = changed; at != parameter.value;) {
    const NodeId producer = graph->values[at.index].producer;
    const Node& node = graph->nodes[producer.index];
    if (std::find(std::begin(kSameTwice), std::end(kSameTwice), node.op) == std::end(kSameTwice))
      return false;
    at = std::get<ValueId>(node.args[0]);
    Preparation one{parameter.name, node.op, {node.args.begin() + 1, node.args.end()}};
    for (const Arg& arg : one.args)
      if (std::holds_alternative<ValueId>(arg)) return false;
    if (readers[at.index] != 1) return false;
    found.insert(found.begin(), std::move(one));
  }
  const auto replace = [&](ValueId& v) {
    if (v == changed) v = parameter.value;
  };
  for (Node& node : graph->nodes)
    for (Arg& arg : node.args) {
      if (auto* v = std::get_if<ValueId>(&arg)) replace(*v);
      if (auto* list = std::get_if<std::vector<ValueId>>(&arg))
        for (ValueId& v : *list) replace(v);
    }
  replace(graph->loss);
  for (Parameter& p : graph->parameters) replace(p.gradient);
  for (Buffer& b : graph->buffers) replace(b.update);
  prepared->insert(prepared->end(), found.begin(), found.end());
  return true;
}

// Records a step under a Recording of `recorder`, which has recorded nothing yet.
Capture record_step(Recorder& recorder, const MetaStep& step, Clock::time_point start,
                    const LookAtParameters& look = {}) {
  Graph& graph = recorder.result.graph;
  const std::string& name = step.name;
  graph.model = name;
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  for (const auto& [key, tensor] : step.parameters) {
    if (recorder.known(tensor)) {
      for (size_t i = 0; i < parameters.size(); i++)
        if (parameters[i].is_alias_of(tensor)) recorder.result.tied.push_back({key, names[i]});
      continue;
    }
    if (recorder.stores(tensor))
      throw user_error("capture", "{}: parameter {} shares memory with another but not its shape",
                       name, key);
    recorder.define(tensor, graph.add_parameter(key, motley::spec_of(tensor)));
    graph.parameters.back().frozen = !tensor.requires_grad();
    if (tensor.requires_grad()) recorder.train(graph.parameters.back().value);
    parameters.push_back(tensor);
    names.push_back(key);
  }
  if (look) look(graph);
  for (const auto& [key, tensor] : step.buffers)
    recorder.define(tensor, graph.add_buffer(key, motley::spec_of(tensor)));
  for (const auto& [key, tensor] : step.inputs)
    recorder.define(tensor, graph.add_input(key, motley::spec_of(tensor)));

  for (const auto& [key, tensor] : step.owners) recorder.own(key, tensor);
  recorder.forget_error = step.forget_error;

  recorder.recording = true;
  std::vector<std::pair<size_t, at::Tensor>> replaced;
  const at::Tensor loss = step.loss(&replaced);
  if (!loss.defined() || loss.dim() != 0 || !loss.is_floating_point() || !loss.requires_grad())
    throw user_error("capture",
                     "{}: the loss is {}; it must be a real number that depends on a "
                     "parameter",
                     name, loss.defined() ? to_string(motley::spec_of(loss)) : "undefined");
  graph.loss = recorder.value_of(loss, "the loss");
  recorder.phase = Phase::backward;
  std::vector<at::Tensor> trained;
  std::vector<size_t> positions;
  for (size_t i = 0; i < parameters.size(); i++) {
    if (!parameters[i].requires_grad()) continue;
    trained.push_back(parameters[i]);
    positions.push_back(i);
  }
  const std::set<const c10::TensorImpl*> custom = changed_by_hand(loss);
  // As outside of `with torch.autocast`, where the forward pass ends.
  const auto plain = without_autocast();
  std::vector<at::Tensor> gradients =
      torch::autograd::grad({loss}, trained, {}, /*retain_graph=*/false, /*create_graph=*/false,
                            /*allow_unused=*/true);
  for (size_t i = 0; i < gradients.size(); i++) {
    if (!gradients[i].defined()) continue;
    const at::Tensor derivative = gradients[i];
    if (step.gradient) gradients[i] = step.gradient(positions[i], derivative);
    Parameter& parameter = graph.parameters[positions[i]];
    parameter.gradient = recorder.value_of(gradients[i], "the gradient");
    parameter.custom =
        !gradients[i].is_same(derivative) || custom.count(trained[i].unsafeGetTensorImpl()) > 0;
  }
  for (size_t i = 0; i < step.buffers.size(); i++)
    if (recorder.changed(step.buffers[i].second))
      graph.buffers[i].update = recorder.value_of(step.buffers[i].second, "the update");
  for (const auto& [i, tensor] : replaced) {
    const ValueId value = recorder.value_of(tensor, "the update");
    if (graph.spec(value) != graph.spec(graph.buffers[i].value))
      throw user_error("capture",
                       "{}: the step makes buffer {} {} of {}; keep its shape and type, or run "
                       "the model once before",
                       name, graph.buffers[i].name, to_string(graph.spec(value)),
                       to_string(graph.spec(graph.buffers[i].value)));
    graph.buffers[i].update = value;
  }
  for (size_t i = 0; i < parameters.size(); i++)
    if (recorder.changed(parameters[i]) &&
        !take_out(&graph, graph.parameters[i], recorder.value_of(parameters[i], "the change"),
                  &recorder.result.prepared))
      throw user_error("capture",
                       "{}: the step changes parameter {} in place; change it between steps, or "
                       "make it a buffer",
                       name, names[i]);
  leave_out_detached(&graph);
  remove_dead(&graph);
  recorder.result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return std::move(recorder.result);
}

}  // namespace

std::vector<std::string> whole_ops(const Graph& graph) {
  std::vector<std::string> ops;
  for (const Node& node : graph.nodes) {
    if (is_source(node) || std::count(ops.begin(), ops.end(), node.op) > 0) continue;
    const OpDef* op = find_op(node.op);
    if (op == nullptr || (op->signature == nullptr && op->extra == nullptr)) ops.push_back(node.op);
  }
  return ops;
}

Capture capture(const std::string& model, int64_t batch, DType dtype,
                const LookAtParameters& look) {
  const ModelSpec spec = parse_model(model);
  const auto refused = [&](const std::exception& e) {
    const std::string why = e.what();  // of libtorch: with the frames of its stack
    return user_error("capture", "{} at batch {} cannot be run: {}; give other sizes", spec.text(),
                      batch, why.substr(0, why.find('\n')));
  };
  try {
    return capture(
        spec.text(), [&] { return build_model(spec); }, batch, dtype, look);
  } catch (const c10::Error& e) {
    throw refused(e);
  } catch (const std::bad_alloc& e) {
    throw refused(e);
  } catch (const std::length_error& e) {
    throw refused(e);
  }
}

Capture capture(const std::string& name, const std::function<std::shared_ptr<TrainModule>()>& build,
                int64_t batch, DType dtype, const LookAtParameters& look) {
  const auto start = Clock::now();
  if (batch < 1) throw user_error("capture", "the batch is {}; give a positive number", batch);
  Recorder recorder;
  Recording recording(&recorder);
  DefaultDType default_type(dtype);

  const std::shared_ptr<TrainModule> module = build();
  MetaStep step;
  step.name = name;
  for (const auto& item : module->named_parameters())
    step.parameters.push_back({item.key(), item.value()});
  for (const auto& item : module->named_buffers())
    step.buffers.push_back({item.key(), item.value()});
  std::vector<at::Tensor> inputs;
  for (const InputSpec& input : module->inputs(batch)) {
    inputs.push_back(at::empty(input.spec.shape,
                               at::TensorOptions(at::kMeta).dtype(to_torch(input.spec.dtype))));
    step.inputs.push_back({input.name, inputs.back()});
  }
  step.loss = [&](std::vector<std::pair<size_t, at::Tensor>>*) { return module->loss(inputs); };
  Capture captured = record_step(recorder, step, start, look);
  MOTLEY_CHECK(captured.prepared.empty(), "nobody would do it");
  return captured;
}

bool between_operators() { return current != nullptr && operators == 0; }

bool is_fixed(const at::Tensor& tensor) {
  MOTLEY_CHECK(current != nullptr);
  return current->fixed(tensor);
}

std::vector<std::string> refused_ops() { return Recorder::refused(); }

Capture capture(const MetaStep& step) {
  const auto start = Clock::now();
  Recorder recorder;
  Recording recording(&recorder);
  const FollowAutocast follow(step.owners.empty() ? at::kMeta
                                                  : step.owners[0].second.device().type());
  return record_step(recorder, step, start);
}

}  // namespace motley
