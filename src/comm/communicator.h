// What the executor needs of a group of devices. Pieces may be of unequal size and empty; every
// tensor is contiguous.
//
// thread_group(): devices as threads of one process, for tests and `motley verify`; sums are taken
// in rank order, so that every device gets the same bits. gloo.h: processes, over c10d. Every call
// is collective and blocks until the result is there; a device that fails takes the others down
// with an exception.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace motley {

enum class Reduction { sum, max };

// Whether sums of this type are taken in f32.
inline bool sums_in_f32(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

// The tensor itself, or a copy in the type in which it is reduced.
inline at::Tensor summable(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return sums_in_f32(type)   ? tensor.to(at::kFloat)
         : type == at::kBool ? tensor.to(at::kByte)
                             : tensor;
}

// A message on its way. The tensor it was made with is not touched until wait() returns.
class Message {
 public:
  virtual ~Message() = default;
  virtual void wait() = 0;
  // When it had arrived, in seconds of the steady clock, once it has been waited for; nothing where
  // that is not known.
  virtual std::optional<double> arrived() const { return std::nullopt; }
};

// A message of `copy`, which is kept until it has been waited for; then `tensor` gets its elements.
// `tensor` undefined: nothing does.
std::unique_ptr<Message> copied_back(at::Tensor tensor, at::Tensor copy,
                                     std::unique_ptr<Message> message);

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Where its tensors are.
  virtual at::Device device() const { return at::kCPU; }
  // Whether it has send() and receive().
  virtual bool has_messages() const { return true; }
  // Whether it exchanges pieces of any size, and not all of everything.
  virtual bool has_all_to_all() const { return true; }
  // Whether it adds 16-bit numbers as they are, and not as f32.
  virtual bool adds_half() const { return false; }
  // Some ranks as a group that the backend itself has, for one use: the same to all members, which
  // all call this in the same order. Lives as long as this one. nullptr: it has none (subgroup.h).
  virtual Communicator* among(const std::vector<int>& /*ranks*/, int /*use*/) { return nullptr; }

  // In place.
  virtual void all_reduce(at::Tensor& tensor, Reduction reduction = Reduction::sum) = 0;
  // The sum, started and not waited for; nullptr: it is done. Other collectives may be called
  // meanwhile, by all ranks in the same order.
  virtual std::unique_ptr<Message> start_all_reduce(at::Tensor& tensor) {
    all_reduce(tensor);
    return nullptr;
  }
  // pieces[r] is filled with rank r's tensor; pieces[rank()] is what this rank gives.
  virtual void all_gather(std::vector<at::Tensor>& pieces) = 0;
  // pieces[r]: this rank's contribution to rank r's result. Returns the sum of all contributions to
  // this rank.
  virtual at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) = 0;
  // The same for pieces of very different sizes (PieceForm::grouped): each travels around the ring
  // in chunks (chunk_bytes in net/collectives.h), which a rank passes on while the rest is on its
  // way. By messages, unless the backend has better.
  virtual void all_gather_grouped(std::vector<at::Tensor>& pieces);
  virtual at::Tensor reduce_scatter_grouped(const std::vector<at::Tensor>& pieces);
  // send[r] goes to rank r; receive[r], of the right shape, is filled with what rank r sends.
  virtual void all_to_all(const std::vector<at::Tensor>& send,
                          std::vector<at::Tensor>& receive) = 0;
  virtual void barrier() = 0;
  // This rank has failed: collectives of its that are under way end in an exception, where the
  // backend can end them.
  virtual void abort() {}

  // One message between two ranks, started and not waited for: it travels while the caller
  // computes. A message is met by the receive of the same tag, tag >= 1; messages of one pair and
  // tag keep their order. Throws UserError where the backend has none.
  virtual std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag);
  virtual std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag);
};

// Runs body(communicator of rank r) on `size` threads and waits for all. The first exception is
// rethrown; the other threads are released from whatever they wait for.
void run_thread_group(int size, const std::function<void(Communicator&)>& body);

}  // namespace motley
