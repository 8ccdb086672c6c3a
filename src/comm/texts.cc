#include "comm/texts.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace motley {

std::vector<std::string> gather_texts(Communicator& group, const std::string& mine) {
  at::Tensor sizes = at::zeros({group.size()}, at::kLong);
  sizes[group.rank()] = static_cast<int64_t>(mine.size());
  sizes = sizes.to(group.device());
  group.all_reduce(sizes);
  sizes = sizes.to(at::kCPU);
  std::vector<at::Tensor> pieces;
  for (int r = 0; r < group.size(); ++r)
    pieces.push_back(at::empty({sizes[r].item<int64_t>()}, at::kByte));
  std::copy(mine.begin(), mine.end(), pieces[group.rank()].data_ptr<uint8_t>());
  for (at::Tensor& piece : pieces) piece = piece.to(group.device());
  group.all_gather(pieces);
  std::vector<std::string> texts;
  for (at::Tensor& piece : pieces) {
    const at::Tensor bytes = piece.to(at::kCPU);
    const auto* data = reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>());
    texts.emplace_back(data, data + bytes.numel());
  }
  return texts;
}

}  // namespace motley
