#include "grid/model.h"

namespace motley::grid {

Precision fp16_adam() {
  return {.name = "fp16",
          .activation = 2,
          .weight = 2,
          .gradient = 4,
          .reduced = 4,
          .reduce_buffer = 4,
          .optimizer = 12,
          .half = true};
}

Precision fp32_adam() {
  return {.name = "fp32",
          .activation = 4,
          .weight = 4,
          .gradient = 4,
          .reduced = 4,
          .reduce_buffer = 0,
          .optimizer = 8,
          .half = false};
}

double Model::parameters() const {
  double sum = 0;
  for (const Layer& l : layers) sum += l.parameters + l.parameters_whole + l.expert_parameters;
  return sum;
}

}  // namespace motley::grid
