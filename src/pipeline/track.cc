#include "pipeline/track.h"

#include <algorithm>
#include <tuple>

namespace motley::pipeline {

Track::Track(const ChainProblem& chain, CostTable* table, Shared* shared)
    : chain_(chain), table_(table), shared_(*shared), layers_(chain.problem.layers) {
  add_blocks(chain.orders);
}

void Track::add_blocks(const Orders& orders) {
  std::map<std::tuple<size_t, uint32_t, int>, int> numbers;  // place, sub-clusters used, the last
  const auto visit = [&](const std::vector<int>& order, auto f) {
    uint32_t used = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      used |= uint32_t{1} << order[i];
      f(i, numbers[{i, used, order[i]}]);
    }
  };
  for (const auto& order : orders) visit(order, [](size_t, int&) {});
  for (auto& [key, number] : numbers) {
    number = static_cast<int>(blocks.size());
    Block block;
    block.cluster = std::get<2>(key);
    block.begin = size();
    const auto& moves = moves_of(block.cluster);
    for (size_t d = 0; d < moves.size(); ++d)
      positions.push_back(
          {&moves[d], number, block.begin, d == 0 ? -1 : link_row(block.cluster, block.cluster)});
    block.end = size();
    positions.push_back({nullptr, number, block.begin, -1});
    blocks.push_back(std::move(block));
  }
  for (const auto& order : orders) {
    int before = -1;
    visit(order, [&](size_t, int number) {
      if (before < 0) {
        if (std::find(roots.begin(), roots.end(), number) == roots.end()) roots.push_back(number);
      } else {
        std::vector<Next>& next = blocks[before].next;
        if (std::none_of(next.begin(), next.end(),
                         [&](const Next& n) { return n.block == number; }))
          next.push_back({number, link_row(blocks[before].cluster, blocks[number].cluster)});
      }
      before = number;
    });
  }
}

// Links by the layer behind them, from a stage on one sub-cluster to one on another.
int Track::link_row(int from, int to) {
  auto [it, fresh] = rows_.try_emplace({from, to}, static_cast<int>(link_total.size()));
  if (!fresh) return it->second;
  link_total.emplace_back(layers_ + 1, 0);
  link_worst.emplace_back(layers_ + 1, 0);
  for (int k = 1; k < layers_; ++k) {
    const LinkTime l = table_->link(k, from, to);
    link_total.back()[k] = l.total();
    link_worst.back()[k] = std::max(l.forward, l.backward);
  }
  return it->second;
}

// Of every device of a sub-cluster, counted from its first.
const std::vector<std::vector<Move>>& Track::moves_of(int c) {
  auto [it, fresh] = shared_.moves.try_emplace({chain_.shapes, c});
  if (!fresh) return it->second;
  const SubCluster& sub = chain_.problem.clusters[c];
  for (int d = 0; d < sub.size(); ++d) {
    it->second.emplace_back();
    for_each_mesh(sub, c, chain_.shapes, d, [&](Mesh mesh, int behind) {
      for (bool recompute : {false, true}) {
        if (recompute && !chain_.options.recompute) break;
        mesh.recompute = recompute;
        const int m = table_->mesh(mesh);
        if (table_->useful(m)) it->second.back().push_back({m, behind});
      }
    });
  }
  return it->second;
}

void Track::allow(Seconds p) {
  allowed_up.resize(link_worst.size());
  allowed_down.resize(link_worst.size());
  for (size_t r = 0; r < link_worst.size(); ++r) {
    auto &up = allowed_up[r], &down = allowed_down[r];
    up.assign(layers_ + 1, layers_);
    down.assign(layers_ + 1, 0);
    for (int k = layers_ - 1; k >= 0; --k) up[k] = link_worst[r][k] > p ? up[k + 1] : k;
    for (int k = 1; k <= layers_; ++k) down[k] = link_worst[r][k] > p ? down[k - 1] : k;
  }
}

}  // namespace motley::pipeline
