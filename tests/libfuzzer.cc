// libFuzzer over one of formats(), in a build with clang (preset fuzz): ./dev fuzz.
//
//   libfuzzer --format=cluster [--long] -max_total_time=60 CORPUS tests/corpus/cluster
//
// Inputs are no longer than Format::most, with --long as long as the corpus' and 4096 bytes at least.
// Whatever is in the bytes, they are taken or refused by a UserError of one line; anything else,
// and what the sanitizers find, is a finding. Half of the mutations know of numbers, lines and JSON.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "formats.h"
#include "mutate_text.h"

// For more inputs a second: no stacks of allocations (a finding is run again with ASAN_OPTIONS=malloc_context_size=30),
// and 1 MB of what is freed is kept from use, which is more than most inputs free, in a processor's cache.
extern "C" const char* __asan_default_options() {
  return "detect_stack_use_after_return=0:malloc_context_size=0:max_malloc_fill_size=0:"
         "quarantine_size_mb=1:thread_local_quarantine_size_kb=64";
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
  bool any_length = false;
  for (int i = 1; i < *argc; ++i) {
    any_length = any_length || std::strcmp((*argv)[i], "--long") == 0;
    for (const motley::Format& format : motley::formats())
      if ("--format=" + format.name == (*argv)[i]) chosen = &format;
  }
  if (chosen == nullptr) {
    for (const motley::Format& format : motley::formats()) std::puts(format.name.c_str());
    std::exit(0);
  }
  if (any_length) return 0;
  // libFuzzer reads its options after this.
  static std::string most = fmt::format("-max_len={}", chosen->most);
  static std::vector<char*> words(*argv, *argv + *argc);
  words.insert(words.begin() + 1, most.data());
  words.push_back(nullptr);
  *argv = words.data();
  ++*argc;
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
      motley::mutated_text(std::string(reinterpret_cast<const char*>(data), size), seed, most);
  const size_t length = std::min(mutant.size(), most);
  std::memcpy(data, mutant.data(), length);
  return length;
}
