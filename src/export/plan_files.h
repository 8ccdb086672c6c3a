// Plans that other planners wrote as files, of a model and a cluster that are given beside them.
//
//   motley import sharding.json --model gpt --cluster amp-v100x16 --batch 64   ->  their plan beside ours
//
// A reader is one file and one line of the table in plan_files.cc. What a file says is held to: the
// plan is the fastest that has it all. What no plan of motley can have is refused, with the place in
// the file; what the file does not say, or motley does in another way, is told in `differences`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/file.h"
#include "plan/plan.h"
#include "planner/batch_step.h"
#include "planner/options.h"

namespace motley {

struct PlanFileJob {
  const std::string& name;  // of the file, for messages
  const Json& json;
  const Cluster& cluster;
  std::shared_ptr<planner::BatchStep> step;
  const planner::PlanOptions& options;  // model, batch, optimizer, precision, limits
};

struct PlanFile {
  std::unique_ptr<Plan> plan;            // simulated; whether it fits into memory is for check()
  std::string what;                      // of the file is in it, a phrase
  Seconds own_s = 0;                     // a step by the planner that wrote it
  std::string own_what;                  // what that counts
  std::vector<std::string> differences;  // sentences
};

struct PlanReader {
  const char* planner;  // "autoparallel"
  bool (*is)(const Json& json);
  // Throws UserError that names file, field and value, and TimeIsUp.
  PlanFile (*read)(const PlanFileJob& job);
};
const std::vector<PlanReader>& plan_readers();
// Throws UserError where the file is of none of them.
const PlanReader& plan_reader_of(const Json& json, const std::string& name);

}  // namespace motley
