// Calls on the rows of all parts of a batch (shard/joined.h).
#include <ATen/ATen.h>

#include "runtime/instruction.h"

namespace motley {

namespace {

// The rows of all one behind another. Where they lie so already, as those of one call do, nothing is
// copied.
at::Tensor one_behind_another(const std::vector<at::Tensor>& parts, int dim) {
  const at::Tensor& first = parts[0];
  int64_t rows = 0;
  bool in_place = true;
  for (const at::Tensor& part : parts) {
    in_place = in_place && part.is_alias_of(first) && part.strides() == first.strides() &&
               part.storage_offset() == first.storage_offset() + rows * first.stride(dim);
    rows += part.size(dim);
  }
  if (!in_place) return at::cat(parts, dim);
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes[dim] = rows;
  return first.as_strided(sizes, first.strides(), first.storage_offset());
}

}  // namespace

std::vector<at::Tensor> Executor::compute_joined(const Instruction& in) {
  const size_t operands = in.operand_rows.size(), parts = in.operands.size() / operands;
  size_t next = 0;
  std::vector<at::Tensor> all = call(
      *in.op, in.args,
      [&](ValueId) {
        const size_t i = next++;
        if (in.operand_rows[i] < 0 || in.whole_operand[i]) return values_[in.operands[i]];
        std::vector<at::Tensor> rows;
        for (size_t p = 0; p < parts; ++p) rows.push_back(values_[in.operands[p * operands + i]]);
        return one_behind_another(rows, in.operand_rows[i]);
      },
      options_.device);
  const size_t results = in.result_rows.size();
  if (in.results.size() < parts * results) return all;  // a sum
  std::vector<at::Tensor> pieces(parts * results);
  for (size_t o = 0; o < results; ++o) {
    const int dim = in.result_rows[o];
    if (dim < 0) continue;
    if (in.whole_result[o]) {
      pieces[o] = std::move(all[o]);
      continue;
    }
    int64_t begin = 0;
    for (size_t p = 0; p < parts; ++p) {
      const int64_t length = in.result_shapes[p * results + o][dim];
      if (begin + length > all[o].size(dim)) return all;  // as run() says
      pieces[p * results + o] = all[o].narrow(dim, begin, length);
      begin += length;
    }
  }
  return pieces;
}

}  // namespace motley
