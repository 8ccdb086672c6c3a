// Advice on a cluster: does a model fit, how fast is it and on what of the devices, what would
// changes of the cluster give, what is each group of devices worth, and which devices are the
// cheapest that are fast enough.
//
// Every cluster that is asked about (the one there is, edits of it, it without a group, ...) is
// planned for, each for its part of one time limit. Every plan found is then tried on every
// cluster that has its devices, by simulating it there, and the best is the answer. So the answers
// of one question are monotone: a cluster that has all devices of another, and links no slower, is
// never worse, because the other's plan is a candidate for it.
//
// The cheapest devices are looked for among parts of the cluster, whole machines of each group,
// cheapest first; a part is not planned for where the bound of its computation alone
// (bounds/compute_bound.h) is above the deadline, or costs more than what was found.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "advise/edits.h"
#include "cluster/tariff.h"
#include "planner/planner.h"

namespace motley::advise {

enum class Objective { seconds, money, energy };

struct Question {
  planner::GraphOf graph_of;
  planner::PlanOptions options;  // model, batch, optimizer, ...; the deadline is of everything
  Cluster cluster;
  Tariffs tariffs;
  std::vector<std::string> edits;
  Objective objective = Objective::seconds;
  Seconds deadline = 0;  // of a step; 0: none
  bool groups = true;    // what each group of devices is worth
};

// What a step takes and costs under a plan.
struct Cost {
  Seconds step = 0;
  double money = 0;                              // of the devices that work, while the step lasts
  double joules = 0;                             // likewise
  bool money_known = true, joules_known = true;  // all types that work have prices, watts
};

struct Answer {
  std::string name;    // of the cluster that was asked about
  bool found = false;  // a plan that fits
  std::string reason;  // why not
  Cost cost;
  std::vector<std::pair<std::string, int>> uses;  // devices that work, by type
  int devices = 0;                                // of the cluster
  std::string plan;                               // "pipeline: 3 stages, micro-batches of 4"
};

// A group of devices: what is without it.
struct Worth {
  std::string group;
  int devices = 0;
  Answer without;           // all of it; not found: there is nothing else
  int lent = 0;             // devices of the last machine
  Answer lending;           // without these
  std::string replacement;  // the fastest type there is, or known
  Answer replaced;          // all of it, in the same places
};

struct Advice {
  Answer now;
  std::vector<Answer> edits;
  std::vector<Worth> groups;
  std::string leave_out, lend, replace;      // which group first; empty: none
  std::optional<Answer> cheapest;            // that meets the deadline
  int parts_planned = 0, parts_bounded = 0;  // of the cluster, for the cheapest
  bool out_of_time = false;
  bool priced = false, powered = false;  // whether types have prices, watts
  std::shared_ptr<Plan> plan;            // of `now`; null: there is none
};

// `known`: a plan of the cluster as it is, tried like those that are found; the cluster is not
// planned for then. Throws UserError where an edit is wrong, or what is to be least is not known of
// a type of device.
Advice advise(const Question& question, std::unique_ptr<Plan> known = nullptr);

// "seconds", "money", "energy".
const char* to_string(Objective objective);
std::string to_text(const Question& question, const Advice& advice);
Json to_json(const Question& question, const Advice& advice);

}  // namespace motley::advise
