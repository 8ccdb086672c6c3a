// Capture: one training step as a Graph, by running the model once.
//
// A boxed fallback on the dispatch key Fake, which lies below autograd, sees every ATen call of the
// model's forward pass, its loss and torch::autograd::grad. Factories are redirected to the Meta
// device, so nothing is computed or allocated: a model of 40 billion parameters takes well under a
// second and its graph a few megabytes. The backward graph is PyTorch's own.
//
// The recorded program is functional. Tensors are known by their storage and geometry (offset,
// sizes, strides):
//   - a storage has a base value, and a tree of views over it, each with the op that makes it from
//   its parent;
//   - an in-place op is recorded as its functional form (add_ as add, copy_ as its source) and
//   written to the view: through
//     the inverses of the view's ops up to the base (slice_scatter for slice, t for t, ...);
//   - other views of a written storage are made again from the base when they are next read.
// Views that change nothing and copies of contiguous tensors leave no node. Where autograd does not
// follow what training changes (detach, no_grad), a node says so: gradients are the derivative of
// the forward nodes, but for those that hooks or the user's own functions changed. Strides are
// not part of the graph: as_strided is rewritten to views, slices and permutations, or refused.
//
// Where libtorch has no Meta kernel the op table's shape function is asked, and failing that the op
// is run on the CPU with other numbers, or with small sizes, from which its shape rule is read.
//
// Flags of backward passes that depend on strides (of determinants, solve) are recorded for
// contiguous operands, which is how they run.
//
// Regions of torch.autocast are followed (autocast.h): their casts are nodes.
//
// Numbers that libtorch wraps as 0-dim tensors become literals and other CPU tensors of at most
// 4096 elements constants, one for every part of memory that is read. They are not written to, and
// none shares the memory of a parameter, a buffer or an input. The running statistics of batch
// normalisation become explicit updates of buffers, computed from the saved mean and inverse
// deviation.
//
// Not captured: control flow that depends on values (item() is a UserError), sparse, quantised and
// complex tensors, changes of a parameter inside the step.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"

namespace motley {

class TrainModule;

// Operators of a graph of which the op table has no rule: every device computes all of them.
std::vector<std::string> whole_ops(const Graph& graph);

// What a step does to a parameter before it reads it: an operator that sees each element alone and
// changes nothing when it is done twice, such as `weight.data.clamp_(-1, 1)`.
struct Preparation {
  std::string parameter;
  std::string op;         // "aten::clamp"
  std::vector<Arg> args;  // after the tensor: numbers, or nothing
};

struct Capture {
  Graph graph;
  // Not in the graph, which is of the step after them: whoever runs it does them before every step,
  // in this order.
  std::vector<Preparation> prepared;
  std::vector<std::pair<std::string, std::string>>
      tied;  // another name of a parameter, and its name in the graph
  // Tensors from outside the step whose numbers became constants, as they were; held, and the same
  // memory.
  std::vector<at::Tensor> outside;
  double seconds = 0;
};

// Looks at a graph that has its parameters and nothing else yet, those that are trained without a
// gradient. What it throws ends the capture.
using LookAtParameters = std::function<void(const Graph&)>;

// Captures a zoo model ("gpt:layers=2") for a global batch. `look` is called before the step is run.
// Throws UserError as parse_model does, or if the step cannot be captured.
Capture capture(const std::string& model, int64_t batch, DType dtype = DType::f32,
                const LookAtParameters& look = {});

// Captures what `build` makes. `build` runs under the Meta device: it must make the module and its
// tensors.
Capture capture(const std::string& name, const std::function<std::shared_ptr<TrainModule>()>& build,
                int64_t batch, DType dtype = DType::f32, const LookAtParameters& look = {});

// Whether this thread is in a step that is being captured, and in none of its operators.
bool between_operators();

// Whether a tensor follows from constants alone: from no parameter, buffer, input or random number
// of the step that this thread captures.
bool is_fixed(const at::Tensor& tensor);

// The operators that capture refuses, by name: they read numbers, or change how memory is read.
std::vector<std::string> refused_ops();

// A step whose tensors are on the Meta device already: what the Python package gives.
struct MetaStep {
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  std::string name;
  Named parameters;  // leaves; one that is held in two places is named once
  Named buffers, inputs;
  // The tensors for which those stand, and others whose memory the step must not read but by them.
  Named owners;
  // Forgets the error of a language other than C++ that a handled exception left behind.
  std::function<void()> forget_error;
  // Runs the forward pass and returns the loss; called once. Every [position, tensor] appended to
  // `replaced` is the new value of a buffer that the pass changes otherwise than in place.
  std::function<at::Tensor(std::vector<std::pair<size_t, at::Tensor>>* replaced)> loss;
  // May be empty. What hooks make of the gradient of a parameter, given by its position.
  std::function<at::Tensor(size_t parameter, const at::Tensor& gradient)> gradient;
};

// Throws UserError if the step cannot be captured, and what `loss` throws. A UserError that an op
// called from `loss` throws passes through the caller's code.
Capture capture(const MetaStep& step);

}  // namespace motley
