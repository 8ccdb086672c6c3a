// What communicators have in common; collectives of pieces of very different sizes, as chains around the ring.
#include "comm/communicator.h"

#include <ATen/ATen.h>

#include "core/error.h"
#include "net/collectives.h"

namespace motley {

namespace {

constexpr int kTag = 1 << 30;

// Elements of a chunk, the same on every rank.
int64_t chunk_numel(const std::vector<at::Tensor>& pieces) {
  int64_t largest = 1;
  for (const at::Tensor& piece : pieces) largest = std::max(largest, piece.numel());
  const auto size = static_cast<int64_t>(pieces[0].element_size());
  return std::max<int64_t>(
      1, static_cast<int64_t>(chunk_bytes(static_cast<double>(largest * size))) / size);
}

// A piece as flat views of at most so many elements; none of an empty piece.
std::vector<at::Tensor> chunks_of(const at::Tensor& piece, int64_t most) {
  MOTLEY_CHECK(piece.is_contiguous(), "a piece is not contiguous");
  const at::Tensor flat = piece.view({-1});
  std::vector<at::Tensor> chunks;
  for (int64_t at = 0; at < flat.numel(); at += most)
    chunks.push_back(flat.narrow(0, at, std::min(most, flat.numel() - at)));
  return chunks;
}

using Messages = std::vector<std::unique_ptr<Message>>;

class CopiedBack final : public Message {
 public:
  CopiedBack(at::Tensor tensor, at::Tensor copy, std::unique_ptr<Message> message)
      : tensor_(std::move(tensor)), copy_(std::move(copy)), message_(std::move(message)) {}
  void wait() override {
    if (message_) {
      message_->wait();
      arrived_ = message_->arrived();
    }
    if (tensor_.defined()) tensor_.copy_(copy_);
    message_.reset();
    tensor_.reset();
    copy_.reset();
  }
  std::optional<double> arrived() const override { return arrived_; }

 private:
  at::Tensor tensor_, copy_;
  std::unique_ptr<Message> message_;
  std::optional<double> arrived_;
};

}  // namespace

std::unique_ptr<Message> copied_back(at::Tensor tensor, at::Tensor copy,
                                     std::unique_ptr<Message> message) {
  return std::make_unique<CopiedBack>(std::move(tensor), std::move(copy), std::move(message));
}

void Communicator::all_gather_grouped(std::vector<at::Tensor>& pieces) {
  const int p = size(), left = (rank() + p - 1) % p, right = (rank() + 1) % p;
  if (p == 1) return;
  // [hops travelled so far]: this rank's piece, its left neighbour's, ...
  std::vector<std::vector<at::Tensor>> chunks;
  std::vector<Messages> coming(p);
  Messages going;
  const int64_t most = chunk_numel(pieces);
  for (int k = 0; k < p; ++k) {
    chunks.push_back(chunks_of(pieces[(rank() - k + p) % p], most));
    if (k == 0) continue;
    for (at::Tensor& chunk : chunks[k]) coming[k].push_back(receive(chunk, left, kTag));
  }
  for (int k = 0; k < p; ++k)
    for (size_t c = 0; c < chunks[k].size(); ++c) {
      if (k > 0) coming[k][c]->wait();
      if (k + 1 < p) going.push_back(send(chunks[k][c], right, kTag));
    }
  for (auto& message : going) message->wait();
}

at::Tensor Communicator::reduce_scatter_grouped(const std::vector<at::Tensor>& pieces) {
  const int p = size(), left = (rank() + p - 1) % p, right = (rank() + 1) % p;
  if (p == 1) return pieces[0].clone();
  const at::ScalarType type = pieces[0].scalar_type();
  const at::ScalarType sum = sums_in_f32(type) ? at::kFloat : type;
  // [hops travelled so far]: the sum for a rank starts at its right neighbour.
  std::vector<at::Tensor> sums;
  std::vector<std::vector<at::Tensor>> chunks;
  std::vector<Messages> coming(p);
  Messages going;
  const int64_t most = chunk_numel(pieces);
  auto mine = [&](int k) { return pieces[(rank() - 1 - k + 2 * p) % p].to(sum); };
  for (int k = 0; k < p; ++k) {
    sums.push_back(k == 0 ? mine(0) : at::empty_like(mine(k)));
    chunks.push_back(chunks_of(sums[k], most));
    if (k == 0) continue;
    for (at::Tensor& chunk : chunks[k]) coming[k].push_back(receive(chunk, left, kTag));
  }
  for (int k = 0; k < p; ++k) {
    const std::vector<at::Tensor> own = chunks_of(mine(k), most);
    for (size_t c = 0; c < chunks[k].size(); ++c) {
      if (k > 0) {
        coming[k][c]->wait();
        chunks[k][c].add_(own[c]);
      }
      if (k + 1 < p) going.push_back(send(chunks[k][c], right, kTag));
    }
  }
  for (auto& message : going) message->wait();
  return sums[p - 1].to(type);
}

}  // namespace motley
