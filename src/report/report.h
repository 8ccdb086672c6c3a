// A plan as one page for people: what was chosen, what it is predicted to cost, and why.
//
// The page is whole: style, script and data are in it, and its content policy forbids the browser
// to ask anybody for more. Everything in it follows from the plan (and the simulation of it), so
// equal plans give equal pages. Its size is bounded whatever the plan's: equal devices share a row,
// and neighbouring short spans of the timeline become one (timeline.h).
#pragma once

#include <string>

#include "plan/plan.h"

namespace motley {

// REQUIRES: check(plan, false) finds nothing.
std::string to_html(const Plan& plan);

}  // namespace motley
