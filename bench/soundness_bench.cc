// Soundness by running, in full: for every zoo model at toy size, on 2 to 5 workers with even,
// random and extreme ratios, random feasible programs sampled from the theory equal one device.
//   ./dev bench soundness [programs per model and number of devices, default 200] [seed]
//                         [model, default all]
#include <cstdio>
#include <cstdlib>

#include "soundness.h"

int main(int argc, char** argv) {
  int programs = argc > 1 ? std::atoi(argv[1]) : 200;
  uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::vector<motley::SoundnessCase> cases;
  for (const motley::SoundnessCase& c : motley::soundness_cases())
    if (argc <= 3 || c.model.starts_with(argv[3])) cases.push_back(c);
  auto report = motley::run_soundness(cases, {2, 3, 4, 5}, programs, seed, true);
  std::printf(
      "%d programs, worst relative error %.2e, %d refused by the checker%s%s\n", report.programs,
      report.worst, report.rejected_by_checker,
      report.worst < 1e-9 ? "" : "; worst: ", report.worst < 1e-9 ? "" : report.worst_case.c_str());
  return report.worst < 1e-9 && report.rejected_by_checker == 0 ? 0 : 1;
}
