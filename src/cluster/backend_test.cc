#include "cluster/backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cluster/cluster.h"
#include "cluster/part.h"
#include "core/error.h"

namespace motley {
namespace {

using testing::HasSubstr;

Cluster with(const std::string& root, const std::string& inside = "") {
  return parse_cluster("link: {bandwidth: 1 GB/s}\n" + root +
                           "groups:\n  - {link: {bandwidth: 9 GB/s}, " + inside +
                           "devices: [{type: T4, count: 2}]}\n"
                           "  - {link: {bandwidth: 9 GB/s}, devices: [{type: T4, count: 2}]}\n",
                       "c");
}

TEST(Backend, TheFileSaysItAndTheTableKnowsIt) {
  const Cluster c = with("backend: gloo\n", "backend: nccl, ");
  EXPECT_EQ(backend_of(c).name, "gloo");
  EXPECT_FALSE(backend_of(c).half_sums);
  EXPECT_EQ(backend_among(c, {0, 1}).name, "nccl");
  EXPECT_TRUE(backend_among(c, {0, 1}).half_sums);
  EXPECT_EQ(backend_among(c, {1, 2}).name, "gloo");
  EXPECT_EQ(backend_among(c, {2, 3}).name, "gloo");
  // A part inside of a group talks over the group's; the file says so after a round trip too.
  EXPECT_EQ(backend_of(part_of(c, {0, 1})).name, "nccl");
  EXPECT_EQ(backend_of(part_of(c, {2, 3})).name, "gloo");
  const Cluster again = parse_cluster(to_yaml(c), "c");
  EXPECT_EQ(again.groups[1].backend, c.groups[1].backend);
  EXPECT_NE(look_of(c), look_of(with("backend: nccl\n", "backend: nccl, ")));
}

TEST(Backend, OfNoNameEverythingAndOfAnUnknownNothing) {
  const Backend none = backend_of(with(""));
  EXPECT_TRUE(none.messages && none.half_sums && none.hides && none.all_to_all);
  const Backend unknown = backend_of(with("backend: mine\n"));
  EXPECT_FALSE(unknown.messages || unknown.half_sums || unknown.hides || unknown.all_to_all);
  const Cluster said = with("backend: {name: mine, messages: true, hides: true}\n");
  EXPECT_TRUE(backend_of(said).messages && backend_of(said).hides);
  EXPECT_FALSE(backend_of(said).half_sums || backend_of(said).known);
  EXPECT_EQ(backend_of(parse_cluster(to_yaml(said), "c")), backend_of(said));
}

TEST(Backend, EmulatedDevicesTalkOverGloo) {
  const char* text =
      "link: {bandwidth: 1 GB/s}\ndevices: [{type: slow, count: 2}]\n"
      "device_types: [{name: slow, like: cpu-core, speed: 0.2}]\n";
  EXPECT_EQ(backend_of(parse_cluster(text, "c")).name, "gloo");
  EXPECT_EQ(backend_of(scaled_down(with("backend: nccl\n", "backend: nccl, "), 3)).name, "gloo");
}

TEST(Backend, WhatIsWrongIsNamed) {
  const auto failure = [](const std::string& root) -> std::string {
    try {
      with(root);
    } catch (const UserError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(failure("backend: [nccl]\n"), HasSubstr("c: backend has no name"));
  EXPECT_THAT(failure("backend: \"\"\n"), HasSubstr("no name of a backend"));
  EXPECT_THAT(failure("backend: {name: mine, fast: true}\n"),
              HasSubstr("backend.fast is not a known field"));
  EXPECT_THAT(failure("backend: {name: mine, hides: perhaps}\n"),
              HasSubstr("backend.hides is neither true nor false"));
}

}  // namespace
}  // namespace motley
