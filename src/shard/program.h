// A distributed program (HAP section 4.1): the instructions every device runs, in order, on its own
// pieces.
//
// A step is either a node of the graph under one of its Hoare triples, or a collective that makes
// one more placement of a value. A value may be held in several placements at once; each is a
// tensor of its own. The program is equivalent to the graph if every step finds its operands, and
// at the end the loss is replicated or partial, every parameter's gradient (every buffer's update)
// is placed as the parameter (buffer) is, and every output is held in some placement that is not
// partial.
//
// A program that runs once per micro-batch has three phases: forward, backward, and reduction, the
// collectives and views at its end that only gradients on their way to the optimizer go through.
// They are linear, so they run once, on gradients summed over the micro-batches. Those that say
// `each` run in every pass all the same: what is summed over the micro-batches then is their
// pieces.
//
// The backward pass may end in steps that say `later`: nothing that is handed on needs them, so they
// may run as a pass of their own, once other micro-batches have had theirs (zero-bubble schedules;
// Qi et al. 2023). They are mostly the gradients of weights.
//
// A step may run again: it makes the same values as an earlier equal step, which were freed
// meanwhile (activations that the backward pass computes again, spmd/recompute.h).
//
// Text form, one step a line; it names what it means in full, so that programs can be written by
// hand:
//
//   node 12 aten::mm S(0), R -> S(0)
//   node 40 aten::embedding S(0), R -> P [embedding.vocab]
//   all_reduce %77 P -> R
//   all_gather %78 S(0) -> R grouped
//   again node 12 aten::mm S(0), R -> S(0)
//   each reduce_scatter %79 P -> S(0)
//   later node 29 aten::mm S(1), S(0) -> P
//   joined node 13 aten::mm S(0), R -> S(0)
//
// A step that says `joined` runs in one call with the step before it, which is the same of another
// part of the batch (shard/joined.h).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/units.h"
#include "shard/theory.h"

namespace motley {

// How the pieces of an all-gather or a reduce-scatter travel (HAP section 4.4). Padded: all at
// once, as if each had the size of the largest. Grouped: every piece on its own, to or from its
// device; as fast however uneven they are, at more latencies.
enum class PieceForm : uint8_t { padded, grouped };
// Whether a collective may be grouped; an all-to-all is never padded.
bool has_forms(Collective kind);

struct Step {
  NodeId node;      // valid: computation
  int triple = -1;  // into Theory::triples(node)
  ValueId value;    // valid: collective
  Placement from, to;
  Collective kind = Collective::all_reduce;
  PieceForm form = PieceForm::padded;
  bool again = false;   // an equal step came before
  bool each = false;    // in every pass, though the reduction could have it
  bool later = false;   // in the pass of gradients of weights
  bool joined = false;  // in one call with the step before it

  bool is_compute() const { return node.valid(); }
  friend bool operator==(const Step&, const Step&) = default;
};

// How all-reduces of gradients share messages: those of fewer bytes than `alone` are copied together
// until there are `together`, larger ones travel as they are. Of short messages latency is a large
// part; of long ones what is ready waits for what is not.
struct GradientSizes {
  Bytes alone = 256 << 10, together = 1 << 20;

  friend bool operator==(const GradientSizes&, const GradientSizes&) = default;
};
// No sizes are above these.
inline constexpr GradientSizes kLargestSizes{4 << 20, 16 << 20};

// The steps of a program, in order. Copies share them, for thousands of replicas may run the same:
// they are made as a vector, and changed in a copy of it.
class Steps {
 public:
  Steps() = default;
  Steps(std::vector<Step> steps)
      : steps_(std::make_shared<const std::vector<Step>>(std::move(steps))) {}

  operator const std::vector<Step>&() const { return all(); }
  const std::vector<Step>& all() const { return steps_ ? *steps_ : none(); }
  size_t size() const { return all().size(); }
  bool empty() const { return all().empty(); }
  const Step& operator[](size_t step) const { return all()[step]; }
  const Step& back() const { return all().back(); }
  auto begin() const { return all().begin(); }
  auto end() const { return all().end(); }
  auto rbegin() const { return all().rbegin(); }
  auto rend() const { return all().rend(); }

  // f(std::vector<Step>&) of a copy, which takes their place.
  template <typename F>
  void change(F f) {
    std::vector<Step> steps = all();
    f(steps);
    *this = std::move(steps);
  }

  friend bool operator==(const Steps& a, const Steps& b) {
    return a.steps_ == b.steps_ || a.all() == b.all();
  }

 private:
  static const std::vector<Step>& none() {
    static const std::vector<Step> steps;
    return steps;
  }

  std::shared_ptr<const std::vector<Step>> steps_;  // null: none
};

struct Program {
  Steps steps;
  GradientSizes sizes = {};

  friend bool operator==(const Program&, const Program&) = default;
};

std::string to_text(const Theory& theory, const Step& step);
// Throws UserError that starts with `where` if the line is not a step of this graph or not a triple
// of its theory.
Step parse_step(const Theory& theory, const std::string& line, const std::string& where);

// What a step reads and makes, as f(value, placement).
template <typename F>
void for_each_read(const Theory& theory, const Step& step, F f) {
  if (!step.is_compute()) return f(step.value, step.from);
  const Triple& triple = theory.triples(step.node)[step.triple];
  size_t i = 0;
  for (ValueId v : theory.graph().inputs_of(theory.graph().node(step.node))) f(v, triple.in[i++]);
}
template <typename F>
void for_each_made(const Theory& theory, const Step& step, F f) {
  if (!step.is_compute()) return f(step.value, step.to);
  const Triple& triple = theory.triples(step.node)[step.triple];
  const Node& node = theory.graph().node(step.node);
  for (size_t o = 0; o < node.outputs.size(); ++o)
    if (node.outputs[o].valid()) f(node.outputs[o], triple.out[o]);
}

// What is wrong with a program, as sentences; empty if it is equivalent to the graph. Trusts
// nothing but the theory: REQUIRES only that triple numbers are in range where they are used.
std::vector<std::string> check(const Theory& theory, const Program& program);

// The first steps of the backward pass, of what of it comes later (if nothing does: of the
// reduction), and of the reduction. Conversions directly in front of the first backward node that
// no output needs belong to the backward pass.
struct Phases {
  int backward = 0, weights = 0, reduction = 0;
};
Phases phases_of(const Theory& theory, const Program& program);

// The same steps, those of the reduction moved to the end, otherwise in their order.
Program phase_ordered(const Theory& theory, const Program& program);

// A phase-ordered program with what makes pieces of gradients (reduce-scatters and slices of the
// reduction, and the views they read) right behind what it reads, in every backward pass: no whole
// gradient is kept from one pass to the next.
Program scattered_in_passes(const Theory& theory, const Program& program);

// A phase-ordered program whose backward pass ends in what no output of the graph needs, as steps
// that say `later`; without any if there is nothing else in the backward pass.
Program weights_later(const Theory& theory, const Program& program);
// Whether a phase-ordered program has such steps.
bool has_later(const Program& program);
// Whether steps run in one call with others.
bool has_joined(const Program& program);

// What keeps a program from running in phases: outputs of the forward pass that are made later, and
// steps that say `later` where they may not. Empty if nothing does.
std::vector<std::string> check_phases(const Theory& theory, const Program& program);

// How an output is handed on: the first placement that is not partial. REQUIRES: check() passes.
Placement output_placement(const Theory& theory, const Program& program, ValueId output);

// What a reduction starts from: the (value, placement) pairs made before it that it reads or that
// are gradients already placed as their parameters. They are summed over micro-batches.
std::vector<std::pair<ValueId, Placement>> accumulated(const Theory& theory,
                                                       const Program& program);

// [value] True for gradients, and what they are aliases of, that nothing but the optimizer reads:
// their all-reduces can wait for the end of the step, and small ones share a latency.
std::vector<bool> pure_gradients(const Graph& graph);

// [value] How every parameter, buffer and input is stored, read off the program (other values:
// replicated).
std::vector<Placement> stored_placements(const Theory& theory, const Program& program);

// Bytes of the largest tensor that a program sums over all devices, also inside of a rule.
int64_t largest_all_reduce(const Theory& theory, const Program& program, bool half_as_f32);

// Lifetimes of what a program holds, in the order in which it is made. What is made again has
// another entry; the one before lives until its last use before that.
struct Held {
  ValueId value;
  Placement placement;
  int made;  // step that makes it
  int last;  // last step that uses it; steps.size() if it is needed at the end
};
std::vector<Held> lifetimes(const Theory& theory, const Program& program);

}  // namespace motley
