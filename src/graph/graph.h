// The tensor-program IR: one training step of one device as a list of ATen calls.
//
// A Graph is what capture records and every later module reads: forward, loss and backward in
// execution order, functional (no in-place ops; a value is written once), with the roles of its
// values: parameters and their gradients, buffers and their updates, inputs, the loss, and outputs
// (of a part of a step: what other parts read, stage.h). Ops keep their ATen names ("aten::addmm",
// "aten::add.Tensor") and argument order, so that the executor can call them boxed, by name. Four
// sources carry no ATen op:
//
//   motley::parameter("name")   motley::buffer("name")   motley::input("name")
//   motley::constant([...numbers...])
//
// and one node is between segments of a model (segment.h): motley::boundary(%7, 0, 1).
//
// Text form (to_text / parse_graph round-trip exactly), one node per line:
//
//   model gpt:layers=2
//   %0 = motley::input("tokens") : i64[8,64]
//   %9, %10, %11 = aten::native_layer_norm(%8, [64], %1, %2, 1e-05) : f32[8,64,64], f32[8,64,1],
//   f32[8,64,1]
//   %40 = aten::mul.Tensor(%39, 0.5) : f32[8,64] backward
//   loss %38
//   gradient "wte.weight" %77
//   gradient "head.weight" %78 custom
//   frozen "wpe.weight"
//   update "bn1.running_mean" %90
//   output %12
//
// Arguments: %7 a tensor, [%1, none, %2] a tensor list, numbers (a real always has a point or an
// exponent), true, false, "text", none, [1, 2] integers, f32 a dtype.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "core/id.h"
#include "graph/op_name.h"

namespace motley {

enum class DType : uint8_t { f64, f32, f16, bf16, i64, i32, i16, i8, u8, b8 };
int64_t size_of(DType dtype);        // bytes of one element
const char* to_string(DType dtype);  // "f32"
bool parse_dtype(const std::string& text, DType* dtype);
bool is_float(DType dtype);
bool is_half(DType dtype);  // a 16-bit float

using Shape = std::vector<int64_t>;

struct TensorSpec {
  DType dtype = DType::f32;
  Shape shape;
  int64_t numel() const;
  int64_t bytes() const { return numel() * size_of(dtype); }
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};
std::string to_string(const TensorSpec& spec);  // "f32[8,64]"

using NodeId = Id<struct NodeTag>;

// One argument of an ATen call, in schema order. An invalid ValueId inside a list is an undefined
// tensor. A number where the schema has a tensor is a 0-dim tensor that takes part in type
// promotion as a Python number does.
using Arg = std::variant<std::monostate, ValueId, std::vector<ValueId>, int64_t, double, bool,
                         std::string, std::vector<int64_t>, std::vector<double>, DType>;

struct Value {
  TensorSpec spec;
  NodeId producer;
  int output = 0;  // index among the producer's outputs
};

enum class Phase : uint8_t { forward, backward };

struct Node {
  OpName op;
  std::vector<Arg> args;
  std::vector<ValueId> outputs;  // invalid: an output that is not a tensor or is undefined
  Phase phase = Phase::forward;
};

struct Parameter {
  std::string name;
  ValueId value;
  ValueId gradient;     // invalid: frozen, or the loss does not depend on it
  bool frozen = false;  // not trained
  // The gradient is not the derivative of the forward pass: hooks or functions with a backward pass
  // of their own changed it.
  bool custom = false;
};

struct Buffer {
  std::string name;
  ValueId value;
  ValueId update;  // invalid: the step does not change it
};

struct Input {
  std::string name;
  ValueId value;
};

class Graph {
 public:
  std::string model;  // what it was captured from, "gpt:layers=2"; free text
  std::vector<Node> nodes;
  std::vector<Value> values;
  std::vector<Parameter> parameters;
  std::vector<Buffer> buffers;
  std::vector<Input> inputs;
  ValueId loss;                  // a scalar
  std::vector<ValueId> outputs;  // needed whole or cut, but not as partial sums

  // Appends a node with outputs of the given specs; an empty optional position is expressed by
  // spec.shape = {-1}.
  NodeId add(OpName op, std::vector<Arg> args, const std::vector<TensorSpec>& specs,
             Phase phase = Phase::forward);
  // Sources, with their roles entered.
  ValueId add_parameter(const std::string& name, const TensorSpec& spec);
  ValueId add_buffer(const std::string& name, const TensorSpec& spec);
  ValueId add_input(const std::string& name, const TensorSpec& spec);
  ValueId add_constant(const TensorSpec& spec, std::vector<double> data);

  const Node& node(NodeId id) const { return nodes[id.index]; }
  const Value& value(ValueId id) const { return values[id.index]; }
  const TensorSpec& spec(ValueId id) const { return values[id.index].spec; }

  // Tensor arguments of a node in order, lists flattened, undefined ones left out.
  ValueList inputs_of(const Node& node) const;
  // For every value the nodes that read it, each once, in order.
  std::vector<std::vector<NodeId>> consumers() const;

  int64_t parameter_bytes() const;
};

// motley::parameter, buffer, input or constant
inline bool is_source(const Node& node) { return node.op.is_source(); }

// Whether graphs are equal but for the names of models, parameters, buffers and inputs.
bool same_but_for_names(const Graph& a, const Graph& b);

std::string to_text(const Graph& graph);
// Throws UserError naming `name`, the line and what is wrong with it.
Graph parse_graph(const std::string& text, const std::string& name);

// What is wrong with a graph: values used before they are made, roles that do not fit, unknown ids;
// empty if sound.
std::vector<std::string> verify(const Graph& graph);

// Removes nodes whose outputs nobody needs (the loss, gradients, buffer updates and outputs are
// needed) and renumbers densely. Sources that are parameters, buffers and inputs stay.
void remove_dead(Graph* graph);

// Values that the forward pass makes and the backward pass reads: they live across the loss.
std::vector<ValueId> saved_activations(const Graph& graph);

// A 64-bit hash of the text form: the identity a plan records of the graph it was made for.
uint64_t fingerprint(const Graph& graph);

}  // namespace motley
