// motley reduce: the placements of parallelism axes on a system and the fastest reduction program
// of each.
#pragma once

#include <string>
#include <vector>

namespace motley {

class Command;

struct ReduceOptions {
  std::string hierarchy;            // "node:4,gpu:16"; empty: the cluster's own
  std::string axes;                 // "16,2,2"
  std::vector<std::string> reduce;  // "0,2" or "0,2:1 GiB"; several are placed jointly
  std::string cluster;              // file or shipped name; empty: assumed links
  std::string bytes = "2 GiB";      // per device
  std::string algo = "ring";
  std::string numbering = "level";  // of the devices in a group: level or axis
  std::string launch = "0 s";       // paid by every collective
  double tree_share = 0;            // 0: kNcclTreeShare
  int size_limit = 5;
  bool json = false;
};

// Prints the result on standard output. Throws UserError.
void reduce_command(const ReduceOptions& options);

void add_reduce_command(Command app);

}  // namespace motley
