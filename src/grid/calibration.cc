#include "grid/calibration.h"

#include <cmath>

#include "core/error.h"

namespace motley::grid {

namespace {

constexpr Bytes kContext = 1.0e9;

// What a framework's own code takes, whatever it runs on.
struct Framework {
  double launch = 0;  // of a kernel, in those that the catalogue has, from C++
  Seconds collective = 0, message = 0, step = 0;
  double optimizer_passes = 0, overlap_power = 0;
};
constexpr Framework kMotley = {1, 20e-6, 50e-6, 0, 3, 4};
// Megatron-LM and DeepSpeed: modules, hooks and views in Python around every kernel, the optimizer in
// one kernel.
constexpr Framework kPython = {13, 50e-6, 500e-6, 5e-3, 1.4, 3};

// NCCL's channels: its most with NVLink 4, two for each of 12 links, as many as links there are before,
// and two over PCIe.
int channels_of(const std::string& type) {
  if (type.starts_with("GH200") || type.starts_with("H100")) return 32;
  if (type.starts_with("A100")) return 24;
  if (type.starts_with("V100") || type.starts_with("P100")) return 12;
  return 2;
}

}  // namespace

Calibration default_calibration(const Cluster& cluster, const Precision& precision,
                                Runtime runtime) {
  const Framework& framework = runtime == Runtime::motley ? kMotley : kPython;
  Calibration calibration;
  calibration.message_launch = framework.message;
  calibration.optimizer_passes = framework.optimizer_passes;
  calibration.overlap_power = framework.overlap_power;
  for (const DeviceType& type : cluster.types) {
    Rates rates;
    rates.flops = precision.half && type.half_flops > 0 ? type.half_flops : type.flops;
    rates.memory = type.memory_bandwidth;
    rates.launch = framework.launch * type.overhead;
    rates.collective = framework.collective;
    rates.step = framework.step;
    rates.context = kContext;
    rates.channels = channels_of(type.name);
    calibration.types[type.name] = rates;
  }
  for (const Group& group : cluster.groups)
    if (const LinkType* type = find_link_type(group.link.type))
      calibration.links[type->name] = {type->message, type->start};
  return calibration;
}

void LayerTimes::add(const std::string& type, int tp, int micro_batch, int layer, Time time) {
  MOTLEY_CHECK(tp >= 1 && micro_batch >= 1 && layer >= 0);
  table_[{type, tp}][layer][micro_batch] = time;
}

void LayerTimes::add(const std::string& type, int layer, LayerProfile profile) {
  MOTLEY_CHECK(layer >= 0 && profile.micro_batch >= 1 && profile.forward > 0);
  profiles_[{type, layer}] = profile;
}

const LayerProfile* LayerTimes::profile(const std::string& type, int layer) const {
  const auto known = profiles_.find({type, layer});
  return known == profiles_.end() ? nullptr : &known->second;
}

Slower slower_than(Seconds host, Seconds device, Seconds seconds, double overlap_power) {
  constexpr double kHost = 0.7, kDevice = 0.2;
  const double k = overlap_power;
  const auto rest = [&](Seconds other) {  // what goes with `other`
    return std::pow(std::pow(seconds, k) - std::pow(other, k), 1 / k);
  };
  if (device >= seconds || host >= seconds)
    return {std::min(1.0, seconds / host), std::min(1.0, seconds / device)};
  const auto cost = [](double factor, double known) { return std::abs(std::log(factor)) / known; };
  const double by_host = rest(device) / host, by_device = rest(host) / device;
  return {cost(by_host, kHost) < cost(by_device, kDevice) ? by_host : 1, 1};
}

bool LayerTimes::find(const std::string& type, int tp, double micro_batch, int layer,
                      Time* time) const {
  auto group = table_.find({type, tp});
  if (group == table_.end()) return false;
  auto row = group->second.find(layer);
  if (row == group->second.end()) return false;
  const std::map<int, Time>& times = row->second;
  auto high = times.begin();
  while (high != times.end() && high->first < micro_batch) ++high;
  if (high == times.begin() || times.size() == 1) {
    const auto& [size, known] = *times.begin();
    *time = {known.forward * micro_batch / size, known.backward * micro_batch / size};
    return true;
  }
  if (high == times.end()) --high;
  auto low = std::prev(high);
  const double x = (micro_batch - low->first) / (high->first - low->first);
  time->forward = low->second.forward + x * (high->second.forward - low->second.forward);
  time->backward = low->second.backward + x * (high->second.backward - low->second.backward);
  return true;
}

}  // namespace motley::grid
