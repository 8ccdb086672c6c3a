#include "runtime/second_copies.h"

#include <ATen/ATen.h>

#include <map>
#include <memory>

#include "cluster/second_holders.h"
#include "core/error.h"
#include "core/fault.h"
#include "runtime/pieces.h"

namespace motley {

namespace {

constexpr int kSecondTag = 1 << 19;  // away from those of reductions in steps and of idle workers

}  // namespace

at::Tensor SecondCopies::Kept::of(const at::Tensor& whole) const {
  return take_piece(part, whole.contiguous().view({-1}));
}

SecondCopies::SecondCopies(const Plan& plan, const Worker& worker, Communicator& group)
    : worker_(worker),
      group_(group),
      to_(second_holders(plan.cluster)[group.rank()]),
      from_(first_holders(plan.cluster)[group.rank()]) {
  MOTLEY_CHECK(plan.redundancy == 1 && !plan.pipeline && !plan.duplex && group.size() > 1);
  const Graph& graph = *plan.graph;
  for (size_t i = 0; i < worker.parameters().size(); ++i)
    if (worker.parameter_is_cut(i))
      parameters.push_back({i,
                            graph.parameters[worker.parameters()[i]].name,
                            worker.parameter_part_of(i, from_),
                            {}});
  for (size_t i = 0; i < worker.buffers().size(); ++i)
    if (worker.buffer_is_cut(i))
      buffers.push_back(
          {i, graph.buffers[worker.buffers()[i]].name, worker.buffer_part_of(i, from_), {}});
}

void SecondCopies::receive(const std::vector<at::Tensor>& own) {
  std::vector<at::Tensor> mine;
  std::vector<int64_t> counts;
  std::vector<Kept*> trained;
  for (Kept& kept : parameters) {
    const at::Tensor& gradient = own[kept.index].grad();
    if (!gradient.defined()) continue;  // on no worker
    trained.push_back(&kept);
    mine.push_back(gradient);
    counts.push_back(kept.part.count);
  }
  for (const Kept& kept : buffers) {
    mine.push_back(worker_.buffer(kept.index));
    counts.push_back(kept.part.count);
  }
  fault_point("second");
  const std::vector<at::Tensor> theirs = exchange(mine, counts);
  fault_point("second");
  for (size_t i = 0; i < trained.size(); ++i) trained[i]->piece.mutable_grad() = theirs[i];
  for (size_t b = 0; b < buffers.size(); ++b) buffers[b].piece = theirs[trained.size() + b].clone();
}

void SecondCopies::trade(const at::Tensor& mine, at::Tensor& theirs) {
  std::unique_ptr<Message> coming, going;
  if (theirs.numel() > 0) coming = group_.receive(theirs, from_, kSecondTag);
  if (mine.numel() > 0) going = group_.send(mine, to_, kSecondTag);
  if (coming) coming->wait();
  if (going) going->wait();
}

std::vector<at::Tensor> SecondCopies::exchange(const std::vector<at::Tensor>& mine,
                                               const std::vector<int64_t>& counts) {
  std::map<at::ScalarType, std::vector<size_t>> by_type;
  for (size_t i = 0; i < mine.size(); ++i) by_type[mine[i].scalar_type()].push_back(i);
  std::vector<at::Tensor> theirs(mine.size());
  for (const auto& [type, list] : by_type) {
    std::vector<at::Tensor> flat;
    int64_t count = 0;
    for (size_t i : list) {
      flat.push_back(mine[i].detach().reshape({-1}));
      count += counts[i];
    }
    at::Tensor coming = at::empty({count}, flat[0].options());
    trade(at::cat(flat), coming);
    int64_t begin = 0;
    for (size_t i : list) {
      theirs[i] = coming.narrow(0, begin, counts[i]);
      begin += counts[i];
    }
  }
  return theirs;
}

}  // namespace motley
