// The op table: everything motley knows of an ATen operator, in one place per operator
// (graph/ops/<family>.cc).
//
// Sharding knowledge is *factors* (the idea of Shardy's sharding rules): every dimension of every
// tensor of the call is a list of index labels, outermost first, and tensors that share a label are
// indexed together. From
//
//     addmm(bias[o], x[b i], w[i o]) -> [b o],   i summed
//
// follow all Hoare triples of Figure 9 of HAP and more: cut b, cut o, cut i (the result is
// partial), all replicated. `linear` adds the triples over partial sums: if every operand of the
// set is partial and the others are replicated, so are the results. What neither can say is an
// ExtraRule with a name that the executor has a kernel for.
//
// An operator that is not in the table is legal: it runs replicated.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/collective.h"
#include "graph/graph.h"
#include "graph/placement.h"

namespace motley {

// What cutting a label means for results that do not carry it.
enum class LabelKind : uint8_t {
  parallel,   // every result carries it (or ignores it)
  reduction,  // results without it become partial sums
  blocked,    // never cut
};

struct Label {
  int64_t size = 1;
  LabelKind kind = LabelKind::parallel;
  uint32_t ignored_by = 0;  // bit set of results that do not depend on the operands that carry it:
                            // they stay replicated
};

// dims[d] lists the labels of dimension d, outermost first; an empty list: size 1 or broadcast.
struct TensorLabels {
  std::vector<std::vector<int>> dims;
};

struct Signature {
  std::vector<Label> labels;
  std::vector<TensorLabels> operands;    // one per tensor of Graph::inputs_of(node)
  std::vector<TensorLabels> results;     // one per output; an undefined output has no dims
  std::vector<std::vector<int>> linear;  // sets of operand positions
  std::vector<int> added;  // operands that are added to the sum over reduction labels (a bias):
                           // when such a label is cut they must be partial too
};

// A collective inside an operator.
struct InnerCollective {
  Collective kind = Collective::all_reduce;  // or exchange, of a boundary (segment.h)
  int64_t bytes = 0;
  bool half = false;  // 16-bit numbers
};

// A Hoare triple that factors cannot express. `name` selects a kernel of the executor, e.g.
// "embedding.vocab".
struct ExtraRule {
  std::string name;
  std::vector<Placement> operands;
  std::vector<Placement> results;
  std::vector<InnerCollective> collectives;
};

// Context of a local call: the global node, and what this device holds.
struct LocalCall {
  const Graph& graph;
  const Node& node;
  const std::vector<Shape>& operand_shapes;  // local, one per tensor operand
  const std::vector<Shape>& result_shapes;   // local, one per output
};

struct OpDef {
  const char* name;  // "aten::addmm"

  // Factor labels of one call; nullptr: the op only runs replicated.
  Signature (*signature)(const Graph&, const Node&) = nullptr;
  // Named extra rules of one call.
  std::vector<ExtraRule> (*extra)(const Graph&, const Node&) = nullptr;
  // Floating-point operations of the whole call; nullptr: one per element of the largest tensor.
  double (*flops)(const Graph&, const Node&) = nullptr;
  // True for ops that move no data (view, transpose, expand, detach).
  bool alias = false;
  // Position of an integer-list argument that is the shape of result 0 and shrinks with it; -1:
  // none.
  int size_arg = -1;
  // Rewrites arguments for a device's shapes where size_arg is not enough.
  void (*localize)(const LocalCall&, std::vector<Arg>*) = nullptr;
  // Shapes of the outputs, for ops without a C++ Meta kernel; nullptr: the Meta kernel knows.
  std::vector<TensorSpec> (*shape)(const Graph&, const Node&) = nullptr;
  // Reads a seeded random stream; the executor draws it per global element, so that it does not
  // depend on sharding.
  bool random = false;
  // Results but the first are for its backward pass alone; some devices make them of other shapes.
  bool scratch = false;
};

// The entry for an op name, or nullptr.
inline const OpDef* find_op(const OpName& name) { return name.def(); }
// Whether result o of an op may have another shape than in the graph.
bool is_scratch(const OpName& op, size_t o);
// All entries, by name.
const std::vector<const OpDef*>& all_ops();

}  // namespace motley
