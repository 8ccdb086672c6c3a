// The reduction language (P2 sections 3.3 and 3.4): which devices take part in a step.
//
// A synthesis hierarchy is levels e_0 .. e_L with e_0 = (root, 1); its devices are numbered with
// the outermost level most significant, and below[i] = product of the levels after i. A form names
// groups:
//
//   (i, InsideGroup)   the consecutive blocks of below[i] devices
//   (i, Parallel(j))   j an ancestor of i: in every block P of below[j] devices, for every offset
//                      o < below[i], the group {P + o + t * below[i]}
//   (i, Master(j))     the same, o = 0 only
//
// Groups of one device are dropped; forms with the same set of groups are one form, and the first
// in the order above is kept. A form that spans levels (j, i] joins devices that differ there only
// (InsideGroup: levels after i).
//
// The levels come from a placement in one of these ways (3.4):
//
//   system      (a)  the hierarchy itself
//   column      (b)  every factor of the matrix, level by level
//   row         (c)  every factor, axis by axis
//   reduction   (d)  the factors of the reduction axes, axis by axis
//   collapsed        (d) with the factors of one level multiplied into one; what the paper runs.
//   With
//                    one reduction axis it is (d).
//
// Theorem 3.2 orders them by the programs they express, (d) >= (c) >= (b) >= (a), for one reduction
// axis. The tests confirm that (d) contains the others and (b) contains (a); (c) >= (b) holds for
// programs without Master only: Master on (c) takes the first replica, on (b) one in every replica.
//
// Levels of size 1 are dropped. With (a) to (c) the devices of a synthesis hierarchy are all
// devices of the system; with (d) they are the members of one reduction group, and a form is
// applied in all.
#pragma once

#include <string>
#include <vector>

#include "net/device_states.h"
#include "reduce/placement.h"

namespace motley::reduce {

enum class Shape { inside, parallel, master };

struct Form {
  Shape shape = Shape::inside;
  int slice = 0;     // i
  int ancestor = 0;  // j; not for inside
  friend bool operator==(const Form&, const Form&) = default;
};

using net::Groups;

// Number of devices of levels (root included).
int64_t size_of(const std::vector<int>& levels);

// The groups of a form, without those of one device.
Groups groups_of(const Form& form, const std::vector<int>& levels);

// First and last level a form spans; first > last for a form whose groups are single devices.
struct Span {
  int first = 1, last = 0;
};
Span span_of(const Form& form, const std::vector<int>& levels);

// All forms with different sets of groups.
std::vector<Form> forms_of(const std::vector<int>& levels);

enum class HierarchyKind { system, column, row, reduction, collapsed };

struct SynthesisHierarchy {
  std::vector<int> levels;  // root first, none but the root of size 1
  std::vector<int> source;  // the level of the system each comes from; -1 for the root
  Groups devices;           // [copy][number in the synthesis hierarchy] -> device of the system
};
SynthesisHierarchy synthesis_hierarchy(const Hierarchy& hierarchy, const Matrix& matrix,
                                       const std::vector<int>& reduce_axes,
                                       HierarchyKind kind = HierarchyKind::collapsed,
                                       Numbering numbering = Numbering::level_major);

// The groups of a form on the devices of the system, in every copy.
Groups lower(const Form& form, const SynthesisHierarchy& hierarchy);

}  // namespace motley::reduce
