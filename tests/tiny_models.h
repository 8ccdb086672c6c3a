// Small models and clusters for tests that plan without libtorch.
#pragma once

#include "cluster/cluster.h"
#include "readers/huggingface.h"

namespace motley {

// GPT-2 of two layers, at any number of samples.
inline Graph tiny_gpt(int64_t samples) {
  static const readers::HuggingFaceModel model(
      parse_json(R"({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4,
                     "vocab_size": 200, "n_positions": 16})",
                 "config.json"),
      "config.json", 0, 0);
  return model.at(samples);
}

// Two machines of two fast devices and one of two slow ones, behind a link of `bandwidth`.
inline Cluster tiny_cluster(double bandwidth, const std::string& fields_of_types = "") {
  return parse_cluster(fmt::format(R"(name: tiny
device_types:
  - {{name: fast, flops: 4e12, memory: 1 GiB, memory_bandwidth: 100e9, overhead: 1e-6{1}}}
  - {{name: slow, flops: 1e12, memory: 1 GiB, memory_bandwidth: 50e9, overhead: 1e-6{1}}}
link: {{bandwidth: {0}, latency: 1e-5}}
groups:
  - {{name: new, count: 2, link: {{bandwidth: 10e9, latency: 2e-6}}, devices: [{{type: fast, count: 2}}]}}
  - {{name: old, link: {{bandwidth: 5e9, latency: 2e-6}}, devices: [{{type: slow, count: 2}}]}}
)",
                                   bandwidth, fields_of_types),
                       "tiny");
}

}  // namespace motley
