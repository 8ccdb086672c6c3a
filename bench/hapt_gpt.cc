#include "hapt_gpt.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

namespace motley::pipeline::hapt {

std::vector<Piece> pieces_of(const Gpt& g) {
  double h = g.hidden, s = g.sequence;
  std::vector<Piece> pieces;
  pieces.push_back({s * h, g.vocabulary * h + s * h, 2 * s * h, 0, 0, 0});
  for (int b = 0; b < g.blocks; ++b) {
    pieces.push_back({8 * s * h * h + 4 * s * s * h, 4 * h * h, 15 * s * h, 2 * s * h, 1, 1});
    pieces.push_back({8 * s * h * h, 4 * h * h, 11 * s * h, 2 * s * h, 0, 2});
    pieces.push_back({8 * s * h * h, 4 * h * h, 8 * s * h, 10 * s * h, 1, 3});
  }
  pieces.push_back({2 * s * h * g.vocabulary, g.vocabulary * h, 2 * s * h + 2 * s * g.vocabulary,
                    2 * s * h, 1, 4});
  return pieces;
}

StageProfile gpt_cost(const std::vector<Piece>& pieces, int from, int to, const Site& site,
                      const Mesh& mesh, int64_t micro_batch, double micro_batches, double hidden,
                      double sequence) {
  double flops = 0, parameters = 0, activation = 0, inputs = pieces[from].carried;
  int reduces = 0;
  for (int i = from; i < to; ++i) {
    flops += pieces[i].flops;
    parameters += pieces[i].parameters;
    activation += pieces[i].activation;
    reduces += pieces[i].reduces;
  }
  constexpr double kEfficiency = 0.45;
  StageProfile best;
  best.feasible = false;
  Seconds least = std::numeric_limits<double>::infinity();
  for (int tp = 1; tp <= mesh.devices; tp *= 2) {
    if (mesh.size() % tp != 0) continue;
    int dp = mesh.size() / tp;
    if (dp > micro_batch) continue;
    double samples = std::ceil(static_cast<double>(micro_batch) / dp);
    StageProfile p;
    p.forward = flops * samples / tp / (site.hardware.peak * kEfficiency);
    p.backward = (mesh.recompute ? 3 : 2) * p.forward;
    Seconds reduce = 2.0 * (tp - 1) / tp * 2 * sequence * hidden * samples / site.hardware.inside;
    p.forward += reduces * reduce;
    p.backward += reduces * reduce;
    if (dp > 1) {
      double bandwidth = mesh.nodes > 1 ? site.hardware.across / tp : site.hardware.inside;
      p.backward += 2.0 * (dp - 1) / dp * 2 * parameters / tp / bandwidth / micro_batches;
    }
    p.state = 16 * parameters / tp;
    p.activation = (mesh.recompute ? inputs + 2 * sequence * hidden : activation) * samples / tp;
    if (p.state + p.activation > site.hardware.memory) continue;
    if (p.forward + p.backward < least) {
      least = p.forward + p.backward;
      best = p;
    }
  }
  return best;
}

SearchProblem problem_of(const Case& c, const View& view) {
  SearchProblem p;
  auto pieces = std::make_shared<std::vector<Piece>>(pieces_of(c.model));
  p.layers = static_cast<int>(view.first.size());
  auto ends = view.first;
  ends.push_back(static_cast<int>(pieces->size()));
  for (const Site& s : view.sites)
    p.clusters.push_back({s.hardware.name, s.nodes, s.devices, s.hardware.memory});
  p.batch = c.batch;
  if (p.layers == static_cast<int>(pieces->size()))
    for (const Piece& piece : *pieces) p.layer_class.push_back(piece.kind);
  p.stage_cost = [=](const StageQuery& q) {
    return gpt_cost(*pieces, ends[q.first], ends[q.last + 1], view.sites[q.mesh.cluster], q.mesh,
                    q.micro_batch,
                    static_cast<double>(c.batch) / static_cast<double>(q.micro_batch * q.pipelines),
                    c.model.hidden, c.model.sequence);
  };
  p.link_cost = [=](int layer, int from, int to, int64_t micro_batch, int pipelines) {
    if (view.links_are_free) return LinkTime{0, 0};
    Bytes bytes = (*pieces)[ends[layer]].carried * static_cast<double>(micro_batch);
    double bandwidth = from == to ? view.sites[from].hardware.across : view.cross / pipelines;
    return LinkTime{bytes / bandwidth, bytes / bandwidth};
  };
  return p;
}

std::vector<int> grouped(const std::vector<Piece>& pieces, int groups) {
  double total = 0, sum = 0;
  for (const Piece& p : pieces) total += p.flops;
  std::vector<int> first = {0};
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (i > 0 && static_cast<int>(first.size()) < groups &&
        sum + pieces[i].flops / 2 >= total * static_cast<double>(first.size()) / groups)
      first.push_back(static_cast<int>(i));
    sum += pieces[i].flops;
  }
  return first;
}

std::vector<int> every_piece(const std::vector<Piece>& pieces) {
  std::vector<int> first;
  for (size_t i = 0; i < pieces.size(); ++i) first.push_back(static_cast<int>(i));
  return first;
}

std::vector<int> every_block(const Gpt& g) {
  std::vector<int> first = {0};
  for (int b = 1; b < g.blocks; ++b) first.push_back(1 + 3 * b);
  return first;
}

}  // namespace motley::pipeline::hapt
