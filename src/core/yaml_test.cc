#include "core/yaml.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace motley {
namespace {

using ::testing::HasSubstr;

Yaml parse(const std::string& text) { return Yaml::parse(text, "test", "t.yaml"); }

std::string refusal(const std::string& text) {
  try {
    parse(text);
  } catch (const UserError& e) {
    return e.what();
  }
  return "";
}

TEST(Yaml, Values) {
  const Yaml root = parse("a: 1\nb: [x, 'y z', [1, 2]]\nc: {d: ~, e: \"\"}\nf:\n");
  ASSERT_TRUE(root.is_map());
  EXPECT_EQ(root.size(), 4U);
  EXPECT_EQ(root["a"].scalar(), "1");
  EXPECT_TRUE(root["b"].is_list());
  EXPECT_EQ(root["b"][1].scalar(), "y z");
  EXPECT_EQ(root["b"][2][1].scalar(), "2");
  EXPECT_TRUE(root["c"]["d"]);  // there, and null
  EXPECT_FALSE(root["c"]["d"].is_scalar());
  EXPECT_TRUE(root["c"]["e"].is_scalar());
  EXPECT_TRUE(root["f"]);
  std::string names;
  for (const auto& [key, value] : root.entries()) names += key;
  EXPECT_EQ(names, "abcf");
}

TEST(Yaml, WhatIsMissing) {
  const Yaml root = parse("a: 1");
  EXPECT_FALSE(root["b"]);
  EXPECT_FALSE(root["b"]["c"][7]);
  EXPECT_FALSE(root["a"]["c"]);
  EXPECT_EQ(root["b"].scalar(), "");
  EXPECT_EQ(root["b"].size(), 0U);
  EXPECT_TRUE(root["b"].items().empty());
  EXPECT_FALSE(parse("").is_map());
}

TEST(Yaml, Booleans) {
  const Yaml list = parse("[true, No, ON, off, y, N, 1, maybe, [true]]");
  EXPECT_EQ(list[0].boolean(), true);
  EXPECT_EQ(list[1].boolean(), false);
  EXPECT_EQ(list[2].boolean(), true);
  EXPECT_EQ(list[3].boolean(), false);
  EXPECT_EQ(list[4].boolean(), true);
  EXPECT_EQ(list[5].boolean(), false);
  for (size_t i : {6, 7, 8}) EXPECT_EQ(list[i].boolean(), std::nullopt) << i;
}

TEST(Yaml, Aliases) {
  const Yaml root = parse("a: &x {k: v}\nb: [*x, *x]");
  EXPECT_EQ(root["b"][1]["k"].scalar(), "v");
  const Yaml keys = parse("a: &x k\nb: &y [*x, {*x : &z 1}, ~]\nc: {*x : *y, d: *z}");
  EXPECT_EQ(keys["c"]["k"][1]["k"].scalar(), "1");
  EXPECT_EQ(keys["c"]["k"].size(), 3U);
  EXPECT_EQ(keys["c"]["d"].scalar(), "1");
}

TEST(Yaml, Refusals) {
  EXPECT_THAT(refusal("a: [}"), HasSubstr("[test] t.yaml: line 1: not valid YAML"));
  EXPECT_THAT(refusal("a: 1\nb: 2\na: 3"), HasSubstr("line 3: 'a' is given twice"));
  EXPECT_THAT(refusal("? [1, 2]\n: x"), HasSubstr("a key is not a single value"));
  EXPECT_THAT(refusal(std::string(65, '[')), HasSubstr("nested deeper than 64 brackets"));
  EXPECT_THAT(refusal(std::string(600, ' ') + "a: 1"), HasSubstr("512 columns"));
  EXPECT_THAT(refusal(std::string((size_t{1} << 24) + 1, 'a')), HasSubstr("16 MiB"));
  EXPECT_THAT(refusal("&x [*x]"), HasSubstr("an alias of itself"));
  EXPECT_THAT(refusal("\na: &x\n  *x : b"), HasSubstr("line 2: a key is not a single value"));
  EXPECT_THAT(refusal("a: &x k\nb: {*x : 1, k: 2}"), HasSubstr("line 2: 'k' is given twice"));
  EXPECT_THAT(refusal("a: 1\na: 2\nb: [}"), HasSubstr("line 3: not valid YAML"));
  // 10^9 values in 300 characters.
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 9; ++i) {
    bomb += fmt::format("a{0}: &a{0} [", i);
    for (int k = 0; k < 10; ++k) bomb += fmt::format("{}*a{}", k ? ", " : "", i - 1);
    bomb += "]\n";
  }
  EXPECT_THAT(refusal(bomb), HasSubstr("more than a million values"));
}

TEST(Yaml, WrittenAndReadAgain) {
  YamlWriter out;
  out.begin_map();
  out.entry("plain", "text: with # marks");
  out.entry("number", 2.5e300);
  out.entry("truth", true);
  out.key("list");
  out.begin_list();
  out.begin_map(YamlWriter::flow);
  out.entry("empty", "");
  out.key("inner");
  out.begin_list();
  for (int i : {1, 2}) out.scalar(i);
  out.end();
  out.end();
  out.end();
  out.end();
  EXPECT_THAT(out.written(), HasSubstr("- {empty: \"\", inner: [1, 2]}"));
  const Yaml again = parse(out.written());
  EXPECT_EQ(again["plain"].scalar(), "text: with # marks");
  EXPECT_EQ(again["number"].scalar(), "2.5e+300");
  EXPECT_EQ(again["truth"].boolean(), true);
  EXPECT_EQ(again["list"][0]["inner"][1].scalar(), "2");
}

}  // namespace
}  // namespace motley
