// GPT models on clusters of several sites, and what a stage of one costs there (see hapt_bench.cc).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/units.h"
#include "pipeline/search.h"

namespace motley::pipeline::hapt {

struct Gpt {
  std::string name;
  int blocks;
  double hidden;
  double sequence = 1024, vocabulary = 51200;
};

struct Hardware {
  std::string name;
  double peak;
  Bytes memory;
  double inside, across;  // bytes/s in a node, of a node
};
inline const Hardware kA100 = {"A100", 312e12, 40e9, 300e9, 25e9};
inline const Hardware kV100 = {"V100", 125e12, 32e9, 150e9, 25e9};

struct Site {
  Hardware hardware;
  int nodes, devices;
};

// Embedding, three pieces per block (attention; both halves of the MLP), head.
struct Piece {
  Flops flops = 0;  // forward, one sample
  double parameters = 0;
  Bytes activation = 0;  // held for backward, one sample
  Bytes carried = 0;     // in front of it, one sample
  int reduces = 0;       // tensor-parallel all-reduces forward (as many backward)
  int kind = 0;
};

std::vector<Piece> pieces_of(const Gpt& g);

// A planner's view: layers are groups of pieces, sites may be taken for something they are not.
struct View {
  std::vector<int> first;  // piece at which each layer starts
  std::vector<Site> sites;
  double cross = 5e9 / 8;  // bytes/s between sites
  bool links_are_free = false;
};

struct Case {
  Gpt model;
  std::vector<Site> sites;
  double cross = 5e9 / 8;
  int64_t batch = 1024;
};

// Of pieces [from, to): the fastest degrees of tensor and data parallelism that fit.
StageProfile gpt_cost(const std::vector<Piece>& pieces, int from, int to, const Site& site,
                      const Mesh& mesh, int64_t micro_batch, double micro_batches, double hidden,
                      double sequence);

SearchProblem problem_of(const Case& c, const View& view);

// The piece at which each layer starts: layers of about equal FLOPs, of one piece, of a block.
std::vector<int> grouped(const std::vector<Piece>& pieces, int groups);
std::vector<int> every_piece(const std::vector<Piece>& pieces);
std::vector<int> every_block(const Gpt& g);

}  // namespace motley::pipeline::hapt
