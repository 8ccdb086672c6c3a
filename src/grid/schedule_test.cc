// Times of schedules against the rules themselves, applied event by event.
#include "grid/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/rng.h"

namespace motley::grid {
namespace {

Pipeline random_pipeline(Rng* rng, int ranges) {
  Pipeline p;
  auto draw = [&] { return static_cast<double>(rng->between(0, 20)) / 4; };
  for (int r = 0; r < ranges; ++r) {
    p.forward.push_back(draw());
    p.backward.push_back(draw());
    if (r + 1 < ranges) {
      p.activation.push_back(draw());
      p.gradient.push_back(draw());
    }
  }
  return p;
}

// Every event's time by relaxation: nothing but the rules, applied until nothing changes.
std::vector<Seconds> relax_overlapped(const Pipeline& p, int micro_batches) {
  const int stages = static_cast<int>(p.forward.size());
  auto table = [&] {
    return std::vector<std::vector<Seconds>>(stages, std::vector<Seconds>(micro_batches, 0.0));
  };
  auto f = table(), b = table(), in_f = table(), in_b = table();  // ends and arrivals
  for (bool changed = true; changed;) {
    changed = false;
    auto set = [&](Seconds* x, Seconds value) {
      if (value != *x) *x = value, changed = true;
    };
    for (int s = 0; s < stages; ++s) {
      const int warm = std::min(micro_batches, stages - s);
      for (int m = 0; m < micro_batches; ++m) {
        // Before forward m: forward m-1 in the warm-up, else backward m - warm.
        const Seconds free_f = m < warm ? (m > 0 ? f[s][m - 1] : 0) : b[s][m - warm];
        const Seconds free_b =
            std::max(m > 0 ? b[s][m - 1] : 0, f[s][std::min(m + warm - 1, micro_batches - 1)]);
        set(&f[s][m], std::max(free_f, in_f[s][m]) + p.forward[s]);
        const Seconds input = s + 1 == stages ? f[s][m] : in_b[s][m];
        set(&b[s][m], std::max(free_b, input) + p.backward[s]);
        if (s + 1 < stages)
          set(&in_f[s + 1][m], std::max(f[s][m], m > 0 ? in_f[s + 1][m - 1] : 0) + p.activation[s]);
        if (s > 0)
          set(&in_b[s - 1][m],
              std::max(b[s][m], m > 0 ? in_b[s - 1][m - 1] : 0) + p.gradient[s - 1]);
      }
    }
  }
  std::vector<Seconds> finish;
  for (int s = 0; s < stages; ++s) finish.push_back(b[s].back());
  return finish;
}

// DeepSpeed's instruction lists run by rendezvous: an exchange starts when both sides have come to
// it.
struct Instruction {
  enum Kind { exchange_left, exchange_right, compute } kind;
  Seconds seconds = 0;  // of a computation; a side's sent part of an exchange
};
std::vector<Seconds> interpret_blocking(const Pipeline& p, int micro_batches) {
  const int stages = static_cast<int>(p.forward.size());
  std::vector<std::vector<Instruction>> lists(stages);
  for (int s = 0; s < stages; ++s) {
    auto micro_batch = [&](int step, bool* forward) {
      *forward = (step + s) % 2 == 0;
      const int from = *forward ? s : 2 * stages - s - 1;
      return step < from ? -1 : (step - from) / 2;
    };
    auto in_range = [&](int m) { return m >= 0 && m < micro_batches; };
    bool before_forward = false;
    int before = -1;
    for (int step = 0; step < 2 * (micro_batches + stages); ++step) {
      bool forward = false;
      const int m = micro_batch(step, &forward);
      if (forward && s > 0 && (in_range(m) || (in_range(before) && !before_forward)))
        lists[s].push_back({Instruction::exchange_left,
                            in_range(before) && !before_forward ? p.gradient[s - 1] : 0});
      if (!forward && s + 1 < stages && (in_range(m) || (in_range(before) && before_forward)))
        lists[s].push_back({Instruction::exchange_right,
                            in_range(before) && before_forward ? p.activation[s] : 0});
      if (in_range(m))
        lists[s].push_back({Instruction::compute, forward ? p.forward[s] : p.backward[s]});
      before = m, before_forward = forward;
    }
  }
  std::vector<Seconds> now(stages, 0.0);
  std::vector<size_t> at(stages, 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int s = 0; s < stages; ++s) {
      if (at[s] == lists[s].size()) continue;
      const Instruction& i = lists[s][at[s]];
      if (i.kind == Instruction::compute) {
        now[s] += i.seconds;
        ++at[s], moved = true;
      } else if (i.kind == Instruction::exchange_right && at[s + 1] < lists[s + 1].size() &&
                 lists[s + 1][at[s + 1]].kind == Instruction::exchange_left) {
        const Seconds end =
            std::max(now[s], now[s + 1]) + std::max(i.seconds, lists[s + 1][at[s + 1]].seconds);
        now[s] = now[s + 1] = end;
        ++at[s], ++at[s + 1], moved = true;
      }
    }
  }
  for (int s = 0; s < stages; ++s) EXPECT_EQ(at[s], lists[s].size());
  return now;
}

struct Op {
  bool forward;
  int range, micro_batch;
};

// Runs every stage's operations in its order as soon as their input is there; transfers overlap, or
// delay their receiver.
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
  for (int s = 0; s < stages; ++s) EXPECT_EQ(next[s], orders[s].size());
  return now;
}

// Lists of every stage's operations (Narayanan et al. 2021), run.
std::vector<Seconds> run_interleaved(const Pipeline& pipeline, int stages, int micro_batches,
                                     bool blocking) {
  const int ranges = static_cast<int>(pipeline.forward.size());
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
  return run_orders(pipeline, orders, micro_batches, blocking);
}

TEST(Schedule, RecurrencesEqualTheirTwins) {
  Rng rng(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const int stages = static_cast<int>(rng.between(1, 6)), m = static_cast<int>(rng.between(1, 9));
    const Pipeline p = random_pipeline(&rng, stages);
    EXPECT_EQ(simulate_1f1b(p, m, Runtime::motley), relax_overlapped(p, m));
    EXPECT_EQ(simulate_1f1b(p, m, Runtime::deepspeed), interpret_blocking(p, m));
  }
}

TEST(Schedule, InterleavedIsAsItsListsOfOperations) {
  Rng rng(3);
  for (int trial = 0; trial < 2000; ++trial) {
    const int stages = static_cast<int>(rng.between(1, 6)),
              rounds = static_cast<int>(rng.between(1, 4)),
              m = stages * static_cast<int>(rng.between(1, 4));
    const Pipeline p = random_pipeline(&rng, stages * rounds);
    for (Runtime runtime : {Runtime::motley, Runtime::megatron})
      EXPECT_EQ(simulate_interleaved(p, stages, m, runtime),
                run_interleaved(p, stages, m, runtime != Runtime::motley));
  }
}

TEST(Schedule, EqualStagesTakeTheKnownTime) {
  Pipeline p{{1, 1, 1, 1}, {2, 2, 2, 2}, {0, 0, 0}, {0, 0, 0}};
  for (Runtime runtime : {Runtime::motley, Runtime::deepspeed, Runtime::megatron})
    EXPECT_DOUBLE_EQ(simulate_1f1b(p, 8, runtime)[0], (8 + 3) * 3.0);
  // Two ranges a stage: the bubble is half as long.
  Pipeline halves{std::vector<double>(8, 0.5), std::vector<double>(8, 1.0),
                  std::vector<double>(7, 0.0), std::vector<double>(7, 0.0)};
  EXPECT_DOUBLE_EQ(simulate_interleaved(halves, 4, 8, Runtime::motley)[0], 8 * 3 + 3 * 3 / 2.0);
}

TEST(Schedule, BoundsHold) {
  Rng rng(2);
  for (int trial = 0; trial < 2000; ++trial) {
    const int stages = static_cast<int>(rng.between(1, 5)), m = static_cast<int>(rng.between(1, 9));
    const int stages_per_device = static_cast<int>(rng.between(1, 3));
    for (Runtime runtime : {Runtime::motley, Runtime::deepspeed, Runtime::megatron}) {
      const Pipeline p = random_pipeline(&rng, stages);
      const auto finish = simulate_1f1b(p, m, runtime),
                 bound = finish_bounds(p, stages, m, runtime);
      for (int s = 0; s < stages; ++s) EXPECT_LE(bound[s], finish[s] + 1e-9);
      if (stages_per_device == 1) continue;
      const Pipeline q = random_pipeline(&rng, stages * stages_per_device);
      const auto chunk_finish = simulate_interleaved(q, stages, m * stages, runtime);
      const auto chunk_bound = finish_bounds(q, stages, m * stages, runtime);
      for (int s = 0; s < stages; ++s) EXPECT_LE(chunk_bound[s], chunk_finish[s] + 1e-9);
    }
  }
}

}  // namespace
}  // namespace motley::grid
