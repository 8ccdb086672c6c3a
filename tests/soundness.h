// Soundness by running: a program is right if training with it is training on one device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/rng.h"
#include "interpret/interpret.h"
#include "shard/program.h"
#include "shard/theory.h"

namespace motley {

// Worst error of one step of a program on `shares.devices()` threads against the interpreted graph,
// over the loss, every gradient and every buffer update: |a - b| / max(|b|_max over the tensor's
// finite numbers, 1e-6). Infinite numbers and NaN must be where one device has them; else 1e300.
double program_error(const Theory& theory, const Program& program, const Shares& shares,
                     const Feeds& feeds, const StepResult& expected, uint64_t seed);

// The first value of a program that differs from one device, with the steps that made it; empty if
// none does.
std::string first_wrong_value(const Theory& theory, const Program& program, const Shares& shares,
                              const Feeds& feeds, uint64_t seed);

struct SoundnessCase {
  std::string model;
  int64_t batch = 0;
};
// Every zoo model at toy size.
const std::vector<SoundnessCase>& soundness_cases();

// Even, random and extreme ratios (one device gets almost nothing) for a number of devices.
std::vector<std::vector<double>> soundness_ratios(int devices, uint64_t seed);

struct SoundnessReport {
  int programs = 0;
  int recomputing = 0;  // of them with blocks that are computed again
  int exchanges = 0;    // boundaries in them that move pieces
  double worst = 0;
  std::string worst_case;
  int rejected_by_checker = 0;
};

// Runs `programs` random feasible programs of each model for each number of devices. With more than
// one segment every program is of a graph cut at random, forward passes in runs of nodes and some
// nodes anywhere, into at most so many, each with random ratios (zeros and equal ones among them).
SoundnessReport run_soundness(const std::vector<SoundnessCase>& cases,
                              const std::vector<int>& devices, int programs, uint64_t seed,
                              bool verbose, Theory::Lookup lookup = find_op, int segments = 1);

// A random segment below `segments` for every node; a random share for every segment and device.
std::vector<int> random_segments(const Graph& graph, int segments, Rng* rng);
Ratios random_ratios(int segments, int devices, Rng* rng);

}  // namespace motley
