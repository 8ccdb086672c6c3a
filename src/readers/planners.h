// Communication as other planners have measured it: Galvatron (allreduce_bandwidth_*.json, p2p_bandwidth_*.json, sp_time_*.json) and nnScaler
// (intra_8.json), as runs of collectives like those of nccl-tests.
#pragma once

#include <string>
#include <vector>

#include "readers/nccl.h"

namespace motley::readers {

// What a file of nccl-tests, Galvatron or nnScaler measured. Galvatron's file names say over how many
// nodes of how many GPUs, nnScaler's over how many GPUs of one machine. Throws UserError that names
// the file and field.
std::vector<NcclRun> parse_communication(const std::string& text, const std::string& name);

}  // namespace motley::readers
