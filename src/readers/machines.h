// What tools say of machines: nvidia-smi, Slurm, hostfiles. Every function throws UserError that
// names the file and line of what it does not understand.
#pragma once

#include <string>
#include <vector>

#include "core/units.h"

namespace motley::readers {

// How two GPUs of a machine are joined, the nearest first (`nvidia-smi topo -m`).
enum class Near { nvlink, pix, pxb, phb, node, sys };
const char* to_string(Near near);

struct TopoMatrix {
  struct Path {
    Near near = Near::sys;
    int links = 0;  // NVLinks
  };
  std::vector<std::vector<Path>> between;  // [gpu][gpu]
};
TopoMatrix parse_topo(const std::string& text, const std::string& name);

struct Gpu {
  std::string name;  // "NVIDIA A100-SXM4-40GB"
  Bytes memory = 0;  // 0: not said
};
// `nvidia-smi --query-gpu=name,memory.total --format=csv`, with other columns or without a header.
std::vector<Gpu> parse_query(const std::string& text, const std::string& name);

struct Machine {
  std::string host;
  int gpus = 0;      // 0: not said
  std::string type;  // "a100", "A800"; empty: not said
};
// Lines "HOST slots=8 [type=A800]", "HOST:8" or "HOST".
std::vector<Machine> parse_hostfile(const std::string& text, const std::string& name);
// `scontrol show node`: NodeName= and Gres=gpu:a100:8, records of one line or several.
std::vector<Machine> parse_nodes(const std::string& text, const std::string& name);

// The switches of Slurm's topology.conf or topology.yaml: a tree whose leaves are machines.
struct Switch {
  std::string name;
  std::vector<Switch> switches;
  std::vector<std::string> machines;
  bool speed_given = false;  // LinkSpeed, which Slurm does not use and has no unit
};
Switch parse_topology(const std::string& text, const std::string& name);

// The device type of the catalogue that a name and a memory mean ("A100-40GB"); empty: none.
std::string catalogue_type(const std::string& name, Bytes memory);

}  // namespace motley::readers
