// Loops over independent pieces of work on several threads, which wait for the next loop behind one.
#pragma once

#include <functional>

namespace motley {

// So many threads; of 0, one per core.
int threads_of(int threads);

// Makes threads for loops to come, which otherwise the first loop does.
void start_threads(int threads);

// Calls body(0), ..., body(n - 1) on up to `threads` threads (0: one per core), this one among
// them. What a body throws keeps others from starting, and is thrown again here.
void parallel_for(int n, int threads, const std::function<void(int)>& body);

}  // namespace motley
