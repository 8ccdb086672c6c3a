// Computation as Galvatron has measured it: how long a layer of a model takes, and by how much it is
// slower beside a collective.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/units.h"

namespace motley::readers {

// computation_profiling_bf16_llama-7b.json
struct LayerTimes {
  bool half = false;  // by the name of the file: bf16 or fp16
  // [tokens of a sample] samples, and seconds of the forward pass of one layer over them; ascending
  std::map<int64_t, std::vector<std::pair<int64_t, Seconds>>> forward;
};

// {"layertype_0_bsz4_seq2048": ms of a sample} or, where it has none of these, the differences of
// {"layernum[2]_bsz4_seq2048": ms}. Throws UserError that names the file and field.
LayerTimes parse_layer_times(const std::string& text, const std::string& name);

// Of {"overlap_coe": 1.1256} what is more than 1. Throws UserError likewise.
double parse_overlap(const std::string& text, const std::string& name);

}  // namespace motley::readers
