// What a cluster was measured to do: `motley calibrate` writes it, every command takes it with
// --profile, and it is put in the place of the numbers of a cluster file here and nowhere else.
//
// The file is one JSON object (docs/calibrate.md). It holds the fitted numbers, which count, and
// the points they were fitted to with their R2, for people and plots.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cluster/cluster.h"
#include "core/file.h"

namespace motley {

// Points of one curve and how well the fit explains them.
struct FitQuality {
  double r2 = 0;
  double error = 0;                                // mean relative
  std::vector<std::pair<double, Seconds>> points;  // (size, measured)
};

struct ProfiledOp {
  OpRate rate;
  FitQuality fit;  // size: what the fit predicts
};

// A class of operators against size: overhead + work / rate.
struct ProfiledClass {
  std::string name;   // matmul, convolution, elementwise, launch
  std::string dtype;  // f32, f64, bf16
  Seconds overhead = 0;
  double rate = 0;  // flop/s; elementwise: bytes/s
  FitQuality fit;   // size: flops; elementwise: bytes
};

struct ProfiledDevice {
  std::string type;
  FlopsPerSecond flops = 0, half_flops = 0;
  BytesPerSecond memory_bandwidth = 0;
  Seconds overhead = 0;
  std::optional<double> interference;  // DeviceType::interference; not measured on one device
  std::vector<ProfiledClass> classes;
  std::vector<ProfiledOp> ops;
};

struct ProfiledGroup {
  std::vector<int> path;           // of child numbers from the root
  std::vector<std::string> types;  // of its devices, in order
  std::vector<CollectiveRate> collectives;
  std::vector<FitQuality> fits;  // [collective] size: bytes of the whole tensor
};

// A layer of a model's pipeline on one device, or neighbouring layers on several devices together,
// per micro-batch (motley calibrate --stages).
struct ProfiledStage {
  std::string shape;  // planner::shape_of() its graph
  std::string model;  // for people
  std::string type;   // of the devices, as types_of() has it
  int64_t micro_batch = 1;
  Seconds forward = 0, backward = 0;
  Bytes activation = 0;        // held between the two passes, on the fullest device
  int devices = 1, nodes = 1;  // that ran it together
};

struct Profile {
  std::string cluster;   // its name
  std::string emulated;  // how; empty: real devices
  std::vector<ProfiledDevice> devices;
  std::vector<ProfiledGroup> groups;
  std::vector<ProfiledStage> stages;  // each shape once for each type and number of devices
  double seconds = 0;                 // that measuring took
};

// The types of all devices, in the order of `cluster.types`: "fast", or "fast x2 + slow x1".
std::string types_of(const Cluster& cluster);

Json to_json(const ProfiledStage& stage);
Json to_json(const Profile& profile);
// Throws UserError naming `name`, the field, its value and the remedy.
Profile parse_profile(const std::string& text, const std::string& name);
void save_profile(const Profile& profile, const std::string& path);
Profile load_profile(const std::string& path);

// Puts the measured numbers into a cluster. Throws UserError if a device type of the cluster was
// not measured. Groups that were not measured with the same devices keep the numbers of the file.
void apply(const Profile& profile, const std::string& name, Cluster* cluster);

// load_cluster, scaled_down to at most `scale` workers unless it is 0, with the profile at `path`
// unless it is empty.
Cluster load_cluster(const std::string& path_or_name, int scale, const std::string& profile);

}  // namespace motley
