#include "core/blas.h"

#include <dlfcn.h>

namespace motley {

namespace {

template <typename F>
F openblas(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

bool one_at_a_time() {
  const auto parallel = openblas<int (*)()>("openblas_get_parallel");
  return parallel != nullptr && parallel() == 0;
}

}  // namespace

void set_blas_threads(int threads) {
  if (const auto set = openblas<void (*)(int)>("openblas_set_num_threads")) set(threads);
}

void end_blas_threads() {
  if (const auto end = openblas<int (*)()>("blas_thread_shutdown_")) end();
}

std::unique_lock<std::mutex> blas_turn() {
  static const bool alone = one_at_a_time();
  static std::mutex mutex;
  return alone ? std::unique_lock(mutex) : std::unique_lock<std::mutex>();
}

}  // namespace motley
