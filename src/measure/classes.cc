#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "measure/calibrate.h"
#include "measure/device_clock.h"
#include "measure/parts.h"

namespace motley {

ProfiledDevice measure_classes(double speed, at::Device device) {
  at::NoGradGuard no_grad;
  DeviceClock watch(speed, device);
  ProfiledDevice result;
  const Seconds budget = 0.12;
  auto add = [&](const char* name, const char* dtype, const std::vector<Sample>& samples,
                 bool by_bytes) {
    ProfiledClass c;
    c.name = name;
    c.dtype = dtype;
    const OpRate rate = fit(samples, &c.fit);
    c.overhead = rate.overhead;
    c.rate = by_bytes ? rate.memory_bandwidth : rate.flops;
    for (size_t i = 0; i < samples.size(); ++i)
      c.fit.points[i] = {by_bytes ? samples[i].bytes : samples[i].flops, samples[i].seconds};
    result.classes.push_back(c);
    return c;
  };
  const at::TensorOptions f32 = at::TensorOptions(device);
  const at::Tensor tiny = at::ones({8}, f32);
  const Seconds launch = seconds_per_call(watch, budget, [&] { at::add(tiny, tiny); });
  result.overhead = launch;
  add("launch", "f32", {{8, 96, launch}}, false);
  // Whatever is as large as models on such a device have it.
  const int64_t larger = device.is_cpu() ? 1 : 16;
  struct Type {
    const char* name;
    at::ScalarType type;
    int64_t largest;
    std::vector<Sample> products = {}, elementwise = {};
  };
  Type types[] = {{"f32", at::kFloat, 512 * larger},
                  {"f64", at::kDouble, 256},
                  {"bf16", at::kBFloat16, device.is_cpu() ? 128 : 8192}};
  // On a device with a cache of tens of megabytes numbers are to be many more than that.
  const int64_t least = device.is_cpu() ? 1 << 10 : 1 << 18;
  // Two rounds, seconds apart, of which the faster counts: a machine is busy for a moment.
  constexpr int kRounds = 2;
  for (int round = 0; round < kRounds; ++round)
    for (Type& t : types) {
      size_t next = 0;
      const auto keep = [&](std::vector<Sample>& samples, double flops, Bytes bytes, auto call) {
        const Seconds seconds = seconds_per_call(watch, budget / kRounds, call);
        if (round == 0) samples.push_back({flops, bytes, seconds});
        Sample& sample = samples[next++];
        sample.seconds = std::min(sample.seconds, seconds);
      };
      for (int64_t n = 32; n <= t.largest; n *= 2) {
        const at::Tensor a = at::ones({n, n}, f32.dtype(t.type));
        const double size = static_cast<double>(n);
        keep(t.products, 2 * size * size * size, 0, [&] { at::mm(a, a); });
      }
      next = 0;
      for (int64_t n = least; n <= least << (device.is_cpu() ? 10 : 9); n *= 8) {
        const at::Tensor a = at::ones({n}, f32.dtype(t.type));
        keep(t.elementwise, 0, 3. * static_cast<double>(a.nbytes()), [&] { at::add(a, a); });
      }
    }
  for (const Type& t : types) {
    const ProfiledClass matmul = add("matmul", t.name, t.products, false);
    const ProfiledClass memory = add("elementwise", t.name, t.elementwise, true);
    // A fit may find no slope; the largest call is then what tells.
    const auto sustained = [](double fitted, double reached) {
      return fitted < reached || fitted > 1.5 * reached ? reached : fitted;
    };
    const Flops fastest = t.products.back().flops / t.products.back().seconds;
    const Bytes widest = t.elementwise.back().bytes / t.elementwise.back().seconds;
    if (t.type == at::kFloat) {
      result.flops = result.half_flops =
          device.is_cpu() && matmul.rate > 0 ? matmul.rate : sustained(matmul.rate, fastest);
      result.memory_bandwidth =
          device.is_cpu() && memory.rate > 0 ? memory.rate : sustained(memory.rate, widest);
    }
    if (t.type == at::kBFloat16 && matmul.rate > 0)
      result.half_flops = device.is_cpu() ? matmul.rate : sustained(matmul.rate, fastest);
  }
  std::vector<Sample> convolutions;
  for (int64_t c : {8, 16, 32, 64}) {
    c *= std::min<int64_t>(larger, 4);
    const int64_t n = 4 * larger;
    const at::Tensor x = at::ones({n, c, 16, 16}, f32), w = at::ones({c, c, 3, 3}, f32);
    convolutions.push_back({2. * 16 * 16 * 9 * static_cast<double>(n * c * c), 0,
                            seconds_per_call(watch, budget, [&] { at::conv2d(x, w, {}, 1, 1); })});
  }
  add("convolution", "f32", convolutions, false);
  return result;
}

}  // namespace motley
