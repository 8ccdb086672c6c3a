// A plan as one page for people: what was chosen, what it is predicted to cost, and why.
//
// The page is whole: style, script and data are in it, and its content policy forbids the browser
// to ask anybody for more. Everything in it follows from the plan (and the simulation of it) and
// from what is passed beside it, so equal ones give equal pages. Its size is bounded whatever the
// plan's: equal devices share a row, what looks alike in the cluster is drawn once, and neighbouring
// short spans of the timeline become one (timeline.h).
#pragma once

#include <string>

#include "advise/advise.h"
#include "explain/explain.h"
#include "plan/plan.h"

namespace motley {

struct ReportParts {
  const explain::Explanation* explanation = nullptr;  // null: the page goes without
  explain::Options explained;                         // how it was made
  const advise::Question* question = nullptr;
  const advise::Advice* advice = nullptr;  // the answer; null: the page goes without
};

// REQUIRES: check(plan, false) finds nothing; the parts are of this plan.
std::string to_html(const Plan& plan, const ReportParts& parts = {});

}  // namespace motley
