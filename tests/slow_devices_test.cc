// Devices that are slower than planned are named, and no others.
#include "runtime/slow_devices.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace motley {
namespace {

// A run of some devices whose steps vary in length together, and each by itself.
struct Training {
  explicit Training(unsigned seed) : rng(seed) {
    const int count = std::uniform_int_distribution<int>(2, 9)(rng);
    for (int d = 0; d < count; ++d) {
      planned.push_back(std::uniform_real_distribution<double>(0.5, 1.5)(rng));
      truly.push_back(planned.back() * std::uniform_real_distribution<double>(0.9, 1.12)(rng));
    }
    common = std::uniform_real_distribution<double>(0.7, 1.4)(rng);
  }
  // `slow`: which device takes `factor` times as long; -1: none.
  std::vector<Seconds> step(int slow, double factor) {
    std::lognormal_distribution<double> noise(0, 0.08), batch(0, 0.3);
    const double length = common * batch(rng);
    std::vector<Seconds> seconds;
    for (size_t d = 0; d < truly.size(); ++d) {
      double took = truly[d] * length * noise(rng);
      if (std::uniform_int_distribution<int>(0, 49)(rng) == 0) took *= 3;  // another process
      seconds.push_back(took * (static_cast<int>(d) == slow ? factor : 1));
    }
    return seconds;
  }

  std::mt19937 rng;
  std::vector<Seconds> planned, truly;
  double common = 1;  // how far off all predictions are
};

TEST(SlowDevices, NamesTheThrottledOne) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    Training run(seed);
    SlowDevices watch(run.planned);
    const int slow = static_cast<int>(seed % run.planned.size());
    const double factor = std::uniform_real_distribution<double>(1.7, 4)(run.rng);
    const int from = std::uniform_int_distribution<int>(0, 60)(run.rng);
    int named = -1;
    for (int s = 0; s < from + 20; ++s)
      for (const SlowDevice& device : watch.step(run.step(s < from ? -1 : slow, factor))) {
        EXPECT_EQ(device.device, slow) << "seed " << seed << ", step " << s;
        EXPECT_GE(s, from) << "seed " << seed;
        EXPECT_GT(device.factor, 4.0 / 3) << "seed " << seed;
        EXPECT_LT(device.factor, 1.4 * factor) << "seed " << seed;
        if (named < 0) named = s;
      }
    EXPECT_GE(named, from) << "seed " << seed;
  }
}

TEST(SlowDevices, NamesNobodyForNoise) {
  for (unsigned seed = 1000; seed < 1200; ++seed) {
    Training run(seed);
    SlowDevices watch(run.planned);
    for (int s = 0; s < 300; ++s)
      for (const SlowDevice& device : watch.step(run.step(-1, 1)))
        ADD_FAILURE() << "seed " << seed << ", step " << s << ": device " << device.device << " by "
                      << device.factor;
  }
}

TEST(SlowDevices, ATypeThatThePlanHasWrongIsNobodysFault) {
  SlowDevices watch({1, 1, 1, 1});
  for (int s = 0; s < 40; ++s) EXPECT_TRUE(watch.step({0.67, 0.67, 1.33, 1.33}).empty());
  int named = 0;
  for (int s = 0; s < 20; ++s)
    named += static_cast<int>(watch.step({0.67, 0.67, 2.66, 1.33}).size());
  EXPECT_EQ(named, 1);  // it became slower
}

TEST(SlowDevices, NamesItOnceAndAgainAfterItWasWell) {
  SlowDevices watch({1, 1, 1});
  int named = 0;
  const auto steps = [&](int count, double factor) {
    for (int s = 0; s < count; ++s) named += static_cast<int>(watch.step({1, factor, 1}).size());
  };
  steps(20, 1), steps(50, 2);
  EXPECT_EQ(named, 1);
  steps(30, 1), steps(50, 2);
  EXPECT_EQ(named, 2);
}

TEST(SlowDevices, APlanThatHoldsForNobodySaysNothingAtFirst) {
  SlowDevices watch({1, 1, 1});
  for (int s = 0; s < 40; ++s) EXPECT_TRUE(watch.step({0.01, 0.02, 0.03}).empty());
  int named = 0;
  for (int s = 0; s < 40; ++s) named += static_cast<int>(watch.step({0.01, 0.04, 0.03}).size());
  EXPECT_EQ(named, 1);  // it became slower
}

}  // namespace
}  // namespace motley
