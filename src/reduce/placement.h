// Parallelism placements (P2, MLSys 2022, section 3.1).
//
// A system is a hierarchy h_0 .. h_n, outermost level first ("node:4,gpu:16"); its devices are
// numbered in that order, outermost level most significant, which is the rank order of a cluster
// file. Parallelism axes p_0 .. p_m share it out: a placement is a matrix x with
//
//     product over axes of x[i][j] = h_j        product over levels of x[i][j] = p_i
//
// x[i][j] says over how many parts of level j axis i is spread. Within a level the axes are digits,
// axis 0 most significant. A reduction over some axes joins the devices that differ in the digits
// of those axes only: a reduction group. Its devices are numbered by those digits, level by level
// (`level_major`), so that the devices of one node are neighbours; `axis_major` numbers them axis
// by axis, as the paper's runs over several axes appear to.
//
// Cost: the matrices are enumerated level by level, with the axes' remaining factors deciding
// early; O(levels * axes) each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace motley::reduce {

constexpr int kMaxLevels = 8;  // of a hierarchy
constexpr int kMaxAxes = 8;
constexpr int64_t kMaxPlacements = 20000;

struct Level {
  std::string name;
  int size = 1;
  friend bool operator==(const Level&, const Level&) = default;
};
using Hierarchy = std::vector<Level>;

// "node:4,gpu:16". Throws UserError on anything else, on sizes below 1 and on more devices than
// motley plans for.
Hierarchy parse_hierarchy(const std::string& text);
std::string to_string(const Hierarchy& hierarchy);
int devices_of(const Hierarchy& hierarchy);

// "16,2,2": the sizes of the axes; "0,2": axes to reduce over. Throw UserError.
std::vector<int> parse_axes(const std::string& text, const Hierarchy& hierarchy);
std::vector<int> parse_reduce_axes(const std::string& text, int axes);

struct Matrix {
  int axes = 0, levels = 0;
  std::vector<int> factors;  // [axis * levels + level]
  int at(int axis, int level) const { return factors[axis * levels + level]; }
  friend bool operator==(const Matrix&, const Matrix&) = default;
};
std::string to_string(const Matrix& matrix);  // "[[2 2] [2 8]]"

// All placements, in lexicographic order of the columns, larger factors first. Throws UserError if
// there are more than kMaxPlacements.
std::vector<Matrix> placements(const Hierarchy& hierarchy, const std::vector<int>& axes);

enum class Numbering { level_major, axis_major };

// The reduction groups of a placement: every device in exactly one, each in the order of
// `numbering`, groups by their first device.
std::vector<std::vector<int>> reduction_groups(const Matrix& matrix,
                                               const std::vector<int>& reduce_axes,
                                               Numbering numbering = Numbering::level_major);

// The devices by their numbers along the axes, axis 0 most significant.
std::vector<int> devices_by_axis(const Matrix& matrix);

// The factor of every level over the reduction axes together.
std::vector<int> reduced_factors(const Matrix& matrix, const std::vector<int>& reduce_axes);

}  // namespace motley::reduce
