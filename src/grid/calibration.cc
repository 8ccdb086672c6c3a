#include "grid/calibration.h"

#include "core/error.h"

namespace motley::grid {

Calibration default_calibration(const Cluster& cluster, const Precision& precision) {
  Calibration calibration;
  for (const DeviceType& type : cluster.types) {
    Rates rates;
    rates.flops = precision.half && type.half_flops > 0 ? type.half_flops : type.flops;
    rates.memory = type.memory_bandwidth;
    rates.launch = type.overhead;
    calibration.types[type.name] = rates;
  }
  return calibration;
}

double Calibration::time_scale_of(int tp, int micro_batch) const {
  if (time_scale.empty()) return 1;
  auto known = time_scale.find({tp, micro_batch});
  if (known == time_scale.end()) known = time_scale.find({tp, 0});
  return known == time_scale.end() ? 1 : known->second;
}

void LayerTimes::add(const std::string& type, int tp, int micro_batch, int layer, Time time) {
  MOTLEY_CHECK(tp >= 1 && micro_batch >= 1 && layer >= 0);
  table_[{type, tp}][layer][micro_batch] = time;
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
