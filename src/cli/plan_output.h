// What `motley plan` prints of what planning found.
#pragma once

#include <string>

#include "core/file.h"
#include "planner/planner.h"

namespace motley {

// REQUIRES: the report has a plan. `cluster`: the one that was asked for.
Json plan_json(const planner::PlanReport& report, const Cluster& cluster, double capture_s,
               const planner::Record& record);
std::string describe_search(const planner::PlanReport& report, const Cluster& cluster);

// What the limits of a target cost. `free`: of plans without them; may have none.
Json target_json(const planner::PlanReport& report, const planner::PlanReport& free,
                 const std::string& target);
std::string describe_target(const planner::PlanReport& report, const planner::PlanReport& free,
                            const std::string& target);

// Of a report without one.
Json no_plan_json(const planner::PlanReport& report, const planner::PlanOptions& options);

}  // namespace motley
