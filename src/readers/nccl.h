// What nccl-tests print: text, or JSON (`-J FILE`).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/collective.h"
#include "core/units.h"

namespace motley::readers {

// One run of one collective over groups of ranks.
struct NcclRun {
  Collective collective = Collective::all_reduce;
  int ranks = 0;         // of a group
  int hosts = 1;         // of a group
  bool message = false;  // from one of them to another: it says what a link carries, and no more
  struct Rank {
    int group = 0;
    std::string host, device;  // "NVIDIA A100-SXM4-40GB"
  };
  std::vector<Rank> all;
  std::vector<std::pair<Bytes, Seconds>> points;  // size; out of place and in place
};

// Which collective a text names, as tools write them: "all_reduce_perf", "all gather", "all2all".
std::optional<Collective> collective_in(std::string text);

// Throws UserError that names the file and the line or field. Rows that say N/A, or with errors in
// the data, are refused.
NcclRun parse_nccl(const std::string& text, const std::string& name);

// seconds = fixed + size * per_byte, least squares of relative errors; neither is negative.
// r2: of the seconds; error: mean relative. REQUIRES: a point with positive seconds.
struct Line {
  Seconds fixed = 0;
  double per_byte = 0, r2 = 0, error = 0;
};
Line fit_line(const std::vector<std::pair<Bytes, Seconds>>& points);

// In the terms of a cluster file (CollectiveRate): of a round.
struct NcclFit {
  Seconds latency = 0;
  BytesPerSecond bandwidth = 0;
  BytesPerSecond port = 0;  // what the slowest port carried in one direction (busbw of nccl-tests)
  Line line;
};
NcclFit fit(const NcclRun& run);

}  // namespace motley::readers
