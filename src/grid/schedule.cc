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

struct Op {
  bool forward;
  int range, micro_batch;
};

// Runs every stage's operations in its order; transfers overlap, or delay their receiver.
std::vector<Seconds> run_orders(const Pipeline& p, const std::vector<std::vector<Op>>& orders,
                                int micro_batches, bool blocking) {
  const int ranges = static_cast<int>(p.forward.size());
  const int stages = static_cast<int>(orders.size());
  std::vector<Seconds> forward_in(static_cast<size_t>(ranges) * micro_batches, -1.0);
  std::vector<Seconds> backward_in(forward_in), now(stages, 0.0);
  std::vector<Seconds> right(ranges, 0.0), left(ranges, 0.0);  // links: free from
  auto at = [&](int range, int m) { return static_cast<size_t>(range) * micro_batches + m; };
  for (int m = 0; m < micro_batches; ++m) forward_in[at(0, m)] = 0;
  std::vector<size_t> next(stages, 0);
  std::vector<int> ready(stages);
  for (int s = 0; s < stages; ++s) ready[s] = stages - 1 - s;
  size_t done = 0, total = 0;
  for (const auto& order : orders) total += order.size();
  while (!ready.empty()) {
    const int s = ready.back();
    ready.pop_back();
    while (next[s] < orders[s].size()) {
      const Op& op = orders[s][next[s]];
      const Seconds in = (op.forward ? forward_in : backward_in)[at(op.range, op.micro_batch)];
      if (in < 0) break;
      Seconds end = std::max(now[s], in);
      if (blocking) {
        if (op.forward && op.range > 0) end += p.activation[op.range - 1];
        if (!op.forward && op.range + 1 < ranges) end += p.gradient[op.range];
      }
      end += op.forward ? p.forward[op.range] : p.backward[op.range];
      now[s] = end;
      ++next[s];
      ++done;
      auto deliver = [&](std::vector<Seconds>& to, int range, Seconds* link, Seconds transfer) {
        Seconds arrival = end;
        if (!blocking) arrival = *link = std::max(*link, end) + transfer;
        to[at(range, op.micro_batch)] = arrival;
        if (range % stages != s) ready.push_back(range % stages);
      };
      if (op.forward) {
        if (op.range + 1 < ranges)
          deliver(forward_in, op.range + 1, &right[op.range], p.activation[op.range]);
        else
          deliver(backward_in, op.range, &right[op.range], 0);
      } else if (op.range > 0) {
        deliver(backward_in, op.range - 1, &left[op.range - 1], p.gradient[op.range - 1]);
      }
    }
  }
  MOTLEY_CHECK(done == total, "a pipeline of {} stages and {} micro-batches is stuck", stages,
               micro_batches);
  return now;
}

// Overlapped 1F1B without lists of operations: in the order of (micro-batch, direction) every
// operation's inputs are known.
std::vector<Seconds> simulate_overlapped(const Pipeline& p, int micro_batches) {
  const int stages = static_cast<int>(p.forward.size());
  std::vector<std::vector<Op>> orders(stages);
  for (int s = 0; s < stages; ++s) {
    const int warm = std::min(micro_batches, stages - s);
    orders[s].reserve(2 * static_cast<size_t>(micro_batches));
    for (int m = 0; m < warm; ++m) orders[s].push_back({true, s, m});
    for (int m = 0; m < micro_batches; ++m) {
      orders[s].push_back({false, s, m});
      if (m + warm < micro_batches) orders[s].push_back({true, s, m + warm});
    }
  }
  return run_orders(p, orders, micro_batches, false);
}

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
  const int v = ranges / stages, total = micro_batches * v;
  std::vector<std::vector<Op>> orders(stages);
  // The k-th forward (backward) of any stage: micro-batches go in groups of `stages`, range by
  // range.
  auto op_of = [&](int s, int k, bool forward) {
    const int group = k / (stages * v), in = k % (stages * v);
    const int range = forward ? in / stages : v - 1 - in / stages;
    return Op{forward, range * stages + s, group * stages + in % stages};
  };
  for (int s = 0; s < stages; ++s) {
    const int warm =
        micro_batches == stages ? total : std::min(total, (stages - s - 1) * 2 + (v - 1) * stages);
    for (int k = 0; k < warm; ++k) orders[s].push_back(op_of(s, k, true));
    for (int k = warm; k < total; ++k) {
      orders[s].push_back(op_of(s, k, true));
      orders[s].push_back(op_of(s, k - warm, false));
    }
    for (int k = total - warm; k < total; ++k) orders[s].push_back(op_of(s, k, false));
  }
  return run_orders(pipeline, orders, micro_batches, runtime != Runtime::motley);
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
