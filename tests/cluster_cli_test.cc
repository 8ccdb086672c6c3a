// `motley cluster` on what Galvatron measured.
#include "cli.h"

namespace motley {
namespace {

using ::testing::HasSubstr;

// A layer that took twice as long is of a device half as fast, and what overlaps slows it.
TEST_F(Cli, LayersOfGalvatronGiveTheSpeed) {
  write_file(path("gpus"), "name, memory.total [MiB]\nNVIDIA A100-SXM4-80GB, 81920 MiB\n");
  write_file(path("overlap"), R"({"overlap_coe": 1.25})");
  double speeds[2];
  for (const int slower : {1, 2}) {
    const std::string file = path(fmt::format("computation_profiling_bf16_x{}.json", slower));
    write_file(file,
               fmt::format(R"({{"layertype_0_bsz1_seq64": {}, "layertype_0_bsz4_seq64": {}}})",
                           slower * 2.0, slower * 1.5));
    const Outcome o =
        motley(fmt::format("cluster --from-query {} --from-layers {} --model "
                           "llama:layers=2,hidden=256,heads=4,kv_heads=4,seq=64,vocab=512 "
                           "--from-overlap {} -o {} --json",
                           path("gpus"), file, path("overlap"), path("found.yaml")));
    ASSERT_EQ(o.code, 0) << o.err;
    const std::string yaml = o.json()["cluster"];
    EXPECT_EQ(yaml, read_file(path("found.yaml")));
    EXPECT_THAT(yaml, HasSubstr("interference: 0.25}"));
    const size_t at = yaml.find("half_flops: ");
    ASSERT_NE(at, std::string::npos) << yaml;
    speeds[slower - 1] = std::stod(yaml.substr(at + 12));
    expect_mistake(fmt::format("cluster --from-query {} --from-layers {} --model gpt:seq=32",
                               path("gpus"), file),
                   "is of samples of 64 tokens, --model gpt:seq=32 has 32");
  }
  EXPECT_NEAR(speeds[0], 2 * speeds[1], 1e-4 * speeds[0]);
}

}  // namespace
}  // namespace motley
