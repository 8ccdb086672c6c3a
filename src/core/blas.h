// What libtorch, and the solver of linear programs, multiply matrices with on CPUs, where that is
// OpenBLAS.
#pragma once

#include <mutex>

namespace motley {

// Threads of one product in this process.
void set_blas_threads(int threads);

// Ends the threads that are made as the library is loaded and then wait for a tenth of a second by
// spinning, on cores that others need. A product that is to take several makes them again.
// REQUIRES: no product runs.
void end_blas_threads();

// To be held while an operator runs that may multiply. OpenBLAS built without threads (Debian's
// libopenblas0-serial) mixes up products that several threads take at the same time: with it this
// holds a lock of the process, and else nothing.
std::unique_lock<std::mutex> blas_turn();

}  // namespace motley
