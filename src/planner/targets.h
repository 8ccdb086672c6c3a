// Training frameworks as they are, and what of a plan each can say. `motley plan --for` searches
// plans that one can say (engines/target.cc), `motley export` writes them (exporters/).
//
//   megatron     Megatron-LM          torchtitan  torchtitan          flagscale  FlagScale
//   deepspeed    DeepSpeed            galvatron   Galvatron-2
//   ddp, fsdp2   PyTorch's own, with batches by device (a sampler of rows and weights of losses)
//
// Of all of them stages are whole layers, the devices of a stage have equal shares (but for rows of
// ddp and fsdp2), replicas take as many micro-batches, and collectives are NCCL's.
#pragma once

#include <string>
#include <vector>

#include "planner/arrangement.h"
#include "planner/sizes.h"

namespace motley::planner {

struct Target {
  const char* name;
  const char* title;
  bool pipelines;          // stages; else one program on all devices
  bool tensors;            // stages divide matrices
  bool tensors_in_stages;  // also where there are several
  bool experts;            // replicas divide experts
  bool pieces;             // parameters gathered where they are used, without stages
  bool pieces_alone;       // nothing else
  bool meshes;             // degrees differ from stage to stage
  bool any_warm_up;        // else 1F1B
  bool interleaved;
  bool rows;  // devices take unequal rows of the batch
  bool recompute_by_stage;
  const char* zero;  // levels at which replicas may divide state, "01"
  bool
      copies_kv;  // fewer key and value heads than devices that divide matrices: some have the same
  bool tokens;    // devices that divide matrices divide a sequence's tokens too
};
// By name.
const std::vector<Target>& targets();
const Target* find_target(const std::string& name);  // null: there is none
std::string target_names();                          // "ddp, deepspeed, ..."

// Why a target cannot say an arrangement of the cluster's devices, a sentence; empty if it can.
// `sizes`: of the model, if they are known.
std::string cannot_say(const Target& target, const Arrangement& arrangement, const Cluster& cluster,
                       const std::optional<Sizes>& sizes);
// The same of a stage that divides matrices of the model over `tp` devices, experts over `ep`.
std::string cannot_divide(const Target& target, int tp, int ep, const Sizes& sizes);

// Devices in the order of ranks: by stage, replica and device of a stage.
std::vector<int> rank_order(const Arrangement& arrangement);

// Leaf groups of a cluster, the machines, each with its devices.
struct Host {
  std::string name;  // unique
  std::vector<int> devices;
};
std::vector<Host> hosts_of(const Cluster& cluster);
// Whether the ranks of every host follow one another, in the order of `devices`.
bool contiguous(const std::vector<Host>& hosts, const std::vector<int>& devices);

}  // namespace motley::planner
