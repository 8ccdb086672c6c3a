#include "cluster/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "core/error.h"

namespace motley {
namespace {

using ::testing::HasSubstr;

std::string failure(const std::string& yaml) {
  try {
    parse_cluster(yaml, "c.yaml");
  } catch (const UserError& e) {
    return e.what();
  }
  return "no error";
}

const char* kGood = R"(
name: two
link: {bandwidth: 10 Gbps, latency: 30 us}
groups:
  - {name: a, count: 2, link: {kind: ring, bandwidth: 100 GB/s}, devices: [{type: V100-16GB, count: 4}]}
  - {name: b, uplink: 25 Gbps, link: {kind: bus, bandwidth: 12 GB/s}, devices: [{type: mine}, {type: P100-16GB, count: 2}]}
device_types:
  - {name: mine, flops: 5 TFLOPS, memory: 8 GiB, memory_bandwidth: 100 GB/s}
)";

TEST(Cluster, ReadsTheTree) {
  Cluster c = parse_cluster(kGood, "c.yaml");
  ASSERT_EQ(c.size(), 11);
  EXPECT_EQ(c.groups.size(), 4u);
  EXPECT_EQ(c.groups[0].children.size(), 3u);
  EXPECT_EQ(c.groups[3].first_device, 8);
  EXPECT_EQ(c.groups[3].device_count, 3);
  EXPECT_DOUBLE_EQ(c.groups[3].uplink, 25e9 / 8);
  EXPECT_EQ(c.groups[1].link.kind, LinkKind::ring);
  EXPECT_EQ(c.type_of(8).name, "mine");
  EXPECT_EQ(c.count_by_type(), (std::vector<int>{8, 1, 2}));
}

TEST(Cluster, YamlRoundTrips) {
  Cluster a = parse_cluster(kGood, "c.yaml"), b = parse_cluster(to_yaml(a), "again");
  EXPECT_EQ(to_yaml(a), to_yaml(b));
  EXPECT_EQ(a.types, b.types);
}

TEST(Cluster, ReservedMemoryIsNotUsed) {
  const Cluster cluster = parse_cluster(
      "name: c\nlink: {bandwidth: 1e9, latency: 1e-6}\ndevices: [{type: mine, count: "
      "2}]\ndevice_types:\n"
      "  - {name: mine, like: V100-16GB, memory: 16 GiB, reserved: 3 GiB}\n",
      "c.yaml");
  EXPECT_EQ(cluster.types[0].memory, 13 * 1024. * 1024 * 1024);
  EXPECT_EQ(parse_cluster(to_yaml(cluster), "again").types, cluster.types);
  EXPECT_THROW(
      parse_cluster(
          "name: c\nlink: {bandwidth: 1e9, latency: 1e-6}\ndevices: [{type: mine}]\ndevice_types:\n"
          "  - {name: mine, like: T4, memory: 1 GiB, reserved: 1 GiB}\n",
          "c.yaml"),
      UserError);
}

TEST(Cluster, EveryShippedFileLoads) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(MOTLEY_SOURCE_DIR "/clusters")) {
    Cluster c = load_cluster(entry.path());
    EXPECT_EQ(c.name, entry.path().stem());
    ++files;
  }
  EXPECT_GE(files, 12);
}

TEST(Cluster, SaysWhatToMend) {
  EXPECT_THAT(failure("link: ["), HasSubstr("c.yaml: line"));
  EXPECT_THAT(failure("hello"), HasSubstr("is not a map"));
  EXPECT_THAT(failure("link: {bandwidth: 1 GB/s}"), HasSubstr("either 'groups' or 'devices'"));
  EXPECT_THAT(failure("devices: [{type: T4}]"), HasSubstr("c.yaml: link is missing"));
  EXPECT_THAT(failure("link: {bandwidth: 0}\ndevices: [{type: T4}]"),
              HasSubstr("link.bandwidth is 0; give a number greater"));
  EXPECT_THAT(failure("link: {bandwidth: fast}\ndevices: [{type: T4}]"),
              HasSubstr("link.bandwidth is 'fast': not a number"));
  EXPECT_THAT(failure("link: {bandwidth: 1 GB/s}\ndevices: [{type: T5}]"),
              HasSubstr("devices[0].type is 'T5', which is not a known"));
  EXPECT_THAT(failure("link: {bandwidth: 1 GB/s}\ndevices: [{type: T4, count: 1.5}]"),
              HasSubstr("whole number"));
  EXPECT_THAT(failure("link: {bandwidth: 1 GB/s}\ndevices: [{type: T4, count: 10000000}]"),
              HasSubstr("devices[0].count"));
  EXPECT_THAT(failure("link: {bandwidth: 1 GB/s}\nspeed: 3\ndevices: [{type: T4}]"),
              HasSubstr("speed is not a known field"));
  EXPECT_THAT(failure("link: {bandwidth: 1 GB/s}\ndevices: []"), HasSubstr("has no devices"));
  EXPECT_THAT(failure(std::string(100000, '[')), HasSubstr("nested deeper"));
  EXPECT_THAT(
      failure("link: {bandwidth: 1 GB/s}\ngroups: [{link: {bandwidth: 1 GB/s}, count: 100000, "
              "devices: [{type: T4, count: 100000}]}]"),
      HasSubstr("too many devices"));
  // Numbers that no hardware has, however valid.
  for (const char* bandwidth : {"0.1 B/s", "1e-320 Gbps", "1e308 Gbps", "1e30", "5e-324"})
    EXPECT_THAT(failure(fmt::format("link: {{bandwidth: {}}}\ndevices: [{{type: T4}}]", bandwidth)),
                HasSubstr("link.bandwidth is"))
        << bandwidth;
  EXPECT_THAT(failure("link: {bandwidth: 1 GB/s, latency: 1e4 s}\ndevices: [{type: T4}]"),
              HasSubstr("give at most 1000 s"));
  for (const char* field : {"flops: 1e308 GFLOPS", "flops: 1e300", "memory: 1e200 GiB",
                            "memory_bandwidth: 1e-9 GB/s", "overhead: 1e9 s"})
    EXPECT_THAT(failure(fmt::format("link: {{bandwidth: 1 GB/s}}\ndevices: [{{type: x}}]\n"
                                    "device_types: [{{name: x, like: T4, {}}}]",
                                    field)),
                HasSubstr("device_types[0]"))
        << field;
  // Names are copied to all that count repeats, and are printed.
  for (const char* where : {"name: {}\nlink: {{bandwidth: 1 GB/s}}\ndevices: [{{type: T4}}]",
                            "link: {{bandwidth: 1 GB/s}}\ngroups: [{{name: {}, count: 4, link: "
                            "{{bandwidth: 1 GB/s}}, devices: [{{type: T4}}]}}]",
                            "link: {{bandwidth: 1 GB/s}}\ndevices: [{{type: T4}}]\ndevice_types: "
                            "[{{name: {}, like: T4}}]"}) {
    EXPECT_THAT(failure(fmt::format(fmt::runtime(where), std::string(40000, 'x'))),
                HasSubstr("has 40000 characters"));
    EXPECT_THAT(failure(fmt::format(fmt::runtime(where), "\"a\\e[31mb\"")),
                HasSubstr("control characters"));
    EXPECT_THAT(failure(fmt::format(fmt::runtime(where), "\"\"")), HasSubstr("is empty"));
  }
  try {
    load_cluster("nowhere");
    FAIL();
  } catch (const UserError& e) {
    EXPECT_THAT(e.what(), HasSubstr("neither a file nor a shipped cluster"));
  }
}

}  // namespace
}  // namespace motley
