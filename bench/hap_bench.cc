// The evaluation of the HAP paper (EuroSys 2024, section 7) in predicted form: Table 1, Figures 13
// to 17 and 19, and how good the planner's answers are.
//
//   hap_bench [FOLDER [SECTION]...]   sections: models, heterogeneous, homogeneous, ablation,
//                                     concurrent, experts, search, sweep, segments; without
//                                     one, all
//
// Of several sections each is a process of its own, as many at a time as there are cores; that of
// search times runs alone.
//
// Times are the event simulator's on the catalogue's devices. The batch grows with the devices as
// in section 7.1, and 8 k devices are k of each of the 8 machines (of 4 machines 2 k). "HAP" is the
// search with plain collectives, over all devices; of any number of experts (Figure 17) devices
// may be left out, as a share of zero would have it. Beside it stands "all four": every device is
// made to take part, which is slower (nothing returns that plan unless it is asked to). "motley"
// may also leave devices out everywhere, and reduce in steps (P2). Baselines: DP-EV, DP-CP, ZeRO
// (every parameter cut), experts cut evenly. Beside them stands what the paper measured
// (data/hap_paper.csv, the rows of its text; it has no tables of these figures). Searches are timed
// in processor time of their one thread, capture not counted.
//
// Certificates, as gaps between a plan and what no program is faster than:
//
//   gap         HAP's plan, programs on the same devices at the same shares; "apart": in HAP's own
//               model, in which nothing overlaps
//   motley's    motley's plan, likewise
//
// Writes FOLDER/hap.csv and FOLDER/hap-N.svg if a folder is given. The exit code is 1 if a model
// has the wrong size, or a plan is slower than a baseline, slower with segments than without,
// slower with devices that may be left out than over all, or not certified within 1%: HAP's plan in
// time with overlap or, where that bound is loose, in HAP's own model; motley's likewise. The gap
// of "all four" is printed, up to 40%: types of devices wait for one another in turn there, which
// no weights of types see.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "hap_output.h"
#include "hap_sections.h"

namespace motley::hap {
namespace {

struct Section {
  const char* name;
  void (*run)(Bench*);
  bool alone;  // its processor times are reported
  int start;   // the longest first
};

const Section kSections[] = {
    {"models", models, false, 7},           {"heterogeneous", heterogeneous, false, 2},
    {"homogeneous", homogeneous, false, 3}, {"ablation", ablation, false, 6},
    {"concurrent", concurrent, false, 5},   {"experts", experts, false, 1},
    {"search", search_times, true, 0},      {"sweep", sweep, false, 4},
    {"segments", segments, false, 5}};

// A section in a process of its own.
struct Part {
  const Section* section;
  std::FILE *out, *rows;
  pid_t process = -1;
  bool done = false;
};

std::string text_of(std::FILE* file) {
  std::string text;
  std::rewind(file);
  char buffer[1 << 16];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;) text.append(buffer, n);
  return text;
}

void start(Part* part, const std::string& folder) {
  std::fflush(stdout);
  part->process = ::fork();
  MOTLEY_CHECK(part->process >= 0, "no process for a section");
  if (part->process > 0) return;
  ::dup2(::fileno(part->out), 1);
  int failures = 1;
  try {
    Bench bench(folder, part->rows);
    part->section->run(&bench);
    failures = std::min(bench.failures(), 250);
  } catch (const std::exception& e) {
    std::printf("  FAILED: %s\n", e.what());
  }
  std::fflush(stdout);
  std::fflush(part->rows);
  ::_exit(failures);
}

int run(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string folder = argc > 1 ? argv[1] : "";
  std::vector<Part> parts;
  for (const Section& section : kSections)
    if (argc <= 2 || std::find(argv + 2, argv + argc, std::string(section.name)) != argv + argc)
      parts.push_back({&section, std::tmpfile(), std::tmpfile()});
  for (int i = 2; i < argc; ++i)
    if (std::none_of(std::begin(kSections), std::end(kSections),
                     [&](const Section& s) { return std::string(argv[i]) == s.name; }))
      throw user_error("hap_bench", "there is no section '{}'; see the head of hap_bench.cc",
                       argv[i]);
  std::vector<Part*> queue;
  for (Part& part : parts) queue.push_back(&part);
  std::stable_sort(queue.begin(), queue.end(), [](const Part* a, const Part* b) {
    return a->section->start < b->section->start;
  });
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  std::string rows = "figure,model,devices,system,value,unit\n";
  int failures = 0;
  size_t running = 0, begun = 0, printed = 0;
  bool alone = false;
  while (printed < parts.size()) {
    while (begun < queue.size() && !alone && running < cores &&
           !(queue[begun]->section->alone && running > 0)) {
      alone = queue[begun]->section->alone;
      start(queue[begun++], folder);
      ++running;
    }
    int status = 0;
    const pid_t ended = ::wait(&status);
    MOTLEY_CHECK(ended > 0, "a section is lost");
    for (Part& part : parts)
      if (part.process == ended) part.done = true;
    --running;
    alone = false;
    const bool exited = WIFEXITED(status);
    failures += exited ? WEXITSTATUS(status) : 1;
    if (!exited) std::printf("  FAILED: a section was ended by signal %d\n", WTERMSIG(status));
    for (; printed < parts.size() && parts[printed].done; ++printed) {
      std::fputs(text_of(parts[printed].out).c_str(), stdout);
      rows += text_of(parts[printed].rows);
    }
  }
  if (!folder.empty()) std::ofstream(folder + "/hap.csv") << rows;
  if (failures > 0) std::printf("\n%d expectations failed\n", failures);
  return failures > 0 ? 1 : 0;
}

}  // namespace
}  // namespace motley::hap

int main(int argc, char** argv) {
  try {
    return motley::hap::run(argc, argv);
  } catch (const motley::UserError& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
}
