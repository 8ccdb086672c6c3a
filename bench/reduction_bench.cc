// Reduction programs by measurement: gloo's all-reduce against the program that a plan would use,
// on emulated clusters of two levels (network namespaces, slow links between the nodes).
//
//   reduction_bench [OUT.csv]
//
// For every cluster this program is started again on every worker by `motley emulate`. A row is one
// size: the median of kRuns seconds of both, each run the slowest worker's, taken in turns; their
// ratio; and the ratio that the fluid simulator predicts. All sums are compared with the plain
// ones, bit for bit for integers.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "cluster/cluster.h"
#include "comm/gloo.h"
#include "comm/launch.h"
#include "comm/reducing.h"
#include "core/file.h"
#include "net/topology.h"
#include "reduce/cluster.h"

namespace {

using namespace motley;

constexpr int kRuns = 15;

struct Shape {
  const char* name;
  std::vector<int> nodes;
  const char* outer;
  const char* inner;
};
const Shape kShapes[] = {{"2 x 2", {2, 2}, "200 Mbps", "4 Gbps"},
                         {"2 x 3", {3, 3}, "200 Mbps", "4 Gbps"},
                         {"3 x 2", {2, 2, 2}, "200 Mbps", "4 Gbps"},
                         {"2 x 4", {4, 4}, "200 Mbps", "4 Gbps"},
                         {"4 + 2", {4, 2}, "200 Mbps", "4 Gbps"}};

std::string yaml_of(const Shape& shape) {
  std::string yaml = fmt::format("name: {}\nlink: {{bandwidth: {}, latency: 100 us}}\ngroups:\n",
                                 shape.name, shape.outer);
  for (size_t i = 0; i < shape.nodes.size(); ++i)
    yaml += fmt::format(
        "  - name: node{}\n    link: {{bandwidth: {}, latency: 50 us}}\n    devices: [{{type: "
        "worker, count: {}}}]\n",
        i, shape.inner, shape.nodes[i]);
  return yaml +
         "device_types:\n  - {name: worker, like: cpu-core, flops: 5 GFLOPS, memory: 1 GiB, "
         "memory_bandwidth: 1 GB/s, speed: 0.1}\n";
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of the slowest worker.
double timed(Communicator& group, Communicator& by, at::Tensor tensor) {
  group.barrier();
  const double start = now_s();
  by.all_reduce(tensor);
  at::Tensor seconds = at::full({1}, now_s() - start, at::kDouble);
  group.all_reduce(seconds, Reduction::max);
  return seconds.item<double>();
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

int work(const Shape& shape) {
  const Cluster cluster = parse_cluster(yaml_of(shape), shape.name);
  std::vector<ReductionProgram> programs = reduce::reductions_of_all(cluster);
  const auto group = join_group(*rendezvous_from_environment());
  set_threads(1);
  if (programs.empty()) {
    if (group->rank() == 0) std::fprintf(stderr, "%s: no program is faster\n", shape.name);
    return 1;
  }
  const net::Topology network(cluster);
  std::vector<int> all;
  for (int d = 0; d < cluster.size(); ++d) all.push_back(d);
  const std::vector<ReductionStep> plain_steps = {{Collective::all_reduce, {all}}};
  const double from = programs[0].from;
  programs[0].from = 0;  // every size is measured
  const auto program = reducing(*group, programs);

  at::Tensor integers = at::arange(1 << 16, at::kLong) * (group->rank() + 1);
  at::Tensor expected = integers.clone();
  group->all_reduce(expected);
  program->all_reduce(integers);
  if (!at::equal(expected, integers)) {
    std::fprintf(stderr, "%s: the program's sum differs\n", shape.name);
    return 1;
  }
  for (const int64_t bytes : {1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24}) {
    at::Tensor tensor = at::zeros({bytes / 4}, at::kFloat);
    std::vector<double> plain_s, program_s;
    timed(*group, *group, tensor);
    timed(*group, *program, tensor);
    for (int run = 0; run < kRuns; ++run) {
      plain_s.push_back(timed(*group, *group, tensor));
      program_s.push_back(timed(*group, *program, tensor));
    }
    const double b = static_cast<double>(bytes);
    const double predicted = reduce::seconds_of(plain_steps, network, b) /
                             reduce::seconds_of(programs[0].steps, network, b);
    if (group->rank() != 0) continue;
    std::printf("%s,%ld,%d,%.6f,%.6f,%.3f,%.3f\n", shape.name, static_cast<long>(bytes),
                b >= from ? 1 : 0, median(plain_s), median(program_s),
                median(plain_s) / median(program_s), predicted);
    std::fflush(stdout);
  }
  return 0;
}

// Runs the workers of one cluster; their rows.
std::string measure(const std::string& self, size_t shape) {
  const std::string path = std::filesystem::temp_directory_path() /
                           fmt::format("motley-reduction-bench-{}.yaml", getpid());
  write_file(path, yaml_of(kShapes[shape]));
  const std::string motley = self.substr(0, self.rfind('/') + 1) + "motley";
  const std::string command =
      fmt::format("'{}' emulate --cluster {} -- '{}' --worker {}", motley, path, self, shape);
  std::string out;
  FILE* pipe = popen(command.c_str(), "r");
  char line[512];
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe) != nullptr) out += line;
  const int status = pipe == nullptr ? 1 : pclose(pipe);
  unlink(path.c_str());
  if (status != 0) std::fprintf(stderr, "%s: the workers failed\n", kShapes[shape].name);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--worker") return work(kShapes[std::atoi(argv[2])]);
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  if (length < 0) return 1;
  self[length] = 0;
  std::string csv = "nodes,bytes,chosen,plain_s,program_s,speedup,predicted_speedup\n";
  std::printf("%s", csv.c_str());
  bool failed = false;
  for (size_t s = 0; s < std::size(kShapes); ++s) {
    const std::string rows = measure(self, s);
    failed = failed || rows.empty();
    std::printf("%s", rows.c_str());
    std::fflush(stdout);
    csv += rows;
  }
  if (argc > 1) std::ofstream(argv[1]) << csv;
  return failed;
}
