// Times of the folded search on synthetic transformer training steps, by depth: order, first solve,
// solve with other weights. Arguments: [--csv] [--layers N]... ; default layers 12 24 48.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "reference/spmd_gpt.h"
#include "solver/folded.h"

namespace {

using namespace motley::solver;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Least of three runs.
template <typename F>
double seconds(F&& run) {
  double least = 1e30;
  for (int i = 0; i < 3; ++i) {
    const double start = now_s();
    run();
    least = std::min(least, now_s() - start);
  }
  return least;
}

}  // namespace

int main(int argc, char** argv) {
  bool csv = false;
  std::vector<int> depths;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--csv") == 0) csv = true;
    if (std::strcmp(argv[i], "--layers") == 0 && i + 1 < argc) {
      depths.push_back(std::atoi(argv[++i]));
    }
  }
  if (depths.empty()) depths = {12, 24, 48};
  if (csv) {
    fmt::print("layers,nodes,order_s,first_s,again_s,states,price_s,lower_bound_s\n");
  } else {
    fmt::print("{:>6} {:>6} {:>9} {:>9} {:>9} {:>9} {:>12} {:>12}\n", "layers", "nodes", "order s",
               "first s", "again s", "states", "price s", "bound s");
  }
  for (int layers : depths) {
    GptShape shape;
    shape.layers = layers;
    shape.flops = {60e12, 15e12};
    shape.devices = {8, 8};
    const Problem problem = gpt_problem(shape);
    Order order;
    Solution first;
    const double order_s = seconds([&] { order = make_order(problem); });
    const double first_s = seconds([&] { first = solve_folded(problem, order, {{0.5, 0.5}, {}}); });
    const double again_s = seconds([&] { solve_folded(problem, order, {{0.3, 0.7}, {}}); });
    fmt::print(
        fmt::runtime(csv ? "{},{},{:.4f},{:.4f},{:.4f},{},{:.9g},{:.9g}\n"
                         : "{:>6} {:>6} {:>9.4f} {:>9.4f} {:>9.4f} {:>9} {:>12.9g} {:>12.9g}\n"),
        layers, problem.nodes.size(), order_s, first_s, again_s, first.states, first.price,
        first.lower_bound);
  }
  return 0;
}
