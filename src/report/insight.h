// Why a plan takes as long as it does, and what changes would give: sections of a page.
#pragma once

#include <string>

#include "advise/advise.h"
#include "explain/explain.h"

namespace motley::report {

// What people would run otherwise, with speed-ups; other plans that were found are folded away.
// `step`: of the plan.
std::string choice_section(const Plan& plan, Seconds step);

std::string explanation_section(const Plan& plan, const explain::Explanation& explanation,
                                const explain::Options& options);

// `step`: of the plan.
std::string what_if_section(const advise::Question& question, const advise::Advice& advice,
                            Seconds step);

}  // namespace motley::report
