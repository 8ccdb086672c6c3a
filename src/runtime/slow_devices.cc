#include "runtime/slow_devices.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "core/median.h"
#include "sim/simulate.h"

namespace motley {

namespace {

constexpr int kWarm = 3;           // steps in which memory is touched for the first time
constexpr size_t kLong = 13;       // steps after which it is no noise; with kTold, named within 20
constexpr size_t kOutliers = 2;    // of them that may be as they should
constexpr double kSlow = 4.0 / 3;  // times as long
constexpr double kWell = 1.15;     // and as long again as it should
constexpr double kSmall = 0.05;    // of the longest computation: next to nothing
constexpr Seconds kLeast = 5e-3;   // of computing in a step; below it, other processes decide
// The plan is trusted about a device where it is off by no more for the others, and alike for them
// all: what is off for one type of two is the plan's own mistake. Even so it takes more to be slow.
constexpr double kPlanHolds = 1.67, kPlanAgrees = 1.4, kSlowByPlan = 1.5;

double middle(const std::deque<double>& values) {
  return median(std::vector<double>(values.begin(), values.end()));
}

void push(std::deque<double>* values, double value) {
  values->push_back(value);
  if (values->size() > kLong) values->pop_front();
}

}  // namespace

SlowDevices::SlowDevices(std::vector<Seconds> planned)
    : planned_(std::move(planned)), devices_(planned_.size()) {
  const Seconds most = planned_.empty() ? 0 : *std::max_element(planned_.begin(), planned_.end());
  for (Seconds& seconds : planned_)
    if (seconds < kSmall * most) seconds = 0;
}

bool SlowDevices::trusted(size_t device) const {
  std::vector<double> others;
  for (size_t d = 0; d < devices_.size(); ++d)
    if (d != device && !devices_[d].alone.empty()) others.push_back(middle(devices_[d].alone));
  if (others.empty()) return false;
  const auto [least, most] = std::minmax_element(others.begin(), others.end());
  return *most<kPlanHolds&& * least> 1 / kPlanHolds && *most < kPlanAgrees * *least;
}

std::vector<SlowDevice> SlowDevices::step(const std::vector<Seconds>& measured) {
  if (steps_++ < kWarm) return {};
  std::vector<double> shares;
  for (size_t d = 0; d < planned_.size(); ++d)
    if (planned_[d] > 0) shares.push_back(measured[d] / planned_[d]);
  if (shares.size() < 2) return {};
  const auto lower = shares.begin() + static_cast<std::ptrdiff_t>((shares.size() - 1) / 2);
  std::nth_element(shares.begin(), lower, shares.end());
  if (!(*lower > 0)) return {};
  std::vector<SlowDevice> found;
  for (size_t d = 0; d < planned_.size(); ++d) {
    if (planned_[d] <= 0) continue;
    Device& device = devices_[d];
    push(&device.alone, measured[d] / planned_[d]);
    push(&device.shares, device.alone.back() / *lower);
  }
  for (size_t d = 0; d < planned_.size(); ++d) {
    Device& device = devices_[d];
    if (device.shares.size() < kLong) continue;
    const double now = middle(device.shares);
    if (device.usual == 0) device.usual = now;
    const bool by_plan = now > kSlowByPlan && trusted(d);
    const double should = by_plan ? 1 : device.usual;
    const auto above =
        static_cast<size_t>(std::count_if(device.shares.begin(), device.shares.end(),
                                          [&](double share) { return share > kWell * should; }));
    if (device.named) {
      device.named = now > kWell * should;
    } else if (now > kSlow * should && above + kOutliers >= kLong &&
               middle(device.alone) * planned_[d] > kLeast) {
      device.named = true;
      found.push_back({static_cast<int>(d), now / should, !by_plan});
    }
  }
  return found;
}

SlowDeviceWatch::SlowDeviceWatch(const Plan& plan, int rank)
    : devices_([&] {
        std::vector<Seconds> planned;
        for (const DeviceTime& device : simulate(plan).devices) planned.push_back(device.busy);
        return planned;
      }()),
      rank_(static_cast<size_t>(rank)),
      size_(static_cast<size_t>(plan.cluster.size())) {}

std::optional<at::Tensor> SlowDeviceWatch::note(Seconds computed) {
  own_.push_back(computed);
  if (own_.size() < kTold) return std::nullopt;
  const auto columns = static_cast<int64_t>(size_);
  at::Tensor row = at::zeros({kTold, columns}, at::TensorOptions(at::kDouble));
  for (int64_t s = 0; s < kTold; ++s)
    row[s][static_cast<int64_t>(rank_)] = own_[static_cast<size_t>(s)];
  own_.clear();
  return row;
}

std::vector<SlowDevice> SlowDeviceWatch::told(const at::Tensor& all) {
  std::vector<SlowDevice> found;
  const auto* numbers = all.data_ptr<double>();
  for (size_t s = 0; s < kTold; ++s)
    for (const SlowDevice& device :
         devices_.step(std::vector<Seconds>(numbers + s * size_, numbers + (s + 1) * size_)))
      found.push_back(device);
  return found;
}

}  // namespace motley
