// Programs for people: a step in words, and a drawing of who talks to whom.
#pragma once

#include <string>

#include "reduce/synthesis.h"

namespace motley::reduce {

// "reduce-scatter inside each node", "all-reduce across nodes", "all-reduce between the first
// devices of the nodes".
std::string in_words(const Step& step, const SynthesisHierarchy& synthesis,
                     const Hierarchy& hierarchy);

// The name of every level of a synthesis hierarchy: "root", then those of the system's levels.
std::vector<std::string> level_names(const SynthesisHierarchy& synthesis,
                                     const Hierarchy& hierarchy);

// One line a step for the devices of the first reduction group: devices with the same letter talk
// to one another, capitals are roots, a dot sits the step out. A gap separates the units of the
// outermost level. More than `columns` devices are cut short.
//
//              0123 4567
//   1 reduce   Abbb ...
std::string draw(const Program& program, const SynthesisHierarchy& synthesis,
                 const Hierarchy& hierarchy, int columns = 64);

}  // namespace motley::reduce
