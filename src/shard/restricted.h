// Programs that were found under a restricted theory (Theory::restrict_to).
#pragma once

#include "shard/program.h"

namespace motley {

// Their steps as those of the whole theory of the same graph.
Program renumbered(const Theory& restricted, const Theory& theory, const Program& program);

}  // namespace motley
