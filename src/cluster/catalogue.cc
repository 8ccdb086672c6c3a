// Numbers of known accelerators. `flops` and `half_flops` are 0.5-0.6 of the vendor's peak for
// dense matrix products, what large layers sustain in practice; memory is the card's less 1 GiB of
// context; bandwidth is 0.8 of the vendor's. A measured profile replaces all of it.
#include "cluster/cluster.h"

namespace motley {

const std::vector<DeviceType>& device_catalogue() {
  constexpr double T = 1e12, G = 1e9, GiB = 1024. * 1024 * 1024, us = 1e-6;
  static const std::vector<DeviceType> catalogue = {
      // name, fp32, fp16, memory, bandwidth, overhead (vendor peaks: fp32 / fp16 tensor / HBM)
      {"1080Ti", 6.2 * T, 6.2 * T, 10 * GiB, 387 * G, 6 * us, 0},       // 11.3 / - / 484 GB/s
      {"A100-40GB", 11.0 * T, 170 * T, 39 * GiB, 1244 * G, 4 * us, 0},  // 19.5 / 312 / 1555 GB/s
      {"A100-80GB", 11.0 * T, 170 * T, 79 * GiB, 1631 * G, 4 * us, 0},  // 19.5 / 312 / 2039 GB/s
      {"GH200", 36.0 * T, 500 * T, 94 * GiB, 3200 * G, 4 * us, 0},      // 67 / 990 / 4000 GB/s
      {"H100-80GB", 36.0 * T, 500 * T, 79 * GiB, 2680 * G, 4 * us, 0},  // 67 / 990 / 3350 GB/s
      {"P100-16GB", 5.8 * T, 11.0 * T, 15 * GiB, 585 * G, 6 * us, 0},   // 10.6 / 21.2 / 732 GB/s
      {"T4", 4.5 * T, 30 * T, 14 * GiB, 256 * G, 6 * us, 0},            // 8.1 / 65 / 320 GB/s
      {"V100-16GB", 8.6 * T, 65 * T, 15 * GiB, 720 * G, 5 * us, 0},     // 15.7 / 125 / 900 GB/s
      {"V100-32GB", 8.6 * T, 65 * T, 31 * GiB, 720 * G, 5 * us, 0},     // 15.7 / 125 / 900 GB/s
      // One core of a present x86 server with an optimised BLAS, and slower emulations of it.
      {"cpu-core", 60 * G, 60 * G, 4 * GiB, 8 * G, 4 * us, 1},
  };
  return catalogue;
}

}  // namespace motley
