// The parts of a calibration (calibrate.h).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "measure/calibrate.h"

namespace motley {

// Everything whole, on one device.
Program alone(const Theory& theory);

// This worker's device. Collective: all measure at the same time.
ProfiledDevice measure_device(Communicator& group, const Cluster& cluster,
                              const CalibrateOptions& options,
                              const std::function<void(const std::string&)>& say);

// By what part steps of training take longer on this device while small gradients are all-reduced
// beside them, as the executor does it; the first of options.steps, else one of gpt. Nothing where
// there is nobody to talk to. Collective.
std::optional<double> measure_interference(Communicator& group, const CalibrateOptions& options);

// Layers, of every device by itself.
std::vector<ProfiledStage> measure_layers(const CalibrateOptions& options, const std::string& type);
// Of several devices together, which this rank is one of: as they see it, waiting included.
// Collective.
std::vector<ProfiledStage> measure_meshes(Communicator& group, const Cluster& cluster,
                                          const CalibrateOptions& options);

// Every form of collective over a group, whose cluster is `part`. Collective.
ProfiledGroup measure_links(Communicator& group, const Cluster& part,
                            const CalibrateOptions& options);

}  // namespace motley
