// The synthesis problem of HAP section 4, stripped of tensors: what every search of this
// module solves.
//
// A *value* is a tensor of the single-device graph (or a class of aliases of one) and has a few
// *forms*: the placements it can be held in (replicated, partial, shard of a dimension). A *node*
// is an operator; each of its *options* is one Hoare triple: the form it needs of every input, the
// form it makes of every output, and what that costs. Forms convert into one another by collectives
// at a cost per value, paid once however many consumers use the result.
//
// A solution picks one option per node and, per value, a set of conversions that reaches every form
// its consumers need from the form its producer made. Its *price* under weights w and multipliers l
// is
//
//     sum over nodes of  comm + sum_j ( w_j * compute_j + l_j * memory_j )
//     +  sum over values of conversions
//
// with j over device types. For any w >= 0 with sum 1 and l = 0 the least price is a lower bound of
// the stage-synchronised time of section 3.2 (the mean of the types is at most their maximum),
// which is why the searches may work with a price per node although the time of a program is not a
// sum over nodes.
//
// Tables are shared: nodes with equal options name the same OptionTable, values of equal shape the
// same FormTable. A repeated block of layers is then visible as a repeated sequence of table
// numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/deadline.h"

namespace motley::solver {

constexpr int kMaxForms = 16;

struct FormTable {
  int forms = 1;                // at most kMaxForms
  std::vector<double> convert;  // [from * forms + to] seconds of the one collective that converts;
                                // infinity: there is none; 0: free (slicing). The diagonal is 0.
                                // Not necessarily transitively closed.
};

struct Option {
  std::vector<uint8_t> in;      // form of each input of the node
  std::vector<uint8_t> out;     // form of each output of the node
  double comm = 0;              // seconds of collectives inside the operator
  std::vector<double> compute;  // [type] seconds
  std::vector<double> memory;   // [type] bytes this choice keeps for the whole step
};

struct OptionTable {
  std::vector<Option> options;
};

struct ProblemNode {
  int table = 0;             // into Problem::option_tables
  std::vector<int> inputs;   // values; one may occur twice
  std::vector<int> outputs;  // values; each value is the output of exactly one node
  bool backward = false;     // belongs to the backward pass or the optimizer
};

struct Problem {
  int types = 1;  // device types
  std::vector<FormTable> form_tables;
  std::vector<OptionTable> option_tables;
  std::vector<int> value_table;    // [value] into form_tables
  std::vector<ProblemNode> nodes;  // in an order in which producers come before consumers
};

struct Weights {
  std::vector<double> compute;  // w_j, >= 0, sum 1
  std::vector<double> memory;   // l_j, seconds per byte, >= 0; empty: all 0
};

struct Conversion {
  int value;
  uint8_t from, to;  // one collective; `from` is available when it runs
  friend bool operator==(const Conversion&, const Conversion&) = default;
};

enum class StopReason { kOptimal, kTimeLimit, kStateLimit, kInfeasible };
const char* to_string(StopReason reason);

struct Limits {
  double time_limit_s = 1e30;             // of one program search, which then keeps fewer states
  Deadline deadline;                      // of all searches together
  int64_t max_states = int64_t{1} << 40;  // states kept at any one time
  // Ways through a node from one state that are looked at, the cheapest: of a node with many inputs
  // there can be 2 to their number. Of common models none has more than 33.
  size_t max_ways = 128;
  uint64_t seed = 0;
  // Bounds are rough at first: improved until that part of them is gained no more. A search that
  // expands that many states with them begins again with tighter ones, and once more with those of
  // as many sweeps over the problem and back as go on gaining.
  double rough = 3e-3;
  int64_t rough_states = 20'000;
  int sweeps = 40;
  int64_t tight_states = 100'000;
  double tight = 1e-7;  // of the bound, that sweeps go on for
  int max_sweeps = 1000;
};

struct Solution {
  std::vector<int> option;              // [node]; empty when infeasible
  std::vector<Conversion> conversions;  // grouped by value, a producer of a form before its users
  double price = 0;                     // of this solution
  double lower_bound = 0;               // proven; equals price when stop == kOptimal
  StopReason stop = StopReason::kInfeasible;
  int64_t states = 0;  // states (partial programs) expanded
  double seconds = 0;  // wall time of the search
};

// Throws InternalError unless indices are in range, forms fit, every value has one producer before
// its consumers.
void validate(const Problem& problem);

// Price of one option under weights.
double price(const Option& option, const Weights& weights);

// Cheapest conversions of one value from form `have` to all forms in the bit set `want`; appends
// them to `out` if given. Infinity if some form cannot be reached. Exact (a Steiner arborescence by
// dynamic programming over subsets).
double complete(const FormTable& table, int have, uint32_t want, int value,
                std::vector<Conversion>* out);

// The same cost from a set of forms that are all available.
double complete_from_set(const FormTable& table, uint32_t have, uint32_t want);

// The best solution with the given options: every value completed as cheaply as possible.
Solution evaluate(const Problem& problem, const std::vector<int>& option, const Weights& weights);

// A readable dump, for tests and error reports.
std::string to_text(const Problem& problem);

}  // namespace motley::solver
