// Times of searches.
#pragma once

namespace motley::grid::trials {

// Prints AMP's experiments with the calibrations fitted here, and larger clusters with the
// catalogue's.
void search_all();

}  // namespace motley::grid::trials
