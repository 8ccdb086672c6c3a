// Small models of many kinds, of which tests draw random pipeline plans.
#pragma once

#include <vector>

#include "random_pipeline.h"

namespace motley {

inline const std::vector<RandomPipeline>& pipeline_cases() {
  static const std::vector<RandomPipeline> list = {
      {"gpt:layers=3,hidden=16,heads=4,seq=6,vocab=11", 2},
      {"gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11,dropout=0.2", 3},
      {"bert:layers=2,hidden=16,heads=4,seq=6,vocab=11", 2},
      {"mlp:layers=4,hidden=12,in=10,classes=7", 5},
      {"vgg19:width=2,image=32,classes=5", 2},
      {"vit:layers=2,hidden=16,heads=4,image=8,patch=4,classes=5", 3},
      {"llama:layers=2,hidden=16,heads=4,kv_heads=2,ffn=24,seq=6,vocab=11", 2},
      {"convnet:width=4,image=8,classes=5", 4},
      {"transgan:layers=1,hidden=128,heads=2,side=2,latent=8", 2},
  };
  return list;
}

}  // namespace motley
