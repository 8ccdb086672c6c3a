#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/rng.h"
#include "grid/search.h"
#include "reference/grid.h"

namespace motley::grid {
namespace {

Cluster two_groups(Rng* rng) {
  const char* const types[] = {"V100-16GB", "T4", "A100-40GB"};
  std::string groups;
  for (int k = 0; k < 2; ++k)
    groups += fmt::format(
        "  - {{name: k{}, count: {}, link: {{bandwidth: 100 Gbps, latency: 5 us}}, devices: "
        "[{{type: {}, count: {}}}]}}\n",
        k, rng->between(1, 2), types[rng->below(3)], 1 << rng->between(0, 2));
  return parse_cluster("name: two\nlink: {bandwidth: 10 Gbps, latency: 30 us}\ngroups:\n" + groups,
                       "two");
}

// Whether some cut of the layers into the stages' ranges fits, of all cuts, with as few micro-batches
// in flight as a replica can have; a range may be empty.
bool some_cut_fits(const Estimator& e, int batch, const Mesh& mesh, Strategy s) {
  const int total = batch / s.micro_batch, layers = e.model().size(), ranges = s.pp * s.interleave;
  s.micro_batches = {(total + s.dp - 1) / s.dp};
  const auto kept = [&](int l) {
    return (1 + e.calibration().fragmentation) * e.activation_bytes(l, l + 1, s);
  };
  Bytes once = 0;  // of the layer that needs most of it
  for (int l = 0; l < layers; ++l) once = std::max(once, e.transient_bytes(l, l + 1, s));
  const auto fits = [&](int range, int first, int last) {
    const double held = e.in_flight(range, s);
    Bytes used = 0;
    for (int l = first; l < last; ++l) used += e.state_bytes(l, l + 1, s) + held * kept(l);
    const Bytes room = e.memory_limit(range % s.pp, s, mesh) - e.context_bytes(s) -
                       once * Estimator::alive_at_once(s);
    return first == last || used <= room / s.interleave * (1 + 1e-9);
  };
  const auto rest = [&](auto&& self, int range, int first) -> bool {
    if (range + 1 == ranges) return fits(range, first, layers);
    for (int last = first; last <= layers; ++last)
      if (fits(range, first, last) && self(self, range + 1, last)) return true;
    return false;
  };
  return rest(rest, 0, 0);
}

// What is left out before links and micro-batches are looked at is what no cut makes fit; and
// nothing is that has an assignment.
TEST(Choose, MayFitEqualsAllCuts) {
  int fit = 0, none = 0, assigned = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Rng rng(seed);
    const Cluster cluster = two_groups(&rng);
    TransformerShape shape;
    shape.layers = static_cast<int>(rng.between(2, 6));
    shape.hidden = 1024 << rng.between(0, 3);
    shape.heads = 8;
    const Model model = transformer_model("gpt", shape, fp16_adam());
    const Estimator e(model, cluster, default_calibration(cluster, model.precision));
    Strategy s;
    s.runtime = seed % 2 ? Runtime::motley : Runtime::deepspeed;
    s.tp = 1 << rng.between(0, 2), s.cp = 1 << rng.between(0, 1);
    s.pp = static_cast<int>(rng.between(1, 4)), s.dp = static_cast<int>(rng.between(1, 4));
    if (s.ranks() > cluster.size()) continue;
    s.interleave = s.pp > 1 && rng.chance(0.2) ? 2 : 1;
    s.micro_batch = 1 << rng.between(0, 4);
    s.zero = static_cast<int>(rng.between(0, 3));
    s.recompute = rng.chance(0.4)   ? Recompute::none
                  : rng.chance(0.5) ? Recompute::full
                                    : Recompute::selective;
    const int batch = s.micro_batch * s.dp * static_cast<int>(rng.between(1, 6)) +
                      (rng.chance(0.3) ? s.micro_batch : 0);
    s.devices.resize(s.ranks());
    std::iota(s.devices.begin(), s.devices.end(), 0);
    const Mesh mesh = e.mesh(s);
    const bool may = may_fit(e, batch, e.groups(s), s);
    if (s.interleave == 1 || batch / s.micro_batch % s.dp == 0) {
      ASSERT_EQ(may, some_cut_fits(e, batch, mesh, s)) << seed << " " << to_string(s);
      ++(may ? fit : none);
    }
    if (!give_micro_batches(e, batch, mesh, &s) || !assign(e, mesh, true, &s, nullptr)) continue;
    EXPECT_TRUE(may) << seed << " " << to_string(s);
    ++assigned;
  }
  EXPECT_GT(fit, 200);
  EXPECT_GT(none, 200);
  EXPECT_GT(assigned, 200);
}

}  // namespace
}  // namespace motley::grid
