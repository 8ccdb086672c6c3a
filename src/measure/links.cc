#include <chrono>
#include <thread>

#include "core/error.h"
#include "cost/cost.h"
#include "measure/device_clock.h"
#include "measure/parts.h"
#include "net/collectives.h"

namespace motley {

namespace {

// The median over the calls of the slowest member, the same on all. Of more calls, up to thrice as
// many, where most were disturbed.
template <typename F>
Seconds collective_seconds(Communicator& group, const CalibrateOptions& options, int repeats,
                           F call) {
  const at::Device device = options.device;
  constexpr double kDisturbed = 1.1;  // of the second least
  constexpr std::chrono::milliseconds kSleep{10};
  std::vector<double> times;
  const auto disturbed = [&] {
    std::vector<double> sorted = times;
    std::sort(sorted.begin(), sorted.end());
    return median(times) > kDisturbed * sorted[1];
  };
  for (int i = 0; i < repeats || (i < 3 * repeats && disturbed()); ++i) {
    group.barrier();
    // An emulated device sleeps where another one computes, and may be slow to wake up.
    if (options.speed > 0) std::this_thread::sleep_for(kSleep);
    const Seconds start = wall_clock();
    call();
    if (device.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(device.index());
    const Seconds end = wall_clock();
    // Emulated workers share a clock: theirs counts from when the last one was there.
    at::Tensor last = at::tensor({end - start, start, end}, at::kDouble).to(device);
    group.all_reduce(last, Reduction::max);
    last = last.cpu();
    times.push_back(options.speed > 0 ? last[2].item<double>() - last[1].item<double>()
                                      : last[0].item<double>());
  }
  return median(times);
}

}  // namespace

ProfiledGroup measure_links(Communicator& group, const Cluster& part,
                            const CalibrateOptions& options) {
  const at::Device device = options.device;
  // A size that would take longer is left out.
  const Seconds longest = options.quick ? 0.15 : 0.6;
  const int64_t smallest = int64_t{options.quick ? 16 : 4} << 10,
                largest = int64_t{options.quick ? 4 : 16} << 20, factor = options.quick ? 8 : 4;
  ProfiledGroup result;
  const int p = group.size();
  const at::TensorOptions f32 = at::TensorOptions(device);
  const CollectiveModel nominal(part);
  const double exchange = nominal.profile(std::vector<double>(p, 1. / p)).exchange *
                          CollectiveModel(part).ring_bandwidth();
  const double n = p;
  for (const Collective collective : kMeasuredCollectives) {
    const double rounds = collective == Collective::all_reduce ? 2 * (n - 1) : n - 1;
    const double traffic = collective == Collective::all_reduce   ? 2 * (n - 1) / n
                           : collective == Collective::broadcast  ? n - 1
                           : collective == Collective::all_to_all ? exchange
                                                                  : (n - 1) / n;
    std::vector<std::pair<double, Seconds>> points;
    std::vector<RoundsPoint> of_rounds;
    Seconds last = 0;
    for (int64_t bytes = smallest; bytes <= largest; bytes *= factor) {
      if (last * 3.5 > longest) break;
      const int64_t numel = bytes / 4, piece = std::max<int64_t>(numel / p, 1);
      at::Tensor whole = at::ones({numel}, f32);
      std::vector<at::Tensor> pieces, parts;
      for (int r = 0; r < p; ++r) {
        const int64_t size = collective != Collective::broadcast ? piece : r == 0 ? numel : 0;
        pieces.push_back(at::ones({size}, f32));
        parts.push_back(at::ones({std::max<int64_t>(piece / p, 1)}, f32));
      }
      std::vector<at::Tensor> received;
      for (int r = 0; r < p; ++r) received.push_back(at::empty_like(parts[r]));
      auto call = [&] {
        switch (collective) {
          case Collective::all_reduce:
            group.all_reduce(whole);
            break;
          case Collective::all_gather:
          case Collective::broadcast:
            group.all_gather(pieces);
            break;
          case Collective::reduce_scatter:
            group.reduce_scatter(pieces);
            break;
          case Collective::all_to_all:
            group.all_to_all(parts, received);
            break;
          default:
            MOTLEY_CHECK(false, "{}", to_string(collective));
        }
      };
      call();
      last = collective_seconds(
          group, options, options.quick ? (last > 0.05 ? 3 : 5) : (last > 0.05 ? 5 : 7), call);
      points.emplace_back(static_cast<double>(bytes), last);
      of_rounds.push_back({rounds, traffic * static_cast<double>(bytes), last});
    }
    const RoundsFit fit = fit_rounds(
        of_rounds, collective != Collective::all_to_all && collective != Collective::broadcast);
    std::vector<double> predicted;
    for (const RoundsPoint& x : of_rounds) predicted.push_back(fit.seconds(x.rounds, x.traffic));
    result.collectives.push_back({collective, fit.latency, 1 / fit.per_byte, fit.least});
    result.fits.push_back(quality_of(points, predicted));
  }
  return result;
}

}  // namespace motley
