// Segments of a model found by METIS (HAP section 5.2): the forward nodes are parted so that the
// tensors on the cut are small and the parts weigh about the same.
#pragma once

#include <vector>

#include "graph/graph.h"

namespace motley::spmd {

// What parts are balanced by: the bytes of the tensors they make and the parameters they read, or
// their floating-point operations.
enum class SegmentWeight { bytes, flops };
const char* to_string(SegmentWeight weight);

// [node] The segment of every node, below `count`, numbered in the order of the forward pass;
// backward nodes and sources as in with_backward (graph/segment.h). Fewer than `count` where METIS
// finds no more parts. Deterministic. REQUIRES: 1 <= count <= kMaxSegments.
std::vector<int> partition_segments(const Graph& graph, int count, SegmentWeight weight);

}  // namespace motley::spmd
