// What a backend of torch.distributed can do and hide: the one place that says so, for what is
// priced and planned (cost/cost.h, planner/planner.h, plan/check.h) and for what is run
// (comm/process_group.h).
//
// Of a backend whose name is not in the table nothing is taken to be true but what all must do: sums
// of 32-bit numbers, broadcasts, all-gathers. A cluster file can say more of it, and where groups of
// it are made what they can is tried.
#pragma once

#include <string>
#include <vector>

namespace motley {

class Yaml;

struct Backend {
  std::string name;       // as torch.distributed has it; empty: nothing was said
  bool messages = false;  // between two workers: pipelines, replicas, reductions in steps
  bool all_to_all =
      false;  // of pieces of unequal size; otherwise messages, or gathers of everything
  // All-reduces add 16-bit numbers as they are. Otherwise they travel, and are added, as f32.
  bool half_sums = false;
  // The same of reduce-scatters. Groups of c10d exchange the terms and add them up afterwards; over
  // gloo sums travel around the ring (comm/gloo.h), and are f32.
  bool half_scatters = false;
  bool hides = false;  // what was started goes on while the devices compute
  // A message is met by the receive of the same tag. Otherwise tags are ignored, the messages of a
  // pair are met in the order in which they were sent, and one that is sent waits for its receive.
  bool tags = false;
  bool cpu = true, cuda = true;  // whose tensors it takes; others are copied (comm/staged.h)
  bool known = false;            // it is not tried
  friend bool operator==(const Backend&, const Backend&) = default;
};

// Of no name: everything, as plans for accelerators are made where nobody says what runs them.
Backend backend_named(const std::string& name);

// A name, or {name, messages, all_to_all, half_sums, hides} of one that is not in the table. Throws UserError
// naming file and field.
Backend read_backend(const Yaml& node, const std::string& file, const std::string& field);

struct Cluster;
// Over which the devices of a cluster talk where they are not in one group with a backend of its own.
// Emulated devices (DeviceType::speed) are CPUs, and talk over gloo if the file does not say otherwise.
Backend backend_of(const Cluster& cluster);
// The innermost backend over which all of these devices talk.
Backend backend_among(const Cluster& cluster, const std::vector<int>& devices);

}  // namespace motley
