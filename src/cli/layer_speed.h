// The speed of a device from how long it took over layers of a model.
#pragma once

#include <string>

#include "cluster/cluster.h"
#include "readers/layer_times.h"

namespace motley {

struct LayerSpeed {
  DeviceType type;    // so that the cost model says what was measured, on average
  double slower = 1;  // than before
  double error = 0;   // mean relative, of the times that were used
  size_t points = 0;  // that were used
  int64_t tokens = 0;
};

// `model`: as MODEL of commands; `name`: of the file that `times` are of. Throws UserError where it is of other
// sequences than the model's, or the model has no layers.
LayerSpeed speed_from(const readers::LayerTimes& times, const std::string& name,
                      const std::string& model, const DeviceType& type);

}  // namespace motley
