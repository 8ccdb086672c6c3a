#include "soundness.h"

#include <gtest/gtest.h>

#include "graph/canonical.h"
#include "spmd/build.h"
#include "spmd/sample.h"
#include "torch/capture.h"
#include "torch/eager.h"
#include "torch/executor.h"

namespace motley {
namespace {

TEST(Soundness, RandomProgramsEqualOneDevice) {
  SoundnessReport report = run_soundness(soundness_cases(), {2, 3, 4, 5}, 6, 1, false);
  EXPECT_EQ(report.rejected_by_checker, 0) << report.worst_case;
  EXPECT_LT(report.worst, 1e-9) << report.worst_case;
  EXPECT_EQ(report.programs, 6 * 4 * 6);
}

}  // namespace
}  // namespace motley
