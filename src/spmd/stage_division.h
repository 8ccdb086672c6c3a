// Where the program of one part of a batch is divided into stages, so that as much as can be of what
// one part communicates hides behind what another computes (shard/duplex.h).
//
// With c_k(p) what part p computes in stage k, m_k(p) the collectives that stage needs, and k parts
// taking turns, what is computed in one half-stage is beside the communication of the next:
//
//     t = m_1(1) + sum over half-stages of  c (+) m of the half-stage behind it
//     c (+) m = max over types of  m                                if m >= (1 + a) c
//                                  c + m a / (1 + a)                otherwise
//
// a being how much slower a device type computes beside a collective (DeviceType::interference). A
// half-stage lasts as long as the slowest type takes. For two parts this is HiDup's formula, of the
// whole step: its stages are of the forward pass alone, and its backward pass is charged serially.
//
// Parts need not take turns in every stage. A stage may be taken by all of them at once, in calls on
// the rows of all parts, which take less than the calls of each. Nothing hides in it: it takes
//
//     m_k(2) + ... + m_k(parts) + all(k)
//
// behind what the stage before hides of m_k(1), collectives inside of it wait, and behind it m(1) of
// the next is waited for.
//
// A collective runs in front of the stage that reads its result, so there has to be a boundary
// between what makes its operand and what reads its result. The best of all such divisions is found
// by dynamic programming over (end of the stage before, end of this one): n positions and stages of
// at most s steps take n s^2. Where that is too much, boundaries are at steps that make or read what
// is communicated, at some of them if they are too many, and a few between.
#pragma once

#include <vector>

#include "core/units.h"

namespace motley::spmd {

struct DividedStep {
  std::vector<Seconds> compute;  // [type] of one part; collectives inside count
  Seconds comm = 0;              // of a collective, in front of the stage of step `reader`
  // Steps; -1: there from the start; the end: needed then, and sent with the last stage.
  int made = -1, reader = 0;
  bool once = false;         // of the first part alone: the result serves all
  std::vector<Seconds> all;  // [type] of all parts at once; empty: what the parts take
};

struct DivisionProblem {
  int parts = 2;                     // at least
  std::vector<double> interference;  // [type]
  std::vector<DividedStep> steps;
  bool whole = false;  // stages may be taken by all parts at once
};

struct Divided {
  Seconds seconds = 0;
  std::vector<int> begin;   // first steps of the stages, ascending from 0
  std::vector<bool> whole;  // [stage] taken by all parts at once; empty: none is
};

// Seconds of computation beside a collective: one half-stage.
Seconds beside(const std::vector<Seconds>& compute, Seconds comm,
               const std::vector<double>& interference);

// By the formula above; infinite if some collective has no boundary to run at.
Seconds division_seconds(const DivisionProblem& problem, const std::vector<int>& begin,
                         const std::vector<bool>& whole = {});

// The fastest division. `most`: about how many pairs of stages are looked at. Of many positions some
// are where stages of all parts may begin and end.
Divided divide(const DivisionProblem& problem, double most = 1e7);

}  // namespace motley::spmd
