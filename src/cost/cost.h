// The one cost model: seconds and bytes of steps and programs on a cluster.
//
// Computation is a roofline with a launch overhead, per device type: overhead + max(flops / rate,
// bytes / bandwidth). A step whose triple cuts a factor of size n does piece/n of the flops and
// touches piece/n of the bytes of its sharded tensors, and all bytes of the replicated ones. An
// operator that was measured (OpRate) takes overhead + flops / rate + bytes / bandwidth instead.
// Devices of a type are priced at the largest piece among them.
//
// A program's time is stage-synchronised (HAP section 3.2): a collective starts when all devices
// reach it, so
//
//     t = sum over stages of ( collective + max over types of computation up to the next collective
//     )
//
// Neighbouring all-reduces of small gradients are one message (the runtime coalesces them), so they
// share its latency.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cluster/cluster.h"
#include "net/collectives.h"
#include "shard/program.h"

namespace motley {

// An optimizer as memory and time see it. Example: {Optimizer::adamw, true}, "fused-adamw" in files,
// is torch.optim.AdamW(fused=True).
struct Optimizer {
  enum Kind { sgd, adamw, amsgrad };  // state of one, two and three times a parameter's bytes
  Kind kind = adamw;
  bool fused = false;  // one kernel steps all parameters, without temporaries

  Optimizer() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): most are not fused
  constexpr Optimizer(Kind of, bool in_one = false) : kind(of), fused(in_one) {}
  bool operator==(const Optimizer&) const = default;
  bool operator==(Kind) const = delete;  // of a fused one, too? ask for its kind
};
std::string to_string(Optimizer optimizer);
const char* to_string(Optimizer::Kind kind);
bool parse_optimizer(const std::string& text, Optimizer* optimizer);
std::vector<std::string> optimizer_names();  // that parse_optimizer() knows
// Bytes of state the optimizer keeps per byte of parameter.
double state_factor(Optimizer optimizer);
// Bytes of a whole parameter, its gradient and its optimizer state.
Bytes state_bytes(const Graph& graph, const Parameter& parameter, Optimizer optimizer);

// What one step does on all devices together.
struct Work {
  Flops flops = 0;        // of the whole op
  Bytes cut_bytes = 0;    // of its sharded tensors, whole
  Bytes whole_bytes = 0;  // of its replicated and partial tensors
  Cut cut;            // the factor that divides flops and cut_bytes; of size 0: nothing is divided
  bool half = false;  // 16-bit arithmetic
  bool free = false;  // an alias or a source: no time
  const OpDef* op = nullptr;  // nullptr: not in the op table
};
Work work_of(const Theory& theory, NodeId node, const Triple& triple);

// What the gradients of a program cost where several replicas run it and sum them up too: seconds
// of the reduction of a whole gradient over all ranks of all replicas, and per byte of a device's
// piece over the replicas alone.
struct OverReplicas {
  Seconds fixed = 0;
  double seconds_per_byte = 0;
  std::vector<double> piece;  // [type] seconds per byte; empty: one replica
};

// How many times its bytes a sum of 16-bit numbers, or another collective of some, moves.
double widening(const Backend& backend, Collective kind, bool half);

// What the names of measured operators in 16 bits end with: "aten::mm:bf16".
inline constexpr std::string_view kHalfRate = ":bf16";

// Gradients that are all-reduced one behind the other, with nothing between that takes time. Small
// ones, of whatever neighbours, are one message, and each is its part of it (message_seconds() in
// overlap.h); the first one pays for a message of its own.
struct GradientRun {
  explicit GradientRun(const GradientSizes& of) : sizes(of) {}
  void end() { any = small = false; }

  GradientSizes sizes;
  bool any = false, small = false;  // whether there is one; whether there is a small one
};

class CostModel {
 public:
  // `reductions`: programs that large all-reduces take (net/reduction.h); they need messages, and are
  // not taken over backends that have none.
  explicit CostModel(const Cluster& cluster, const std::vector<ReductionProgram>& reductions = {},
                     OverReplicas replicas = {});
  CostModel(const CostModel&) = delete;
  CostModel& operator=(const CostModel&) = delete;

  const Cluster& cluster() const { return cluster_; }
  // What the devices talk over (cluster/backend.h).
  const Backend& backend() const { return backend_; }
  // Bytes of the whole of a value, or of what is summed inside an operator, as a collective moves it:
  // 16-bit numbers that the backend cannot add travel as f32. All bytes below are such.
  Bytes moved(Collective kind, const TensorSpec& spec) const;
  Bytes moved(const InnerCollective& inner) const;
  int types() const { return static_cast<int>(cluster_.types.size()); }

  // Seconds of a step on a device type that does `fraction` of what is cut. Zero for a fraction of
  // zero of cut work.
  // If given, *cut and *whole are such that the result is *cut * fraction + *whole near this
  // fraction.
  Seconds compute(int type, const Work& work, double fraction, Seconds* cut = nullptr,
                  Seconds* whole = nullptr) const;
  // Seconds of an all-reduce of a gradient on its way to the optimizer: with replicas, what it adds
  // to their reduction. `run`: the gradients before it; it is added to them.
  Seconds gradient_all_reduce(const TensorSpec& gradient, GradientRun* run) const;
  // Of it, seconds in which a gradient is copied to its message; of those that are small at the
  // usual sizes too, 0.
  Seconds copying_seconds(const TensorSpec& gradient, const GradientSizes& sizes) const;
  // Seconds of the optimizer on one parameter of which `parameter_bytes` are local, and of its
  // gradient's reduction over replicas. `linear`: what they would be if all of it were cached,
  // which is linear in the bytes but for the overhead.
  Seconds update(int type, Bytes parameter_bytes, Optimizer optimizer,
                 Seconds* linear = nullptr) const;
  // Seconds of one collective on a tensor of `bytes` whose cut factor has the given shares. 0 for
  // slice and mask. Without a form: of the faster one.
  Seconds collective(Collective kind, Bytes bytes, const CollectiveModel::ShareProfile& shares,
                     PieceForm form) const;
  Seconds collective(Collective kind, Bytes bytes,
                     const CollectiveModel::ShareProfile& shares) const;
  Seconds latency() const { return net_.latency_of_ring(); }
  // Seconds for which the machine of a device launches a call, or the update of one parameter, ahead
  // of the device; 0 where the price of the call holds it.
  Seconds launch(int type, const Work& work) const;
  bool launches(int type) const { return rates_[type].launches; }
  Seconds launch_of_update(int type, Optimizer optimizer) const;
  Seconds launch_of_cast(int type) const;  // of 16 bits to 32
  // What every step takes beyond its operators, collectives and updates on a device type: every
  // device makes the whole batch and keeps its piece.
  Seconds per_step(int type, const Graph& graph) const;
  const CollectiveModel& net() const { return net_; }

 private:
  // Measured operators of a device type; they point into cluster_.
  struct Rates {
    std::unordered_map<const OpDef*, const OpRate*> ops, half_ops;
    const OpRate *adamw = nullptr, *sgd = nullptr, *step = nullptr;
    bool launches = false;  // some are launched ahead of the device
  };

  Cluster cluster_;
  Backend backend_;
  CollectiveModel net_;
  OverReplicas replicas_;
  std::vector<Rates> rates_;  // [type]
};

// Largest piece of a cut among the devices of each type, as a fraction of its size; and every
// device's.
class Fractions {
 public:
  // `redundancy` 1: what is cut is kept twice (cluster/second_holders.h).
  Fractions(const Cluster& cluster, const Shares& shares, int redundancy = 0);
  // Of nothing cut: everything (1 for every type).
  const std::vector<double>& by_type(Cut cut) const;
  const std::vector<double>& by_device(Cut cut) const;
  // Of pieces that are no larger than `most`.
  std::vector<double> by_type(Cut cut, double most) const;
  // Of by_device(cut), for the collectives of one network (always the same one).
  const CollectiveModel::ShareProfile& profile(Cut cut, const CollectiveModel& net) const;
  // Seconds per byte of an exchange between the shares of two segments, likewise.
  double exchange(int64_t size, int from, int to, const CollectiveModel& net) const;
  const Shares& shares() const { return shares_; }
  // Of the pieces of other devices that a device keeps too; zero where nothing is cut or kept twice.
  bool twice() const { return !first_.empty(); }
  const std::vector<double>& second_by_device(Cut cut) const;
  const std::vector<double>& second_by_type(Cut cut) const;
  // Seconds per byte of the whole tensor that sending every piece to where it is kept too takes.
  double to_second(Cut cut, const CollectiveModel& net) const;

 private:
  const Cluster& cluster_;
  const Shares& shares_;
  const std::vector<int>
      first_;  // [device] whose pieces it keeps too; empty: nothing is kept twice
  mutable std::map<Cut, std::vector<double>> by_type_, by_device_, second_by_type_,
      second_by_device_;
  mutable std::map<Cut, double> to_second_;
  mutable std::map<Cut, CollectiveModel::ShareProfile> profile_;
  mutable std::map<std::pair<Cut, int>, double> exchange_;
};

// Whether a boundary between segments moves nothing: what it passes is not cut, or is cut in equal
// pieces on both sides. REQUIRES: `node` is a boundary.
bool moves_nothing(const Theory& theory, NodeId node, const Triple& triple, const Shares& shares);
// Seconds of the collectives inside a node under one of its triples.
Seconds inner_seconds(const Theory& theory, NodeId node, const Triple& triple,
                      const CostModel& model, const Fractions& fractions);

// What keeping a parameter twice takes in a step: the pieces of its gradient go to where they are
// kept too, before the optimizer, which steps both copies there. Nothing unless it is cut and
// trained.
struct SecondCopy {
  Seconds send = 0;             // latency apart, which all of a program's parameters share
  std::vector<Seconds> update;  // [type]
};
SecondCopy second_copy(const Theory& theory, const Parameter& parameter, Placement stored,
                       const CostModel& model, const Fractions& fractions, Optimizer optimizer);

// One stage: a collective (none before the first) and the computation after it. With b the share of
// a type in a segment and M the largest share, its times are linear near the shares they were
// computed for:
//   comm = comm_fixed + comm_padded * M,   compute[type] = sum over segments of cut * b +
//   whole[type]
// Of an exchange between segments comm_fixed is what it takes beyond moving its bytes.
struct StageCost {
  Seconds comm = 0;
  Seconds comm_fixed = 0, comm_padded = 0;
  std::vector<Seconds> compute;  // [type]
  std::vector<Seconds> cut;      // [segment * types + type]
  std::vector<Seconds> whole;    // [type]
  int segment = 0;               // of M
};

struct MemoryCost {
  // [type] What is planned for: gradients may stay from one step to the next.
  std::vector<Bytes> peak;
  // [type] What is held at most where gradients are freed after every step, and so are not there
  // while the forward pass runs. Of a program that runs once per micro-batch the peak.
  std::vector<Bytes> allocated;
  std::vector<Bytes>
      state;  // [type] of it parameters, gradients and optimizer state, there for the whole step
  // At the peak of a type: bytes of cut tensors, uncut, [segment * types + type]; bytes of the
  // others, [type].
  std::vector<Bytes> cut, whole;
  // [type] Of a program that runs once per micro-batch: what one micro-batch holds between its
  // forward and its backward pass; of it what came in from outside (inputs); and gradients summed
  // in another placement than their parameter's, there for the whole step like `state`.
  std::vector<Bytes> held, held_inputs, sums;
  // [type] Of such a program with steps that say `later`: what a micro-batch holds between its
  // backward pass and these.
  std::vector<Bytes> waiting;
  // [type] Of such a program: what it hands on, which is there until it has arrived; of that what
  // its backward pass hands on.
  std::vector<Bytes> sent, sent_back;

  // Of such a program, what another micro-batch in flight holds, computed again in its backward
  // pass or not.
  Bytes another(int type, bool recompute) const {
    return (recompute ? held_inputs : held)[type] + sent[type];
  }
};

struct ProgramCost {
  Seconds step = 0;              // whole iteration, optimizer included
  Seconds comm = 0;              // of it in collectives
  std::vector<Seconds> compute;  // [type] busy seconds
  std::vector<StageCost> stages;
  // [from * segments + to] bytes of the whole tensors cut on both sides of boundaries, whether or
  // not anything moves at these shares.
  std::vector<Bytes> exchanged;
  MemoryCost memory;
};

// With `micro_batches` the program runs that often in a step, and the cost is of one run: the
// collectives of gradients on their way to the optimizer, and the optimizer, count one part in so
// many. `with_memory` false: the memory is zero.
ProgramCost cost_of(const Theory& theory, const Program& program, const CostModel& model,
                    const Fractions& fractions, Optimizer optimizer, int micro_batches = 1,
                    bool with_memory = true);

// Seconds of the phases of a program: one pass forward, one backward, of it what may come later, the
// reduction, the optimizer.
struct PhaseSeconds {
  Seconds forward = 0, backward = 0, weights = 0, reduction = 0, update = 0;
};
PhaseSeconds phase_seconds(const Theory& theory, const Program& program, const CostModel& model,
                           const Fractions& fractions, Optimizer optimizer);

// The calls of the steps [begin, end), or of a whole iteration, as the slowest machine launches them
// ahead of its devices, which take them in order. Nothing where devices launch calls themselves.
struct Launching {
  Seconds launches = 0;  // what the machine takes
  Seconds waits = 0;     // of the device for calls to be launched, where nothing else holds it

  // What it adds to a step of which devices spend `comm` in collectives: meanwhile the machine goes
  // on.
  Seconds beyond(Seconds comm) const { return std::max(0.0, waits - comm); }
};
Launching launching(const Theory& theory, const Program& program, const CostModel& model,
                    const Fractions& fractions, int begin, int end);
Launching launching(const Theory& theory, const Program& program, const CostModel& model,
                    const Fractions& fractions, Optimizer optimizer);

// Gives every collective of a program its faster form under these shares.
void choose_forms(const Theory& theory, Program* program, const CostModel& model,
                  const Fractions& fractions);

// What a device keeps where replicas divide the state of parameters (ZeRO; plan/pipeline.h): of its
// piece's optimizer state and sum of gradients a share.
struct ZeroShare {
  std::vector<bool> optimizer;  // [parameter] its optimizer state is divided; empty: none is
  std::vector<bool> gradient;   // [parameter] its sum of gradients too; empty: gradients are summed
                                // whole and reduced once, otherwise all are reduced in every pass
  double share = 1;
  double of_optimizer(size_t parameter) const {
    return optimizer.empty() || !optimizer[parameter] ? 1 : share;
  }
  double of_gradient(size_t parameter) const {
    return gradient.empty() || !gradient[parameter] ? 1 : share;
  }
};

// Bytes that each device type holds at its peak, never less than workers do: parameters, gradients
// and optimizer state for the whole step, activations by liveness, aliases of one tensor once, and
// what steps and the optimizer take while they run (storage.h). Workers on the CPU have the whole
// batch, too. While the optimizer runs, gradients of another type than their parameter (mixed
// precision) are there in both. With `phases` also what a micro-batch holds between its passes.
MemoryCost memory_of(const Theory& theory, const Program& program, const Fractions& fractions,
                     int types, Optimizer optimizer, bool phases = false,
                     const ZeroShare& kept = {});

}  // namespace motley
