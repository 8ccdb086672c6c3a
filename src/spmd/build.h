// From a captured graph and its theory to a synthesis problem, and from a solution back to a
// program.
//
// Aliases are contracted: a tensor and its views (transposes, reshapes of equal size) are one
// *value* of the problem, and a *form* of it is a set of placements of its members that the views
// turn into one another for free. That halves the nodes and loses nothing: a form that exists only
// below some view (a batch that is cut after it was split off a product) is reached by converting
// there.
//
// Sources: a parameter is stored in one placement, fixed once; its gradient must come out in the
// same. That is expressed by a token, a second output of the parameter that has no conversions and
// that the update consumes together with the gradient. Buffers that the step changes work alike.
// Inputs are read whole or in pieces at no cost; but what a stage of a pipeline receives from
// another comes in pieces that are gathered here, or whole at a little more than gathering it:
// every device would be sent all of it over a link that is seldom better than those inside of the
// stage. An output is consumed, as soon as it is made, in any form that holds a placement that is
// not partial.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "cost/cost.h"
#include "shard/program.h"
#include "solver/problem.h"
#include "spmd/overlap_pricing.h"

namespace motley::spmd {

// What programs may do; the baselines of the field are restrictions.
enum class Restriction {
  none,
  data_parallel,    // inputs cut in dimension 0, parameters whole, no collective but all-reduce
  tensor_parallel,  // inputs whole: no cut of the batch
  expert_parallel,  // data parallel, but experts ([expert, in, out] weights of a batched product)
                    // are cut, and reached by all-to-all
  zero,  // inputs cut in dimension 0, parameters and their state cut, gathered where they are used
  gathered_parameters,  // the same, and nothing but parameters is gathered (FSDP)
  cut_matrices,  // tensor parallel, and all matrices that are multiplied are cut and never gathered
};

class ProblemBuilder {
 public:
  // Equal nodes and values on both sides of a node of `parts` (OverlapPricing::from) have tables of
  // their own, so that prices can tell them apart, and so has each gradient of `separate`, named as by
  // reduced().
  ProblemBuilder(const Theory& theory, const CostModel& model, Optimizer optimizer,
                 Restriction restriction = Restriction::none, std::vector<int64_t> parts = {},
                 std::vector<ValueId> separate = {});

  // Of messages of gradients, as they are priced from then on; the usual ones until then. Of
  // kLargestSizes: no program of any sizes is cheaper.
  void set_sizes(const GradientSizes& sizes) { sizes_ = sizes; }

  const solver::Problem& problem() const { return problem_; }
  // The node of the graph that a node of the problem runs; invalid: what it is about is stored,
  // or it only reads.
  NodeId node(int problem_node) const {
    const Source& source = sources_[problem_node];
    return source.origin == Origin::node ? source.node : NodeId();
  }
  // The value of the problem that a value of the graph is in, and of that what its views are of.
  int value(ValueId v) const { return class_of_[v.index]; }
  ValueId root(int value) const { return classes_[value].root; }
  int values() const { return static_cast<int>(classes_.size()); }
  // The node of the problem that makes a value, and the token that it makes with a parameter that
  // the step changes; -1: none.
  int maker(int value) const { return makers_[value]; }
  int token(int value) const {
    const std::vector<int>& made = problem_.nodes[makers_[value]].outputs;
    return sources_[makers_[value]].parameter >= 0 && made.size() == 2 ? made[1] : -1;
  }
  // Whether it is a parameter, or a view or conversion of one.
  bool is_parameter(int value) const;
  // What a device of a type holds of a value in a form, and at least in any form.
  Bytes bytes(int value, int form, int type, const Fractions& fractions) const;
  Bytes least_bytes(int value, int type, const Fractions& fractions) const;
  // Whether it is nothing but a gradient, or a value and its view that is one.
  bool is_gradient(int value) const { return gradient_view_[value]; }
  bool is_pure_gradient(int value) const { return gradient_class_[value]; }
  // How a form holds what has it and is nearest to the value.
  Placement placement(int value, int form) const {
    return held(forms(classes_[value])[form])[0].second;
  }
  // Sets all costs for the given shares. The structure (what order.h looks at) does not change.
  // With `micro_batches` the program runs that often in a step: what it does once per step, the
  // collectives of gradients and the optimizer, counts one part in so many.
  //
  // With `pricing` no price is above the bound it is the mixture of (overlap_pricing.h): where one
  // table serves nodes of several stretches, what counts least is taken. To the price of a program
  // come decided_seconds(). REQUIRES: what is decided has tables of its own.
  void price(const Fractions& fractions, int micro_batches = 1,
             const OverlapPricing* pricing = nullptr);
  // Until the next price(), every operator takes on every type what it takes on the slowest: no
  // program costs more than its price then, and one whose stages are of one kind each costs just
  // that.
  void price_at_slowest_type();
  // The parts of a program's cost that prices with an pricing are made of. Gradients that its
  // class all-reduces count whether or not the program does.
  OverlapCost overlap_cost(const Program& program, const Fractions& fractions,
                           const OverlapPricing& pricing) const;
  // The price of the gradients that are decided to be all-reduced.
  Seconds decided_seconds(const OverlapPricing& pricing) const;
  // What the message of a gradient adds to a step at least.
  Seconds reduction_seconds(ValueId gradient) const;
  // What it adds at least if the step waits for it at once: a neighbour may share its latency.
  Seconds waited_seconds(ValueId gradient) const;
  // The gradients that a program all-reduces, ascending: of values that are views of one another
  // the one they are views of.
  std::vector<ValueId> reduced(const Program& program) const;
  // The first node before which the message of a gradient may start: it follows the one that makes
  // the value that this one is a view of.
  int64_t ready(ValueId gradient) const { return maker_of(class_of_[gradient.index]) + 1; }
  // The first such node of all gradients; the end of the graph if there are none.
  int64_t first_gradient() const;
  // The node that follows the last collective besides all-reduces of gradients; -1: there is none.
  int64_t last_barrier(const Program& program, const Shares& shares) const;
  // The program of a solution: nodes in graph order, collectives where their result is first used,
  // except that a gradient is scattered as soon as it is there (it frees memory), outputs are
  // converted as soon as they are made, and all-reduces of gradients stand together at the end.
  Program program(const solver::Solution& solution) const;

 private:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();  // after all nodes
  using Held = std::pair<ValueId, Placement>;
  struct Form {
    ValueId top;     // nearest to the root of the members that have it
    int begin, end;  // into held_
  };
  struct Class {
    ValueId root;
    int begin = 0, end = 0;  // into forms_
    bool saved = false;      // made forward and read backward
    int64_t use = 0;         // before this node no conversion of it runs
  };
  enum class Origin : uint8_t { node, update, goal, output };
  struct Source {
    Origin origin;
    NodeId node;          // Origin::node
    ValueId output = {};  // Origin::output
    int parameter = -1;   // update, or the source it belongs to: index into parameters
    int buffer = -1;
  };
  struct OptionOrigin {
    std::vector<int>
        triple;  // [option] triple of the node it came from, or placement number of a token
  };

  struct Views;
  class NodeAdder;
  class Translation;

  std::span<const ValueId> inputs(NodeId node) const {
    return {inputs_.data() + first_input_[node.index],
            static_cast<size_t>(first_input_[node.index + 1] - first_input_[node.index])};
  }
  std::span<const Form> forms(const Class& c) const {
    return {forms_.data() + c.begin, static_cast<size_t>(c.end - c.begin)};
  }
  std::span<const Held> held(const Form& form) const {
    return {held_.data() + form.begin, static_cast<size_t>(form.end - form.begin)};
  }
  std::span<const Placement> placements(ValueId v) const {
    const int begin = first_placement_[v.index];
    return {placements_.data() + begin, static_cast<size_t>(first_placement_[v.index + 1] - begin)};
  }
  // [index in placements()] -> form, -1: not used
  std::span<const int> form_numbers(ValueId v) const {
    const int begin = first_placement_[v.index];
    return {form_numbers_.data() + begin,
            static_cast<size_t>(first_placement_[v.index + 1] - begin)};
  }
  int form_of(ValueId value, Placement placement) const;
  int64_t maker_of(int value) const {
    return theory_.graph().value(classes_[value].root).producer.index;
  }
  int part_of(int64_t node) const { return stretch_of(parts_, node); }
  ValueId root_of(ValueId value) const { return classes_[class_of_[value.index]].root; }
  // Whether it is an input that another stage sends (graph/stage.h).
  static bool is_received(const Node& node);
  bool is_reduction(const Step& step) const;
  void contract();
  void list_inputs();
  void list_placements();
  Views join_views();
  void make_forms(Views* views);
  void find_uses();
  void find_gradients();
  void add_values();
  void add_nodes();
  std::vector<Placement> stored_choices(ValueId source) const;
  bool is_expert(ValueId source) const;
  bool is_matrix(ValueId source) const;  // that a forward node multiplies by
  // `part`: of a step, what runs once in it costs in each micro-batch.
  void price_conversions(const Fractions& fractions, double part,
                         const spmd::OverlapPricing* pricing);
  void price_options(const Fractions& fractions, double part, const spmd::OverlapPricing* pricing);
  // What keeping a parameter twice that is stored so adds to an option.
  void price_second_copy(const Source& source, Placement placement, const Fractions& fractions,
                         double part, const OverlapPricing* pricing, solver::Option* option);
  // The price of a value from another stage that every device receives whole.
  Seconds received_whole(NodeId node, const Fractions& fractions) const;

  const Theory& theory_;
  const CostModel& model_;
  Optimizer optimizer_;
  Restriction restriction_;
  std::vector<int64_t> parts_;
  std::vector<ValueId> separate_;
  GradientSizes sizes_;

  std::vector<int> class_of_;                 // [graph value] -> class
  std::vector<bool> contracted_;              // [graph node]
  std::vector<ValueId> inputs_;               // of all graph nodes
  std::vector<int> first_input_;              // [graph node], and the end
  std::vector<Class> classes_;                // class number = problem value, tokens follow
  std::vector<Form> forms_;                   // of all classes
  std::vector<Held> held_;                    // the members of all forms
  std::vector<Placement> placements_;         // of all graph values
  std::vector<int> form_numbers_;             // likewise
  std::vector<int> first_placement_;          // [graph value], and the end
  std::vector<int> table_class_;              // [form table] exemplar class, -1: token
  std::vector<int> table_exemplar_;           // [option table] exemplar problem node
  std::vector<int64_t> table_first_;          // [form table] least ready() of its gradients
  std::vector<int64_t> table_use_;            // [form table] least Class::use
  std::vector<int64_t> table_begin_;          // [option table] first of its nodes
  std::vector<int64_t> table_last_;           // [option table] last of its nodes
  std::vector<Source> sources_;               // [problem node]
  std::vector<int> makers_;                   // [class] problem node
  std::vector<OptionOrigin> option_origins_;  // [option table]
  std::vector<bool> gradient_class_;          // class holds a gradient that only an update reads
  std::vector<bool> gradient_view_;           // some member of the class is one
  solver::Problem problem_;
};

}  // namespace motley::spmd
