// libFuzzer over one of formats(), in a build with clang (preset fuzz): ./dev fuzz.
//
//   libfuzzer --format=cluster -max_total_time=60 CORPUS tests/corpus/cluster
//
// Whatever is in the bytes, they are taken or refused by a UserError of one line; anything else,
// and what the sanitizers find, is a finding. Half of the mutations know of numbers, lines and JSON.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "formats.h"
#include "mutate_text.h"

// For more inputs a second: short stacks of allocations, and what is freed is kept for less long.
extern "C" const char* __asan_default_options() {
  return "detect_stack_use_after_return=0:malloc_context_size=3:quarantine_size_mb=16";
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

namespace {

const motley::Format* chosen = nullptr;

[[noreturn]] void found(const char* what, const char* why) {
  std::fprintf(stderr, "%s: %s: %s\n", chosen->name.c_str(), what, why);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i)
    for (const motley::Format& format : motley::formats())
      if ("--format=" + format.name == (*argv)[i]) chosen = &format;
  if (chosen == nullptr) {
    for (const motley::Format& format : motley::formats()) std::puts(format.name.c_str());
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    chosen->read(std::string(reinterpret_cast<const char*>(data), size));
  } catch (const motley::UserError& e) {
    if (std::strchr(e.what(), '\n') != nullptr) found("a refusal of several lines", e.what());
  } catch (const std::exception& e) {
    found("not refused but thrown", e.what());
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  if (!chosen->text || seed % 2 == 0) return LLVMFuzzerMutate(data, size, most);
  const std::string mutant =
      motley::mutated_text(std::string(reinterpret_cast<const char*>(data), size), seed);
  const size_t length = std::min(mutant.size(), most);
  std::memcpy(data, mutant.data(), length);
  return length;
}
