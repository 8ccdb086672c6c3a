// From what tools print to a cluster file (docs/cluster-file.md), level by level.
//
// Which machines there are is taken from `scontrol show node`, else a hostfile, else the ranks of
// nccl-tests, else there is one machine. How they are joined is taken from Slurm's topology; what is
// inside of a machine from `nvidia-smi topo -m`: GPUs that are nearer to each other than to the rest
// are a group. Each run of nccl-tests is fitted (nccl.h) and gives the link of the level whose
// groups have as many devices as it had ranks, and that level's measured collectives. What none of
// them says is assumed, and marked: in `assumed`, and as comments of the file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cluster/cluster.h"

namespace motley::readers {

struct Source {
  std::string name, text;  // of the file
};

struct Sources {
  std::string cluster = "cluster";  // its name
  std::optional<Source> topo, query, nodes, hostfile, topology;
  std::vector<Source> nccl;
  // What was measured of the one device type that there is, and what to say of it: in the place of
  // what the catalogue has.
  std::optional<DeviceType> device;
  std::vector<std::string> of_device;
};

struct Assembled {
  std::string yaml;
  Cluster cluster;                   // what the text says
  std::vector<std::string> read;     // "link between machines: all_reduce.txt, 12.1 GB/s, ..."
  std::vector<std::string> assumed;  // "memory of B200: as of H100-80GB"
};

// Throws UserError naming the file and what of it is wrong, or where nothing is given.
Assembled assemble(const Sources& sources);

}  // namespace motley::readers
