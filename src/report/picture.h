// The cluster as a picture: groups in one another, and how busy a step keeps every link.
//
// A link is busy for bytes / bandwidth (sim/traffic.h says which bytes), as a part of the step. What
// looks alike, loads included, is drawn once where a cluster is large.
#pragma once

#include <string>

#include "plan/plan.h"
#include "sim/simulate.h"

namespace motley::report {

// HTML: a legend, the picture and the busiest links. Styles are assets.cc's.
std::string picture(const Plan& plan, const Simulation& simulation);

// "#3b78d8", of a device type.
std::string type_colour(int type);

// "replica 0, stage 1 + 3"; empty: no work, or one program.
std::string seat_text(const Plan& plan, int device);

}  // namespace motley::report
