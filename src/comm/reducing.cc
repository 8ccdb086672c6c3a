#include "comm/reducing.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "comm/background.h"
#include "comm/forwarding.h"
#include "comm/subgroup.h"
#include "core/error.h"

namespace motley {

namespace {

using Chunks = std::vector<std::pair<int, int>>;  // [first, first + count), ascending

constexpr int kFirstTag = 1 << 20;              // away from those of pipelines
constexpr int64_t kSegment = int64_t{1} << 18;  // elements that travel a chain together

int count(const Chunks& chunks) {
  int n = 0;
  for (const auto& [first, length] : chunks) n += length;
  return n;
}

// The i-th of n equal parts.
Chunks part(const Chunks& chunks, int i, int n) {
  const int size = count(chunks) / n;
  Chunks result;
  int skip = i * size, left = size;
  for (auto [first, length] : chunks) {
    const int away = std::min(skip, length);
    first += away, length -= away, skip -= away;
    const int take = std::min(left, length);
    if (take > 0) result.push_back({first, take});
    left -= take;
  }
  return result;
}

class Reducing final : public Forwarding {
 public:
  Reducing(Communicator& group, const std::vector<ReductionProgram>& programs) : Forwarding(group) {
    int tag = kFirstTag;
    for (const ReductionProgram& program : programs) {
      Compiled compiled;
      compiled.from = program.from;
      net::SparseStates states(size());
      for (const ReductionStep& step : program.steps) {
        Part mine;
        mine.collective = step.collective;
        for (const std::vector<int>& members : step.groups) {
          auto it = std::find(members.begin(), members.end(), rank());
          if (it == members.end()) continue;
          mine.ranks = members;
          mine.group = subgroup(group, members, tag);
          for (int d : members) mine.held.push_back(states.held(d));
        }
        mine.tag = tag++;
        if (mine.group) compiled.steps.push_back(std::move(mine));
        MOTLEY_CHECK(states.apply(step.collective, step.groups));
      }
      programs_.push_back(std::move(compiled));
    }
  }

  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    const Compiled* program = reduction == Reduction::sum ? program_for(tensor) : nullptr;
    if (program != nullptr)
      started(*program, tensor)->wait();
    else
      group_.all_reduce(tensor, reduction);
  }
  std::unique_ptr<Message> start_all_reduce(at::Tensor& tensor) override {
    const Compiled* program = program_for(tensor);
    if (program == nullptr) return group_.start_all_reduce(tensor);
    return started(*program, tensor);
  }

 private:
  // A step in which this rank takes part.
  struct Part {
    Collective collective = Collective::all_reduce;
    std::vector<int> ranks;               // of the group, the root first
    std::unique_ptr<Communicator> group;  // of those
    std::vector<Chunks> held;             // before the step, by member
    int tag = 0;
  };
  struct Compiled {
    Bytes from = 0;
    std::vector<Part> steps;
  };

  // Programs run in the background, in the order in which they were started: their messages have
  // the same tags.
  std::unique_ptr<Message> started(const Compiled& program, at::Tensor& tensor) {
    if (!background_) background_ = std::make_unique<Background>(device());
    background_->keep(tensor);
    auto all = std::make_shared<at::Tensor>(tensor);
    return message_of(*background_, background_->start([this, &program, all] {
      at::NoGradGuard no_grad;
      // Let go of before the message has arrived: whoever waits for it frees the memory.
      at::Tensor here = std::move(*all);
      run(program, here);
    }));
  }

  // nullptr: the group's own all-reduce.
  const Compiled* program_for(const at::Tensor& tensor) const {
    const bool wide = sums_in_f32(tensor.scalar_type()) && !adds_half();
    const double bytes = static_cast<double>(tensor.numel()) *
                         (wide ? 4 : static_cast<double>(tensor.element_size()));
    for (size_t i = programs_.size(); i-- > 0;)
      if (bytes >= programs_[i].from) return &programs_[i];
    return nullptr;
  }

  void run(const Compiled& program, at::Tensor& tensor) {
    const bool as_it_is = sums_in_f32(tensor.scalar_type()) && adds_half();
    at::Tensor flat = (as_it_is ? tensor : summable(tensor)).reshape({-1});
    for (const Part& step : program.steps) {
      const int n = step.group->size(), me = step.group->rank();
      const Chunks& mine = step.held[me];
      switch (step.collective) {
        case Collective::all_reduce: {
          at::Tensor sum = take(flat, mine);
          step.group->all_reduce(sum);
          put(flat, mine, sum);
          break;
        }
        case Collective::reduce_scatter: {
          std::vector<at::Tensor> pieces;
          for (int i = 0; i < n; ++i) pieces.push_back(take(flat, part(mine, i, n)));
          put(flat, part(mine, me, n), step.group->reduce_scatter(pieces));
          break;
        }
        case Collective::all_gather: {
          std::vector<at::Tensor> pieces;
          for (int i = 0; i < n; ++i) pieces.push_back(take(flat, step.held[i]));
          step.group->all_gather(pieces);
          for (int i = 0; i < n; ++i) put(flat, step.held[i], pieces[i]);
          break;
        }
        case Collective::reduce: {
          at::Tensor sum = take(flat, mine);
          chain(step, sum, /*down=*/false);
          if (me == 0) put(flat, mine, sum);
          break;
        }
        case Collective::broadcast: {
          at::Tensor all = take(flat, step.held[0]);
          chain(step, all, /*down=*/true);
          put(flat, step.held[0], all);
          break;
        }
        default:
          MOTLEY_CHECK(false, "{}", to_string(step.collective));
      }
    }
    if (!flat.is_alias_of(tensor)) tensor.copy_(flat.reshape(tensor.sizes()));
  }

  // Segments from the root to the last member (down), or from the last to the root, adding up.
  void chain(const Part& step, at::Tensor& tensor, bool down) {
    const int n = step.group->size(), me = step.group->rank();
    const int from = down ? me - 1 : me + 1, to = down ? me + 1 : me - 1;
    std::vector<std::unique_ptr<Message>> sent, coming;
    std::vector<at::Tensor> arriving, segments;
    for (int64_t at = 0; at < tensor.numel(); at += kSegment)
      segments.push_back(tensor.narrow(0, at, std::min(kSegment, tensor.numel() - at)));
    if (from >= 0 && from < n)
      for (at::Tensor& segment : segments) {
        arriving.push_back(down ? segment : at::empty_like(segment));
        coming.push_back(group_.receive(arriving.back(), step.ranks[from], step.tag));
      }
    for (size_t s = 0; s < segments.size(); ++s) {
      if (!coming.empty()) {
        coming[s]->wait();
        if (!down) segments[s].add_(arriving[s]);
      }
      if (to >= 0 && to < n) sent.push_back(group_.send(segments[s], step.ranks[to], step.tag));
    }
    for (auto& message : sent) message->wait();
  }

  int64_t begin_of(const at::Tensor& flat, int chunk) const {
    return flat.numel() * chunk / size();
  }
  at::Tensor stretch(const at::Tensor& flat, const std::pair<int, int>& chunks) const {
    const int64_t begin = begin_of(flat, chunks.first),
                  end = begin_of(flat, chunks.first + chunks.second);
    return flat.narrow(0, begin, end - begin);
  }
  // The elements of chunks, as one tensor: a view if they are one stretch.
  at::Tensor take(const at::Tensor& flat, const Chunks& chunks) const {
    if (chunks.size() == 1) return stretch(flat, chunks[0]);
    std::vector<at::Tensor> stretches;
    for (const auto& c : chunks) stretches.push_back(stretch(flat, c));
    return at::cat(stretches);
  }
  void put(const at::Tensor& flat, const Chunks& chunks, const at::Tensor& from) const {
    int64_t at = 0;
    for (const auto& c : chunks) {
      at::Tensor to = stretch(flat, c);
      if (to.data_ptr() != from.data_ptr() || chunks.size() > 1)
        to.copy_(from.narrow(0, at, to.numel()));
      at += to.numel();
    }
  }

  std::vector<Compiled> programs_;
  std::unique_ptr<Background> background_;  // from the first program on; ends before what it uses
};

}  // namespace

std::unique_ptr<Communicator> reducing(Communicator& group,
                                       const std::vector<ReductionProgram>& programs) {
  return std::make_unique<Reducing>(group, programs);
}

}  // namespace motley
