// Random operators. Each element is drawn from (seed, step, node, global index), so that it does not
// depend on how the value is cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "interpret/interpret.h"
#include "shard/duplex.h"

namespace motley {

// Element i of the stream of one random node in one step, uniform in [0, 1).
double random_element(uint64_t seed, int64_t step, int node, int64_t index);

// Where element i of a part of a value is in the whole.
struct InWhole {
  InWhole() = default;
  // One of equal parts.
  InWhole(const PartCut& cut, int parts, int64_t part)
      : size(cut.size),
        length(cut.is_whole() ? 1 : cut.size / parts),
        inner(cut.inner),
        begin(part * length) {}
  explicit InWhole(const Duplex::Rows& rows)
      : size(rows.cut.size),
        length(rows.cut.is_whole() ? 1 : rows.length),
        inner(rows.cut.inner),
        begin(rows.begin) {}
  // Rows [first, first + rows) of an axis of `of_size` rows of `row` elements.
  InWhole(int64_t of_size, int64_t rows, int64_t row, int64_t first)
      : size(of_size), length(rows), inner(row), begin(first) {}
  // ((i / (inner length)) size + begin + i / inner mod length) inner + i mod inner.
  at::Tensor of(const at::Tensor& i) const;
  int64_t size = 0, length = 1, inner = 1, begin = 0;
};

// What a random operator draws of shape `local`, on the device: element i is number
// where.back()(... where.front()(i)) of its stream. Waits for nothing and copies nothing.
at::Tensor draw(const Node& node, const Shape& local, DType dtype, uint64_t seed, int64_t step,
                int id, const std::vector<InWhole>& where, at::Device device);

// The same numbers by one kernel of the device, where there is one for devices of its type: makes
// a tensor [rows, columns] from rows [rows, 1] and columns [1, columns], which are 0, 1, 2, ... in
// the type of the result. With i = first + row width + column, element (row, column) is number
// where.back()(... where.front()(i)) of the stream.
struct NumbersAsked {
  // stream, first, width, and size, length, inner, begin of two maps.
  std::vector<int64_t> numbers;
  // Where `masked`, a last number follows: 1 where the 53 bits of the random number are below it, 0
  // elsewhere. Otherwise the random number itself, uniform in [0, 1).
  bool masked = false;
};
using NumbersKernel = std::function<at::Tensor(const at::Tensor& rows, const at::Tensor& columns,
                                               const NumbersAsked& asked)>;
// From now on on devices of this type, and on no others; an empty one: on none. One that returns an
// undefined tensor is not asked again.
void set_numbers_kernel(at::DeviceType type, NumbersKernel kernel);

// Runs the random operators of a graph on one device as the executor does; for
// InterpretOptions::kernels.
std::map<std::string, Kernel> random_kernels(uint64_t seed, int64_t step);
// The same in a micro-batch's graph, as the whole step would draw them there.
std::map<std::string, Kernel> random_kernels(uint64_t seed, int64_t step, const MicroBatch& part,
                                             int64_t micro_batch);
// Of one operator, node n drawing from stream[n].
Kernel random_kernel(uint64_t seed, int64_t step, std::vector<int> stream);

}  // namespace motley
