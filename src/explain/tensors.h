// How large tensors are held, and what holding them otherwise would cost.
#pragma once

#include <vector>

#include "explain/explain.h"

namespace motley::explain {

// The `options.tensors` largest groups of equal tensors: parameters whose names differ in numbers
// alone, and forward values of nodes that look alike. Of pipelines those of each stage by itself,
// in replica 0, and the others as far as they run the same program on as many equal devices. Sets
// *out_of_time if some were left out.
std::vector<TensorChoice> tensor_choices(Plan* plan, const Options& options,
                                         const Deadline& deadline, bool* out_of_time);

}  // namespace motley::explain
