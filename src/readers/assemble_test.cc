#include "readers/assemble.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "core/file.h"
#include "core/rng.h"
#include "mutate_text.h"
#include "readers/layer_times.h"
#include "readers/machines.h"
#include "readers/nccl.h"
#include "readers/planners.h"
#include "readers/text.h"

namespace motley::readers {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string data(const std::string& name) {
  return read_file(std::string(MOTLEY_SOURCE_DIR) + "/tests/data/topo/" + name + ".txt");
}

// "2 of (2 of A100-40GB at 300)": the tree, with bandwidths in GB/s.
std::string outline(const Cluster& c, GroupId id = GroupId(0)) {
  const Group& g = c.groups[id.index];
  const std::string at = fmt::format(" at {:.4g}", g.link.bandwidth / 1e9);
  int links = 0;
  for (const DirectLink& d : g.direct) links += d.links;
  const std::string direct =
      links > 0 ? fmt::format(", {} pairs with {} NVLinks", g.direct.size(), links) : "";
  if (g.children.empty())
    return fmt::format("{} {}{}{}", g.device_count, c.type_of(g.first_device).name, at, direct);
  return fmt::format("{} of ({}){}", g.children.size(), outline(c, g.children[0]), at);
}

// As nvidia-smi prints them on nine kinds of machines (tests/data/query/README.md).
TEST(Machines, OfNineKindsAreReadLevelByLevel) {
  struct Case {
    const char *name, *outline;
  };
  const Case cases[] = {
      {"dgx-h100", "8 H100-80GB at 450"},
      {"dgx-a100", "8 A100-80GB at 300"},
      {"hgx-a100-4", "4 A100-40GB at 300"},
      {"dgx-1-v100", "8 V100-32GB at 7.2, 16 pairs with 24 NVLinks"},
      {"dgx-2-v100", "16 V100-32GB at 150"},
      {"pcie-a100-pairs", "2 of (2 A100-40GB at 300) at 14.4"},
      {"t4-8", "2 of (2 of (2 T4 at 12) at 9.6) at 7.2"},
      {"1080ti-2", "2 1080Ti at 9.6"},
      {"p100-interleaved", "2 of (2 P100-16GB at 12) at 7.2"},
  };
  for (const Case& c : cases) {
    Sources s;
    s.topo = Source{"topo.txt", data(c.name)};
    s.query = Source{"query.csv", read_file(std::string(MOTLEY_SOURCE_DIR) + "/tests/data/query/" +
                                            c.name + ".csv")};
    const Assembled found = assemble(s);
    EXPECT_EQ(outline(found.cluster), c.outline) << c.name;
    EXPECT_THAT(found.assumed, testing::Contains(HasSubstr("measure it with nccl-tests")))
        << c.name;
    EXPECT_EQ(to_yaml(parse_cluster(found.yaml, "c")), to_yaml(found.cluster));
  }
}

TEST(Machines, HostlistsHostfilesAndNodes) {
  EXPECT_THAT(hostlist("dev[0-2,007],login", "x"),
              ElementsAre("dev0", "dev1", "dev2", "dev007", "login"));
  EXPECT_THAT(hostlist("r[1-2]n[08-09]", "x"), ElementsAre("r1n08", "r1n09", "r2n08", "r2n09"));
  for (const char* wrong : {"a[1-", "a[3-1]", "a[x]", "a[1-99999999999]", "a[0-99999]b[0-99999]"})
    EXPECT_THROW(hostlist(wrong, "x"), UserError) << wrong;
  const auto hosts =
      parse_hostfile("# comment\nw1 slots=8 type=A800\nw2:4\n\nw3 max_slots=9\n", "h");
  ASSERT_EQ(hosts.size(), 3u);
  EXPECT_EQ(hosts[0].type, "A800");
  EXPECT_EQ(hosts[1].gpus, 4);
  EXPECT_EQ(hosts[2].gpus, 0);
  EXPECT_THROW(parse_hostfile("w1 slots=8\nw1 slots=8\n", "h"), UserError);
  EXPECT_THROW(parse_hostfile("w1 slots=eight\n", "h"), UserError);
  EXPECT_THROW(parse_hostfile("w1:-1\n", "h"), UserError);
  const auto nodes = parse_nodes(
      "NodeName=n1 Arch=x86_64 CoresPerSocket=16\n   CPUTot=64\n   Gres=gpu:a100:8(S:0-1)\n\n"
      "NodeName=n2 Gres=gpu:v100:2,gpu:v100:2\nNodeName=login Gres=(null)\n"
      "NodeName=m[1-3] Gres=gpu:4\n",
      "n");
  ASSERT_EQ(nodes.size(), 5u);
  EXPECT_EQ(nodes[0].gpus, 8);
  EXPECT_EQ(nodes[0].type, "a100");
  EXPECT_EQ(nodes[1].gpus, 4);
  EXPECT_EQ(nodes[4].gpus, 4);
}

const char* const kNodes = "NodeName=a[1-4] Gres=gpu:a100:8\nNodeName=v[1-2] Gres=gpu:v100:4\n";

TEST(Slurm, TopologiesBecomeLevels) {
  Sources s;
  s.nodes = Source{"nodes.txt", kNodes};
  s.topology =
      Source{"topology.conf",
             "# racks\nSwitchName=r1 Nodes=a[1-2] LinkSpeed=100\nSwitchName=r2 Nodes=a[3-4]\n"
             "SwitchName=r3 Nodes=v[1-2]\nSwitchName=top Switches=r[1-3]\n"};
  const Assembled conf = assemble(s);
  ASSERT_EQ(conf.cluster.size(), 40);
  EXPECT_EQ(outline(conf.cluster), "3 of (2 of (8 A100-40GB at 24) at 12.5) at 12.5");
  EXPECT_THAT(conf.assumed, testing::Contains(HasSubstr("LinkSpeed")));
  s.topology = Source{"topology.yaml", R"(- topology: t
  cluster_default: true
  tree:
    switches:
      - {switch: top, children: "r[1-3]"}
      - {switch: r1, nodes: "a[1-2]"}
      - {switch: r2, nodes: "a[3-4]"}
      - {switch: r3, nodes: "v[1-2]"}
)"};
  EXPECT_EQ(outline(assemble(s).cluster), outline(conf.cluster));
  s.topology = Source{"topology.conf",
                      "BlockName=b1 Nodes=a[1-2]\nBlockName=b2 Nodes=a[3-4]\nBlockSizes=2\n"};
  const Assembled blocks = assemble(s);  // v1, v2 are in no block
  EXPECT_EQ(blocks.cluster.size(), 40);
  EXPECT_THAT(blocks.assumed, testing::Contains(HasSubstr("does not name")));
  for (const char* wrong :
       {"SwitchName=a Switches=b\n", "SwitchName=a Switches=b\nSwitchName=b Switches=a\n",
        "SwitchName=a Nodes=x1\nSwitchName=a Nodes=x2\n", "SwitchName=a\n",
        "SwitchName=a Nodes=x9\n"}) {
    s.topology = Source{"topology.conf", wrong};
    EXPECT_THROW(assemble(s), UserError) << wrong;
  }
}

// What all_reduce_perf would print of a line, with noise.
std::string nccl_text(const char* program, int ranks, int hosts, double fixed_us,
                      double us_per_byte, double noise, Rng* rng, bool extra = false) {
  std::string text = fmt::format(
      "# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor)\n#\n# Using devices "
      "({})\n",
      program);
  for (int r = 0; r < ranks; ++r)
    text += fmt::format(
        "#  Rank {:2} Group  0 Pid {:6} on {:>10} device {:2} [0x{:02x}] NVIDIA A100-SXM4-40GB\n",
        r, 1000 + r, fmt::format("host{}", r * hosts / ranks), r % 8, 7 + r);
  text +=
      "#\n#       size         count      type   redop    root     time   algbw   busbw #wrong     "
      "time   algbw   busbw #wrong\n";
  for (double size = 8; size <= 1e9; size *= 2) {
    const auto columns = [&] {
      const double t = (fixed_us + us_per_byte * size) * (1 + noise * (2 * rng->uniform() - 1));
      return fmt::format("{:10.2f} {:7.2f} {:7.2f}      0{}", t, size / t / 1e3, size / t / 1e3,
                         extra ? "  1.0 2.0 3.0 0.1" : "");
    };
    text += fmt::format("{:12.0f} {:12.0f}     float     sum      -1 {} {}\n", size, size / 4,
                        columns(), columns());
  }
  return text + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 123.4\n#\n";
}

TEST(Nccl, FitsSyntheticTablesWithin5Percent) {
  Rng rng(5);
  for (int round = 0; round < 200; ++round) {
    const int ranks = 2 << rng.below(5);
    const double fixed = std::pow(10, 0.5 + 2 * rng.uniform()),
                 bandwidth = std::pow(10, 9 + 2.5 * rng.uniform());
    const double factor = 2. * (ranks - 1) / ranks;
    const NcclRun run = parse_nccl(nccl_text("all_reduce_perf", ranks, 1, fixed,
                                             1e6 * factor / bandwidth, 0.05, &rng, round % 2),
                                   "x.txt");
    EXPECT_EQ(run.ranks, ranks);
    EXPECT_EQ(run.points.size(), 54u);
    const NcclFit found = fit(run);
    EXPECT_NEAR(found.bandwidth, bandwidth, 0.05 * bandwidth);
    EXPECT_NEAR(found.latency, fixed * 1e-6 / (2 * (ranks - 1)),
                0.05 * fixed * 1e-6 / (2 * (ranks - 1)));
  }
}

// The slow reference of the closed form: a fine grid around it has nothing better.
TEST(Nccl, LeastSquaresAreLeast) {
  Rng rng(6);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::pair<Bytes, Seconds>> points;
    for (double size = 64; size < 1e8; size *= 3)
      points.emplace_back(size, (1e-5 + size * 1e-10) * (0.5 + rng.uniform()));
    const Line line = fit_line(points);
    const auto loss = [&](double fixed, double per_byte) {
      double sum = 0;
      for (const auto& [s, t] : points) sum += std::pow((t - fixed - per_byte * s) / t, 2);
      return sum;
    };
    const double best = loss(line.fixed, line.per_byte);
    for (double f = 0.9; f < 1.1; f += 0.01)
      for (double b = 0.9; b < 1.1; b += 0.01)
        EXPECT_GE(loss(f * line.fixed, b * line.per_byte), best * (1 - 1e-12));
  }
}

TEST(Nccl, JsonSaysTheSame) {
  const char* json = R"({"version": "2.17", "args": ["build/all_gather_perf", "-J", "x"],
    "devices": [{"rank": 0, "group": 0, "hostname": "a", "device_info": "NVIDIA H100 80GB HBM3"},
                {"rank": 1, "group": 0, "hostname": "b", "device_info": "NVIDIA H100 80GB HBM3"}],
    "results": [{"size": 1000, "count": 250, "type": "float", "out_of_place": {"time": 11.0, "alg_bw": 1, "nwrong": 0}},
                {"size": 2000, "count": 500, "type": "float", "out_of_place": {"time": 12.0, "alg_bw": 1, "nwrong": 0}},
                {"size": 4000, "count": 1000, "type": "float", "in_place": {"time": 14.0}}]})";
  const NcclRun run = parse_nccl(json, "x.json");
  EXPECT_EQ(run.collective, Collective::all_gather);
  EXPECT_EQ(run.hosts, 2);
  const NcclFit found = fit(run);
  EXPECT_NEAR(found.latency, 10e-6, 1e-12);
  EXPECT_NEAR(found.bandwidth, 0.5 / 1e-9, 1);
  EXPECT_THROW(parse_nccl(R"({"results": []})", "all_reduce.json"), UserError);
}

// Two runs, inside of a machine and over all, give two levels.
TEST(Nccl, GivesTheLinkOfEachLevel) {
  Rng rng(7);
  Sources s;
  s.nccl.push_back(
      {"inside.txt", nccl_text("all_reduce_perf", 8, 1, 20, 1e6 * 1.75 / 230e9, 0.02, &rng)});
  s.nccl.push_back(
      {"across.txt", nccl_text("all_reduce_perf", 32, 4, 90, 1e6 * 1.9375 / 11e9, 0.02, &rng)});
  const Assembled found = assemble(s);
  ASSERT_EQ(found.cluster.size(), 32);
  ASSERT_EQ(found.cluster.groups.size(), 5u);
  EXPECT_NEAR(found.cluster.groups[0].link.bandwidth, 11e9, 0.05 * 11e9);
  EXPECT_NEAR(found.cluster.groups[1].link.bandwidth, 230e9, 0.05 * 230e9);
  EXPECT_EQ(found.cluster.groups[4].measured.size(), 1u);
  EXPECT_EQ(found.cluster.type_of(0).name, "A100-40GB");
  for (const std::string& what : found.assumed)
    EXPECT_THAT(what, testing::Not(HasSubstr("link of")));
}

// 8 GPUs at 160 GB/s on the bus, two machines at 11: Galvatron's own numbers and names.
TEST(Planners, GalvatronsBandwidthsGiveLinks) {
  Sources s;
  s.nccl = {
      {"allreduce_bandwidth_2nodes_8gpus_per_node.json",
       R"({"allreduce_size_16_consec_1": 11.0, "allreduce_size_8_consec_1": 160.0, "allreduce_size_8_consec_0": 5.5})"}};
  const Assembled found = assemble(s);
  ASSERT_EQ(found.cluster.size(), 16);
  EXPECT_NEAR(found.cluster.groups[0].link.bandwidth, 11e9, 1e4);
  EXPECT_NEAR(found.cluster.groups[1].link.bandwidth, 160e9, 1e5);
  EXPECT_GT(found.cluster.groups[0].link.latency, 0);
  for (const std::string& what : found.assumed)
    EXPECT_THAT(what, testing::Not(HasSubstr("link of")));
}

// Messages between stages give the links that no collective was measured over, and no collective.
TEST(Planners, MessagesOfGalvatronGiveLinks) {
  Sources s;
  s.nccl = {{"p2p_bandwidth_2nodes_4gpus_per_node.json",
             R"({"pp_size_2": 9.5, "pp_size_4": 140.0, "pp_size_8": 150.0})"}};
  const Assembled found = assemble(s);
  ASSERT_EQ(found.cluster.size(), 8);
  EXPECT_NEAR(found.cluster.groups[0].link.bandwidth, 9.5e9, 1e4);
  EXPECT_NEAR(found.cluster.groups[1].link.bandwidth, 140e9, 1e5);
  for (const Group& group : found.cluster.groups) EXPECT_TRUE(group.measured.empty());
  EXPECT_THAT(found.read, testing::Contains(HasSubstr("messages over 8 ranks")));
  s.nccl.push_back(
      {"allreduce_bandwidth_2nodes_4gpus_per_node.json", R"({"allreduce_size_8_consec_1": 11.0})"});
  EXPECT_NEAR(assemble(s).cluster.groups[0].link.bandwidth, 11e9, 1e4);
}

TEST(Planners, TimesBySizeAreFitted) {
  std::string galvatron = "{", megabytes, seconds;
  for (int mb = 1; mb <= 512; mb *= 2) {
    const double t = 14 * 4e-6 + mb * 1048576. * 1.75 / 200e9;
    galvatron +=
        fmt::format("{}\"allreduce_size_8_{}MB_time\": {}", mb > 1 ? ", " : "", mb, 1e3 * t);
    megabytes += fmt::format("{}{}", mb > 1 ? ", " : "", mb);
    seconds += fmt::format("{}{}", mb > 1 ? ", " : "", t);
  }
  const std::string nnscaler = fmt::format("{{\"all reduce\": [[{}], [{}]]}}", megabytes, seconds);
  for (const auto& [name, text] :
       {std::pair<std::string, std::string>{"sp_time_1nodes_8gpus_per_node.json", galvatron + "}"},
        {"intra_8.json", nnscaler}}) {
    Sources s;
    s.nccl = {{name, text}};
    const Assembled found = assemble(s);
    ASSERT_EQ(found.cluster.size(), 8) << name;
    EXPECT_NEAR(found.cluster.groups[0].link.bandwidth, 200e9, 0.01 * 200e9) << name;
    EXPECT_NEAR(found.cluster.groups[0].link.latency, 4e-6, 1e-7) << name;
  }
}

TEST(Planners, WhatIsWrongIsSaid) {
  const auto why = [](const char* name, const char* text) {
    try {
      parse_communication(text, name);
    } catch (const UserError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_THAT(why("bandwidth.json", R"({"allreduce_size_8_consec_1": 5})"),
              HasSubstr("does not say of which machines"));
  EXPECT_THAT(why("x_1nodes_4gpus_per_node.json", R"({"allreduce_size_8_consec_1": 5})"),
              HasSubstr("of 8 of 4 devices"));
  EXPECT_THAT(why("x_1nodes_4gpus_per_node.json", R"({"pp_size_8": 5})"),
              HasSubstr("of 8 of 4 devices"));
  EXPECT_THAT(why("x_1nodes_8gpus_per_node.json", R"({"allreduce_size_8_consec_1": -5})"),
              HasSubstr("no number above 0"));
  EXPECT_THAT(why("x.json", R"({"all gather": [[1], [1e-5]]})"), HasSubstr("of how many devices"));
  EXPECT_THAT(why("intra_4.json", R"({"all gather": [[1, 2], [1e-5]]})"),
              HasSubstr("lists of one length"));
}

// Keys and numbers as Galvatron writes them: totals of models of two and four layers, and milliseconds
// of a layer and sample.
TEST(LayerTimes, AreOfAWholeLayerAndAllSamples) {
  const LayerTimes direct = parse_layer_times(
      R"({"layernum[2]_bsz1_seq4096": 17.1, "layernum[4]_bsz1_seq4096": 24.7, "layertype_0_bsz1_seq4096": 3.8,
          "layertype_other_bsz1_seq4096": 9.6, "layertype_0_bsz8_seq4096": 3.9, "layertype_0_bsz2_seq2048": 1.5,
          "layertype_0_bsz1_seq4096_mlp": 6.7})",
      "configs/computation_profiling_bf16_llama-7b_all.json");
  EXPECT_TRUE(direct.half);
  ASSERT_EQ(direct.forward.size(), 2u);
  EXPECT_THAT(direct.forward.at(2048), ElementsAre(std::pair(2, 3e-3)));
  EXPECT_EQ(direct.forward.at(4096)[0].first, 1);
  EXPECT_NEAR(direct.forward.at(4096)[0].second, 3.8e-3, 1e-12);
  EXPECT_EQ(direct.forward.at(4096)[1].first, 8);
  EXPECT_NEAR(direct.forward.at(4096)[1].second, 8 * 3.9e-3, 1e-12);

  const LayerTimes counted = parse_layer_times(
      R"({"layernum[2]_bsz4_seq128": 20, "layernum[6]_bsz4_seq128": 50, "layernum[2]_bsz8_seq128": 9})",
      "computation_profiling_fp32_bert.json");
  EXPECT_FALSE(counted.half);
  ASSERT_EQ(counted.forward.size(), 1u);
  ASSERT_EQ(counted.forward.at(128).size(), 1u);
  EXPECT_NEAR(counted.forward.at(128)[0].second, 7.5e-3, 1e-12);
}

TEST(LayerTimes, WhatIsWrongIsSaid) {
  const auto why = [](const std::string& text, const char* name = "x_bf16.json") {
    try {
      parse_layer_times(text, name);
    } catch (const UserError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_THAT(why(R"({"layertype_0_bsz1_seq8": 1})", "x.json"), HasSubstr("in which precision"));
  EXPECT_THAT(why(R"({"layertype_0_bsz1_seq8": -1})"), HasSubstr("no number above 0"));
  EXPECT_THAT(why(R"({"layertype_0_bsz0_seq8": 1})"), HasSubstr("says 0"));
  EXPECT_THAT(why(R"({"layertype_0_bsz1_seq8_mlp": 1})"), HasSubstr("no time of a whole layer"));
  EXPECT_THAT(why(R"({"layernum[2]_bsz1_seq8": 1})"), HasSubstr("no time of a whole layer"));
  EXPECT_THAT(why(R"({"layernum[2]_bsz1_seq8": 3, "layernum[4]_bsz1_seq8": 3})"),
              HasSubstr("take no longer"));
  EXPECT_THAT(why("[]"), HasSubstr("no JSON object"));
  EXPECT_NEAR(parse_overlap(R"({"overlap_coe": 1.1256})", "x"), 0.1256, 1e-12);
  for (const char* text : {"{}", R"({"overlap_coe": 0.5})", R"({"overlap_coe": "a"})", "[1.1]"})
    EXPECT_THROW(parse_overlap(text, "x"), UserError) << text;
}

TEST(LayerTimes, WhatWasMeasuredIsInTheFile) {
  Sources s;
  s.query =
      Source{"q", "name, memory.total [MiB]\nNVIDIA B200, 183359 MiB\nNVIDIA B200, 183359 MiB\n"};
  const Assembled before = assemble(s);
  ASSERT_EQ(before.cluster.types.size(), 1u);
  EXPECT_THAT(before.assumed, testing::Contains(HasSubstr("speed of NVIDIA-B200")));
  DeviceType type = before.cluster.types[0];
  type.half_flops = 7e14, type.overhead = 3e-6, type.interference = 0.125;
  s.device = type;
  s.of_device = {"speed of it"};
  const Assembled after = assemble(s);
  EXPECT_EQ(after.cluster.types[0].half_flops, 7e14);
  EXPECT_EQ(after.cluster.types[0].overhead, 3e-6);
  EXPECT_EQ(after.cluster.types[0].interference, 0.125);
  EXPECT_EQ(after.cluster.types[0].memory, before.cluster.types[0].memory);
  EXPECT_THAT(after.read, testing::Contains("speed of it"));
  EXPECT_THAT(after.assumed, testing::Not(testing::Contains(HasSubstr("speed of"))));
  s.query = Source{"q", "name, memory.total [MiB]\nNVIDIA A100-SXM4-40GB, 40960 MiB\n"};
  s.device.reset();
  type = assemble(s).cluster.types[0];
  ASSERT_EQ(type.name, "A100-40GB");
  type.flops *= 0.5;
  s.device = type;
  EXPECT_NEAR(assemble(s).cluster.types[0].flops, type.flops, 1e-5 * type.flops);
}

// Whatever is in a file, it is taken or refused in one line.
TEST(Readers, SurviveChangedFiles) {
  Rng rng(8);
  const std::string nccl = nccl_text("all_reduce_perf", 4, 2, 20, 1e-3, 0.1, &rng);
  const std::vector<std::pair<std::string, std::string>> seeds = {
      {"topo", data("t4-8")},
      {"topo", data("dgx-h100")},
      {"query", "name, memory.total [MiB]\nTesla T4, 15360 MiB\nTesla T4, 15360 MiB\n"},
      {"nccl", nccl},
      {"nodes", kNodes},
      {"hostfile", "w1 slots=8 type=A800\nw2 slots=4\n"},
      {"layers",
       R"({"layernum[2]_bsz4_seq8": 20, "layernum[6]_bsz4_seq8": 50, "layertype_0_bsz2_seq8": 1.5})"},
      {"overlap", R"({"overlap_coe": 1.1256})"},
      {"slurm",
       "SwitchName=r1 Nodes=a[1-2]\nSwitchName=r2 Nodes=a[3-4],v[1-2]\nSwitchName=t "
       "Switches=r[1-2]\n"},
      {"slurm",
       "- topology: t\n  tree:\n    switches:\n      - {switch: s, children: \"r[1-2]\"}\n      - "
       "{switch: r1, nodes: "
       "\"a[1-4]\"}\n      - {switch: r2, nodes: v1}\n"},
  };
  const char* count = std::getenv("MOTLEY_FUZZ_READERS");
  const int cases = count ? std::atoi(count) : 4000;
  int taken = 0, refused = 0;
  for (int i = 0; i < cases; ++i) {
    const auto& [kind, text] = seeds[static_cast<size_t>(i) % seeds.size()];
    const std::string changed = mutated_text(text, static_cast<uint64_t>(i));
    Sources s;
    if (kind == "topo") s.topo = Source{"f", changed};
    if (kind == "query") s.query = Source{"f", changed};
    if (kind == "nccl") s.nccl = {{"f", changed}};
    if (kind == "nodes") s.nodes = Source{"f", changed};
    if (kind == "hostfile") s.hostfile = Source{"f", changed};
    if (kind == "slurm") s.nodes = Source{"n", kNodes}, s.topology = Source{"f", changed};
    try {
      if (kind == "layers")
        parse_layer_times(changed, "f_bf16");
      else if (kind == "overlap")
        parse_overlap(changed, "f");
      else
        assemble(s);
      ++taken;
    } catch (const UserError& e) {
      ++refused;
      EXPECT_FALSE(std::string(e.what()).empty());
    } catch (const std::exception& e) {
      ADD_FAILURE() << kind << " case " << i << ": " << e.what() << "\n" << changed;
    }
  }
  EXPECT_GT(taken, cases / 20);
  EXPECT_GT(refused, cases / 20);
}

}  // namespace
}  // namespace motley::readers
