// The background theory of a graph (HAP section 4.2): for every value its possible placements, for
// every node the Hoare triples { placements of the operands } op { placements of the results }.
//
// Triples are derived, not listed. First the dimensions of all values are refined into atomic
// factors until every op agrees (a view splits [3*heads*dim] into 3 x heads x dim; the product that
// made the tensor, and the weight it was made from, then know the same factors). Then each label of
// an op's signature that may be cut gives one triple per atomic factor, each `linear` set one over
// partial sums, each ExtraRule itself, and every op runs replicated.
//
// A boundary between segments keeps a value as it is; a cut one is exchanged between their shares.
//
// Cost: linear in the size of the graph; calls that look alike (same op, arguments, shapes and
// factors) share one table.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/collective.h"
#include "graph/graph.h"
#include "graph/op.h"
#include "graph/segment.h"
#include "shard/shares.h"

namespace motley {

struct Triple {
  std::vector<Placement> in;   // one per tensor of Graph::inputs_of(node)
  std::vector<Placement> out;  // one per output of the node (undefined outputs: replicated)
  int64_t cut = 0;     // size of the factor that divides the work; 0: every device does all of it
  std::string kernel;  // name of the extra rule, empty for the op itself
  std::vector<InnerCollective> collectives;
};
std::string to_string(
    const Triple& triple);  // "S(0), R -> S(0)" or "S(0), R -> P [embedding.vocab]"

class Theory {
 public:
  using Lookup = const OpDef* (*)(const OpName&);
  // `lookup` finds the entries of the op table; tests plant wrong ones.
  explicit Theory(const Graph& graph, Lookup lookup = find_op);
  // The theory of a graph that is that of `like` but for names; nothing is derived anew.
  // REQUIRES: same_but_for_names(like.graph(), graph).
  Theory(const Theory& like, const Graph& graph);

  const Graph& graph() const { return graph_; }
  // Atomic factors of every dimension of a value, outermost first; a dimension of size 1 has none.
  const std::vector<std::vector<int64_t>>& factors(ValueId value) const {
    return factors_[value.index];
  }
  // R, then P (for floating point), then every S.
  std::vector<Placement> placements(ValueId value) const;
  bool legal(ValueId value, Placement placement) const;
  const std::vector<Triple>& triples(NodeId node) const { return *triples_[node.index]; }
  // Number of the triple table of a node: equal numbers, equal tables and segments.
  int table(NodeId node) const { return table_[node.index]; }
  int tables() const { return static_cast<int>(tables_.size()); }
  // From now on nodes have only those triples that make their first output so: what a value held
  // otherwise would cost. Triples are numbered anew. Returns false, and changes nothing, if one of
  // them has none.
  bool restrict_to(const std::vector<NodeId>& nodes, Placement out);
  // Size of the factor that a placement cuts. REQUIRES: a legal shard.
  int64_t cut_size(ValueId value, Placement placement) const;
  // What a legal placement cuts; of size 0 if nothing.
  Cut cut(ValueId value, Placement placement) const {
    return placement.is_shard()
               ? Cut(factors_[value.index][placement.dim][placement.factor], segment(value))
               : Cut();
  }
  // Of the work of a node under one of its triples.
  Cut cut(NodeId node, const Triple& triple) const {
    return triple.cut > 0 ? Cut(triple.cut, segment(node)) : Cut();
  }
  // Of the graph (shard/program.h).
  const std::vector<bool>& pure_gradients() const { return pure_gradients_; }
  int segments() const { return segments_.count; }
  int segment(ValueId value) const { return segments_.of_value[value.index]; }
  int segment(NodeId node) const { return segments_.of_node[node.index]; }
  // Shape of the piece of a value that a device holds.
  Shape local_shape(ValueId value, Placement placement, const Shares& shares, int device) const;
  // Names of the ops that are not in the table and only run replicated, sorted.
  std::vector<std::string> unknown_ops() const;

  // Which collective converts a into b (a != b); none for S -> P, whose consumers take shards or
  // the mask of the gathered value:
  //   all_reduce P -> R, reduce_scatter P -> S, all_gather S -> R, all_to_all S -> S', and
  //   slice R -> S and mask R -> P, which move nothing
  static std::optional<Collective> conversion(Placement a, Placement b);

 private:
  // Nodes that look alike: same op, arguments, segment and tensor specs, the same tensors repeated.
  // Signatures and extra rules depend on nothing else.
  struct Kind {
    Signature signature;
    NodeId first;
  };

  class Refinement;
  class Derivation;

  void classify();
  void refine();
  void derive();
  const ValueId* tensors(size_t node) const { return tensors_.data() + first_tensor_[node]; }

  using AllFactors = std::vector<std::vector<std::vector<int64_t>>>;  // [value][dim]

  const Graph& graph_;
  Lookup lookup_;
  Segments segments_;
  std::vector<bool> pure_gradients_;
  std::vector<Kind> kinds_;
  std::vector<int> kind_;             // [node]
  std::vector<ValueId> tensors_;      // of all nodes: inputs, then outputs, invalid ones too
  std::vector<size_t> first_tensor_;  // [node], and the end
  std::shared_ptr<AllFactors> shared_factors_;  // which theories that are alike have together
  AllFactors& factors_;
  std::vector<std::shared_ptr<const std::vector<Triple>>> tables_;
  std::vector<const std::vector<Triple>*> triples_;
  std::vector<int> table_;
};

}  // namespace motley
