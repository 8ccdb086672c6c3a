#include "planner/by_type.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace motley::planner {

namespace {

class ByType {
 public:
  ByType(const Target& target, const Cluster& cluster, const grid::Model& model, int64_t batch)
      : target_(target), cluster_(cluster), model_(model), batch_(batch) {}

  std::vector<Arrangement> run() {
    std::vector<int> order(cluster_.types.size());
    std::iota(order.begin(), order.end(), 0);
    std::vector<Priced> own;
    do {
      for (int replicas = 1; replicas <= cluster_.size(); replicas *= 2) {
        std::vector<std::vector<Width>> choices;
        for (const int type : order) choices.push_back(widths(type, replicas));
        std::vector<Width> chosen(order.size());
        choose(order, replicas, choices, 0, &chosen, &own);
      }
    } while (std::next_permutation(order.begin(), order.end()));
    std::stable_sort(own.begin(), own.end(),
                     [](const Priced& a, const Priced& b) { return a.first < b.first; });
    std::vector<Arrangement> result;
    for (auto& [price, arrangement] : own) result.push_back(std::move(arrangement));
    return result;
  }

 private:
  using Priced = std::pair<double, Arrangement>;

  // A stage's devices: how many, and whether they divide matrices.
  struct Width {
    int devices;
    bool tensors;
  };

  std::vector<Width> widths(int type, int replicas) const {
    const int count = cluster_.count_by_type()[type];
    std::vector<Width> all;
    for (int w = 1; w * replicas <= count; w *= 2) {
      all.push_back({w, false});
      if (w > 1 && model_.heads % w == 0) all.push_back({w, true});
    }
    return all;
  }

  void choose(const std::vector<int>& order, int replicas,
              const std::vector<std::vector<Width>>& choices, size_t at, std::vector<Width>* chosen,
              std::vector<Priced>* own) const {
    if (at < order.size()) {
      for (const Width& width : choices[at]) {
        (*chosen)[at] = width;
        choose(order, replicas, choices, at + 1, chosen, own);
      }
      return;
    }
    Arrangement a;
    std::vector<double> speed;  // [stage]
    for (size_t t = 0; t < order.size(); ++t) {
      std::vector<int> devices;
      for (int d = 0; d < cluster_.size(); ++d)
        if (cluster_.devices[d].type == order[t]) devices.push_back(d);
      const auto [width, tensors] = (*chosen)[t];
      const int pp = static_cast<int>(devices.size()) / (width * replicas);
      for (int p = 0; p < pp; ++p) {
        ArrangedStage stage;
        stage.inside = tensors ? Inside::tensors : Inside::batch;
        for (int r = 0; r < replicas; ++r) {
          const auto from = devices.begin() + (static_cast<int64_t>(p) * replicas + r) * width;
          stage.devices.emplace_back(from, from + width);
        }
        a.stages.push_back(std::move(stage));
        speed.push_back(width * cluster_.types[order[t]].flops);
      }
    }
    if (static_cast<int>(a.stages.size()) > model_.size()) return;
    // Rows that all stages divide are divided by replicas.
    if (std::all_of(a.stages.begin(), a.stages.end(), [](const ArrangedStage& stage) {
          return stage.inside == Inside::batch && stage.width() > 1;
        }))
      return;
    share_blocks(speed, &a);
    for (int64_t samples = 1; samples * replicas <= batch_; samples *= 2) {
      if (batch_ % (samples * replicas) != 0) break;
      a.micro_batch = samples;
      const auto count = static_cast<int>(batch_ / samples / replicas);
      a.micro_batches.assign(replicas, count);
      if (!cannot_say(target_, with_warm_ups(a), cluster_, {}).empty()) continue;
      double most = 0, sum = 0;
      for (size_t s = 0; s < speed.size(); ++s) {
        const double stage = a.stages[s].blocks / speed[s];
        most = std::max(most, stage);
        sum += stage;
      }
      own->emplace_back(static_cast<double>(samples) * ((count - 1) * most + sum),
                        with_warm_ups(a));
    }
  }

  static Arrangement with_warm_ups(Arrangement a) {
    for (size_t s = 0; s < a.stages.size(); ++s)
      a.stages[s].warm_up = std::min(static_cast<int>(a.stages.size() - s), a.micro_batches[0]);
    return a;
  }

  // In proportion to speed, at least one each.
  void share_blocks(const std::vector<double>& speed, Arrangement* a) const {
    int left = model_.size();
    for (ArrangedStage& stage : a->stages) stage.blocks = 1, --left;
    for (; left > 0; --left) {
      size_t best = 0;
      for (size_t s = 1; s < speed.size(); ++s)
        if ((a->stages[s].blocks + 1) / speed[s] < (a->stages[best].blocks + 1) / speed[best])
          best = s;
      ++a->stages[best].blocks;
    }
  }

  const Target& target_;
  const Cluster& cluster_;
  const grid::Model& model_;
  const int64_t batch_;
};

}  // namespace

std::vector<Arrangement> arrangements_by_type(const Target& target, const Cluster& cluster,
                                              const grid::Model& model, int64_t batch) {
  return ByType(target, cluster, model, batch).run();
}

}  // namespace motley::planner
