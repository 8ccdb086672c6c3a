// Numbers of known accelerators. `flops` and `half_flops` are 0.5-0.6 of the vendor's peak for
// dense matrix products, what large layers sustain in practice (half_flops of A100: 0.77); memory is the
// card's less 1 GiB of context; bandwidth is 0.8 of the vendor's. A measured profile replaces all of it.
#include "cluster/cluster.h"

namespace motley {

const std::vector<DeviceType>& device_catalogue() {
  constexpr double T = 1e12, G = 1e9, GiB = 1024. * 1024 * 1024, us = 1e-6;
  static const std::vector<DeviceType> catalogue = {
      // name, fp32, fp16, memory, bandwidth, overhead (vendor peaks: fp32 / fp16 tensor / HBM)
      {"1080Ti", 6.2 * T, 6.2 * T, 10 * GiB, 387 * G, 6 * us, 0},       // 11.3 / - / 484 GB/s
      {"A100-40GB", 11.0 * T, 240 * T, 39 * GiB, 1244 * G, 4 * us, 0},  // 19.5 / 312 / 1555 GB/s
      {"A100-80GB", 11.0 * T, 240 * T, 79 * GiB, 1631 * G, 4 * us, 0},  // 19.5 / 312 / 2039 GB/s
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

// Numbers of known links. A direct link (NVLink) is one of those that a device has, a switch's port all
// of them.
//
//   NVLink2, NVSwitch-A100   all_reduce_perf of nccl-tests on 8 GPUs of a DGX-1 V100 and on 8 A100, 1 MiB
//                            to 1 GiB (tests/data/vtrain/allreduce.csv): the bandwidth of the bus at
//                            1 GiB, by 6 links or one port; the smallest times at 2 to 8 GPUs
//   NVSwitch-V100            six links a GPU of a DGX-2, at the share of the later switch, as no table is
//                            public; NCCL's topology search counts with 20 GB/s a link of V100
//   PCIe3, PCIe4, UPI        what NCCL's topology search counts with: 12 and 24 GB/s of 16 lanes, 10 of
//                            the link between two sockets
//   Ethernet-*               TCP: a port of 10 Gbit/s is filled but for headers (1460 of 1538 bytes), of
//                            larger ones NCCL's sockets get 70 to 75%
const std::vector<LinkType>& link_catalogue() {
  constexpr double G = 1e9, us = 1e-6;
  static const std::vector<LinkType> catalogue = {
      // name, nominal, share, message, latency, start
      {"Ethernet-10", 1.25 * G, 0.95, 1.0, 15 * us, 40 * us},
      {"Ethernet-100", 12.5 * G, 0.72, 0.9, 15 * us, 40 * us},
      {"Ethernet-50", 6.25 * G, 0.72, 0.9, 15 * us, 40 * us},
      {"InfiniBand-200", 25 * G, 0.92, 0.9, 5 * us, 20 * us},
      {"NVLink1", 20 * G, 0.9, 1.0, 3 * us, 40 * us},
      {"NVLink2", 25 * G, 0.9, 1.0, 3 * us, 40 * us},
      {"NVLink3", 25 * G, 0.9, 1.0, 3 * us, 30 * us},
      {"NVSwitch-A100", 300 * G, 0.77, 0.8, 3 * us, 30 * us},
      {"NVSwitch-H100", 450 * G, 0.8, 0.8, 3 * us, 30 * us},
      {"NVSwitch-V100", 150 * G, 0.77, 0.8, 3 * us, 40 * us},
      {"PCIe3", 15.75 * G, 0.76, 1.0, 10 * us, 30 * us},
      {"PCIe4", 31.5 * G, 0.76, 1.0, 10 * us, 30 * us},
      {"UPI", 20.8 * G, 0.48, 1.0, 1 * us, 30 * us},
  };
  return catalogue;
}

const LinkType* find_link_type(const std::string& name) {
  for (const LinkType& type : link_catalogue())
    if (type.name == name) return &type;
  return nullptr;
}

}  // namespace motley
