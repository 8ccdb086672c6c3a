// What groups of a pipeline plan send one another, and how long it takes: values between stages,
// gradients over replicas and between the stages of tied parameters, parameters that replicas
// divide. Messages of one kind go at the same time and share the links they cross; when they start
// is for sim/pipeline.h to say.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "net/messages.h"
#include "plan/alike.h"
#include "plan/plan.h"

namespace motley {

// What rank by rank moves when a value of `bytes` that one group holds in `from` is handed to
// another that wants it in `to`. Shares give the pieces of the two groups; a placement that is not
// a cut is whole on every rank.
struct Holding {
  const std::vector<int>* devices = nullptr;
  const Shares* shares = nullptr;
  Placement placement;
  int64_t cut = 0;  // size of the cut factor; 0: whole
};
void add_messages(const Holding& from, const Holding& to, Bytes bytes,
                  std::vector<net::PairMessage>* messages);

// A stage of a replica on its devices.
struct StageSite {
  Cluster part;
  std::vector<Placement> stored;  // [value] of its graph that is a source
  std::unique_ptr<CostModel> model;
  std::unique_ptr<Shares> shares;
  std::unique_ptr<Fractions> fractions;
};

struct Sent {
  Bytes bytes = 0;  // by all devices
  Seconds seconds = 0;
};

// All values that one stage hands another in one direction; `sent`: of a micro-batch, its bytes
// those of one replica.
struct Way {
  int from = 0, to = 0;
  bool backward = false, made_backward = false;
  Sent sent;
};

class Exchanges {
 public:
  // REQUIRES: the plan outlives this, and has a pipeline. What takes long throws TimeIsUp if the
  // deadline passes.
  explicit Exchanges(const Plan& plan, const Deadline& deadline = {});

  const JointGradients& joint(int stage) const { return joint_[stage]; }
  const DividedState& divided(int stage) const { return divided_[stage]; }
  // Whether the replicas of a stage reduce gradients in every backward pass.
  bool in_every_pass(int stage) const { return !divided_[stage].gradient.empty(); }
  // Those of one pass.
  Sent in_pass(int stage) const;
  // Parameters that replicas stepped parts of, after the optimizer.
  Sent parameters(int stage) const;

  // [replica][stage] What follows needs them. Replicas that are alike in a stage share its site.
  std::vector<std::vector<std::shared_ptr<const StageSite>>> sites;
  std::vector<Way> ways() const;
  // Gradients at the end of a step.
  Sent over_replicas(int stage) const;
  // In the slowest replica, all at once.
  Sent tied(const Tied& tied) const;

  // Called with all messages of which the time was asked, those of a way for one micro-batch.
  std::function<void(const std::vector<net::PairMessage>&)> on_messages;
  // Called with all-reduces over devices of several replicas that a program takes (null: on a ring).
  std::function<void(const std::vector<int>& devices, const ReductionProgram*, Bytes)> on_reduction;

 private:
  // The gradients of a stage by how replicas sum them.
  struct Sums {
    Bytes jointly = 0;  // over all devices at once
    // By programs or on rings, in classes of replicas that hold them alike: [class][rank].
    std::map<Classes, std::vector<std::vector<Bytes>>> reduced;
    std::vector<bool> scattered;           // [parameter] on rings
    std::vector<net::PairMessage> others;  // between the classes
    Seconds gathered = 0;                  // behind those messages
  };
  Sums sums_of(int stage) const;
  void add_tied_parts(int stage, size_t parameter, std::vector<net::PairMessage>* messages) const;
  Seconds time_of(const std::vector<net::PairMessage>& messages) const;
  Seconds reduced_seconds(int stage, const Classes& classes,
                          const std::vector<std::vector<Bytes>>& reduced) const;
  // [rank] Bytes of a replica's pieces of some parameters of a stage, or of their gradients; of
  // gradients that are reduce-scattered over the replicas, as they move. REQUIRES: the pieces of all
  // replicas are alike.
  enum class Pieces { parameters, gradients, scattered };
  std::vector<Bytes> divided_bytes(int s, const std::vector<bool>& which, Pieces pieces) const;
  // How much more a sum over the replicas of a stage moves, on the fabric that their ranks share.
  double wide(int s, Collective kind, const TensorSpec& spec) const;
  // Seconds of a reduce-scatter or all-gather over the replicas of a stage: rings, all ranks' at
  // the same time, on which a round takes as long as the largest part.
  Seconds around(int s, const std::vector<Bytes>& by_rank) const;
  Holding holding(size_t r, int s, ValueId v, Placement p) const;
  Holding gradient_of(size_t r, int s, size_t parameter) const;
  Seconds exchange_sums(const std::vector<Holding>& held,
                        const std::vector<const CostModel*>& models, const Classes& classes,
                        const TensorSpec& spec, std::vector<net::PairMessage>* messages) const;
  const StagePlan& planned(size_t r, int s) const { return pipeline_.replicas[r].stages[s]; }

  const Plan& plan_;
  const PipelinePlan& pipeline_;
  const Deadline deadline_;
  net::Topology topology_;
  std::vector<JointGradients> joint_;  // [stage]
  std::vector<DividedState> divided_;  // [stage]
};

}  // namespace motley
