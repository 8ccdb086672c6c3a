#include "zoo/zoo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"

namespace motley {
namespace {

std::string error_of(const std::string& text) {
  try {
    parse_model(text);
  } catch (const UserError& e) {
    return e.what();
  }
  return "no error";
}

TEST(Zoo, IsSortedByName) {
  EXPECT_TRUE(std::is_sorted(zoo().begin(), zoo().end(),
                             [](const auto& a, const auto& b) { return a.name < b.name; }));
}

TEST(Zoo, TextKeepsWhatIsNotDefault) {
  EXPECT_EQ(parse_model("gpt").text(), "gpt");
  EXPECT_EQ(parse_model("gpt:heads=64,layers=48,hidden=8192,dropout=0.1,seq=1024").text(),
            "gpt:layers=48,hidden=8192,heads=64,dropout=0.1");
  EXPECT_EQ(parse_model("vit:patch=8")["patch"], 8);
}

TEST(ZooErrors, NameTheMistake) {
  EXPECT_EQ(error_of("gtp"),
            "[zoo] there is no model 'gtp'; the zoo has bert, bert-moe, convnet, gpt, llama, mlp, "
            "moe, resnet50, transgan, vgg19, vit, vit-moe");
  EXPECT_EQ(error_of("mlp:depth=3"),
            "[zoo] mlp has no parameter 'depth'; it has layers, hidden, in, classes, dropout");
  EXPECT_EQ(error_of("mlp:layers"), "[zoo] mlp: 'layers' is not of the form parameter=value");
  EXPECT_EQ(error_of("mlp:"), "[zoo] mlp: '' is not of the form parameter=value");
  EXPECT_EQ(error_of("mlp:layers=0"), "[zoo] mlp: layers is '0'; give an integer from 1 to 4096");
  EXPECT_EQ(error_of("mlp:layers=2x"), "[zoo] mlp: layers is '2x'; give an integer from 1 to 4096");
  EXPECT_EQ(error_of("mlp:layers=2,layers=3"), "[zoo] mlp: layers is given twice");
  EXPECT_EQ(error_of("mlp:dropout=1"),
            "[zoo] mlp: dropout is '1'; give a probability from 0 to below 1");
  EXPECT_EQ(error_of("gpt:heads=7"),
            "[zoo] gpt: hidden is 768, which is not a multiple of heads = 7");
  EXPECT_EQ(error_of("llama:kv_heads=5"),
            "[zoo] llama: heads is 32, which is not a multiple of kv_heads = 5");
  EXPECT_EQ(error_of("vit:patch=9"),
            "[zoo] vit: image is 224, which is not a multiple of patch = 9");
}

}  // namespace
}  // namespace motley
