#include "grid/schedule.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace motley::grid {

namespace {

std::vector<Seconds> simulate_blocking(const Pipeline& p, int micro_batches) {
  const int stages = static_cast<int>(p.forward.size());
  std::vector<Seconds> now(stages, 0.0);
  const int steps = 2 * (micro_batches + stages - 1);
  // The micro-batch of stage s at a step, if it is in range: forward when step and s have the same
  // parity.
  auto forward_of = [&](int s, int step) { return (step - s) / 2; };
  auto backward_of = [&](int s, int step) { return (step - (2 * stages - s - 1)) / 2; };
  auto valid = [&](int first, int step, int m) { return step >= first && m < micro_batches; };
  for (int step = 0; step <= steps; ++step) {
    // Right sides run forward at this step: they have the step's parity.
    for (int right = step % 2 == 0 ? 2 : 1; right < stages; right += 2) {
      Seconds forth = 0, back = 0;
      bool sends = false;
      if (valid(right, step, forward_of(right, step))) {
        forth = p.activation[right - 1];
        sends = true;
      }
      // What the right side's backward of the step before produced.
      if (step > 2 * stages - right - 1 && backward_of(right, step - 1) < micro_batches) {
        back = p.gradient[right - 1];
        sends = true;
      }
      if (!sends) continue;
      const Seconds meet = std::max(now[right - 1], now[right]);
      now[right - 1] = now[right] = meet + std::max(forth, back);
    }
    for (int s = 0; s < stages; ++s) {
      if ((step - s) % 2 == 0) {
        if (valid(s, step, forward_of(s, step))) now[s] += p.forward[s];
      } else if (valid(2 * stages - s - 1, step, backward_of(s, step))) {
        now[s] += p.backward[s];
      }
    }
  }
  return now;
}

// Transfers of one direction over a boundary of stages, in the order of production.
struct Link {
  Seconds free = 0;
  Seconds send(Seconds produced, Seconds transfer) {
    return free = std::max(free, produced) + transfer;
  }
};

// Overlapped 1F1B. Stage s runs backward m right behind forward m + stages - 1 - s, and forward m
// right behind backward m + s - stages. So at a step k every stage runs forward k - s, then backward
// k - stages + 1, and what a forward pass needs arrived at the step before.
std::vector<Seconds> simulate_overlapped(const Pipeline& p, int micro_batches) {
  const int stages = static_cast<int>(p.forward.size());
  std::vector<Seconds> now(stages, 0.0), arrived(stages, 0.0);  // [stage], forward
  std::vector<Link> right(stages), left(stages);                // of a stage
  for (int step = 0; step < micro_batches + stages - 1; ++step) {
    for (int s = std::min(step, stages - 1); s >= std::max(0, step - micro_batches + 1); --s) {
      now[s] = std::max(now[s], arrived[s]) + p.forward[s];
      if (s + 1 < stages) arrived[s + 1] = right[s].send(now[s], p.activation[s]);
    }
    if (step < stages - 1) continue;
    Seconds in = 0;
    for (int s = stages - 1; s >= 0; --s) {
      now[s] = std::max(now[s], in) + p.backward[s];
      if (s > 0) in = left[s].send(now[s], p.gradient[s - 1]);
    }
  }
  return now;
}

// Interleaved 1F1B of v ranges a stage. The k-th forward and the k-th backward pass of all stages
// are of the same micro-batch, and of the ranges in the same round, the (k / stages) % v-th from
// their end. At a step t every stage s runs forward pass t - s, then backward pass
// t - (v + 1) * stages + 2 + s, and what both need arrived at the step before, but for the first
// backward pass of a micro-batch.
class Interleaved {
 public:
  Interleaved(const Pipeline& p, int stages, int micro_batches, bool blocking)
      : p_(p),
        stages_(stages),
        rounds_(static_cast<int>(p.forward.size()) / stages),
        total_(micro_batches * rounds_),
        blocking_(blocking),
        now_(stages, 0.0),
        forth_(stages, 0.0),
        back_(stages, 0.0),
        right_(p.forward.size()),
        left_(p.forward.size()),
        round_(static_cast<size_t>(stages) * rounds_) {
    for (size_t k = 0; k < round_.size(); ++k) round_[k] = static_cast<int>(k) / stages;
  }

  std::vector<Seconds> run() {
    const int steps = total_ + (rounds_ + 1) * stages_ - 2;
    // As many micro-batches as stages: all forward passes come first.
    const bool forward_first = total_ == static_cast<int>(round_.size());
    for (int step = 0; step < steps; ++step) {
      forward(step);
      if (!forward_first) backward(step);
    }
    for (int step = 0; forward_first && step < steps; ++step) backward(step);
    return std::move(now_);
  }

 private:
  int ranges() const { return static_cast<int>(p_.forward.size()); }

  void forward(int step) {
    const Seconds round_trip = forth_[0];  // from the last stage, of the step before
    for (int s = std::min(step, stages_ - 1); s >= std::max(0, step - total_ + 1); --s) {
      const int round = round_[(step - s) % round_.size()], range = round * stages_ + s;
      Seconds end = now_[s];
      if (range > 0) end = std::max(end, s > 0 ? forth_[s] : round_trip);
      if (blocking_ && range > 0) end += p_.activation[range - 1];
      now_[s] = end += p_.forward[range];
      const bool last = range + 1 == ranges();
      const Seconds transfer = last ? 0 : p_.activation[range];
      const Seconds arrival = blocking_ ? end : right_[range].send(end, transfer);
      if (last)
        turned_.push_back(arrival);
      else
        forth_[s + 1 < stages_ ? s + 1 : 0] = arrival;
    }
  }

  void backward(int step) {
    const Seconds round_trip = back_[stages_ - 1];  // from the first stage, of the step before
    for (int s = 0; s < stages_; ++s) {
      const int k = step - (rounds_ + 1) * stages_ + 2 + s;
      if (k < 0 || k >= total_) continue;
      const int round = rounds_ - 1 - round_[k % round_.size()], range = round * stages_ + s;
      const bool first = range + 1 == ranges();
      const Seconds in = first ? turned_[next_turned_++] : s + 1 < stages_ ? back_[s] : round_trip;
      Seconds end = std::max(now_[s], in);
      if (blocking_ && !first) end += p_.gradient[range];
      now_[s] = end += p_.backward[range];
      if (range == 0) continue;
      back_[s > 0 ? s - 1 : stages_ - 1] =
          blocking_ ? end : left_[range].send(end, p_.gradient[range - 1]);
    }
  }

  const Pipeline& p_;
  const int stages_, rounds_, total_;  // passes of a stage in one direction
  const bool blocking_;
  std::vector<Seconds> now_, forth_, back_;  // [stage]; what arrived there
  std::vector<Link> right_, left_;           // of a range
  std::vector<Seconds> turned_;              // what the last range computed, by micro-batch
  size_t next_turned_ = 0;
  std::vector<int> round_;  // of the passes of one group of micro-batches
};

}  // namespace

std::vector<Seconds> simulate_1f1b(const Pipeline& pipeline, int micro_batches, Runtime runtime) {
  MOTLEY_CHECK(micro_batches >= 1 && !pipeline.forward.empty() &&
               pipeline.activation.size() + 1 >= pipeline.forward.size());
  if (runtime == Runtime::motley) return simulate_overlapped(pipeline, micro_batches);
  return simulate_blocking(pipeline, micro_batches);
}

std::vector<Seconds> simulate_interleaved(const Pipeline& pipeline, int stages, int micro_batches,
                                          Runtime runtime) {
  const int ranges = static_cast<int>(pipeline.forward.size());
  MOTLEY_CHECK(ranges % stages == 0 && micro_batches % stages == 0);
  return Interleaved(pipeline, stages, micro_batches, runtime != Runtime::motley).run();
}

std::vector<Seconds> finish_bounds(const Pipeline& p, int stages, int micro_batches,
                                   Runtime runtime) {
  const int ranges = static_cast<int>(p.forward.size());
  std::vector<Seconds> load(stages, 0.0), in(stages, 0.0), both(stages, 0.0), bound(stages, 0.0);
  Seconds forth = 0, way = 0;  // into range r: forward only; forward and, at last, back
  for (int r = 0; r < ranges; ++r) {
    const int s = r % stages;
    if (r < stages) in[s] = forth, both[s] = way;
    load[s] += p.forward[r] + p.backward[r];
    forth += p.forward[r];
    way += p.forward[r] + p.backward[r];
    if (r + 1 == ranges) break;
    forth += p.activation[r];
    way += p.activation[r] + p.gradient[r];
    if (runtime == Runtime::motley || ranges > stages) continue;
    const Seconds exchange = std::max(p.activation[r], p.gradient[r]);
    load[s] += exchange;
    load[s + 1] += exchange;
  }
  // A blocking stage takes part in the transfer that ends its way in, so that the transfer is in
  // `load` already.
  const bool counted = runtime != Runtime::motley && ranges == stages;
  for (int s = 0; s < stages; ++s) {
    if (counted && s > 0) {
      in[s] -= p.activation[s - 1];
      both[s] -= p.activation[s - 1] + p.gradient[s - 1];
    }
    bound[s] = in[s] + micro_batches * load[s];
    bound[0] = std::max(bound[0], both[s] + micro_batches * load[s]);
  }
  bound[0] = std::max(bound[0], way);
  return bound;
}

}  // namespace motley::grid
