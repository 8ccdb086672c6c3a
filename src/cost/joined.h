// What calls on the rows of all parts of a batch take (shard/joined.h).
#pragma once

#include <vector>

#include "cost/cost.h"
#include "shard/joined.h"

namespace motley {

class JoinedWork {
 public:
  JoinedWork(const Theory& theory, const Program& program, const JoinedCall& call);
  // Of a node of the graph of one part, all parts being as it is; without copies.
  JoinedWork(const Theory& part, NodeId node, const Triple& triple, const Duplex::Joining& joining,
             int parts);

  const std::vector<Cut>& cuts() const { return cuts_; }  // of the parts
  // Seconds on a device type of which a device does the given fraction of each part's, as
  // `fraction(cut)` says.
  template <typename F>
  Seconds seconds(const CostModel& model, int type, F fraction) const {
    double of_all = 0;
    for (size_t p = 0; p < cuts_.size(); ++p) of_all += weights_[p] * fraction(cuts_[p]);
    return model.compute(type, work_, of_all) +
           (copies_.free ? 0 : model.compute(type, copies_, of_all));
  }
  Seconds launch(const CostModel& model, int type) const {
    return model.launch(type, work_) + model.launch(type, copies_);
  }

 private:
  Work work_, copies_;
  std::vector<Cut> cuts_;
  std::vector<double> weights_;  // of each part; their sum is 1
};

// Adds what a call takes to the last stage of a program's cost.
void add_joined(const Theory& theory, const Program& program, const JoinedCall& call,
                const CostModel& model, const Fractions& fractions, ProgramCost* cost);

}  // namespace motley
