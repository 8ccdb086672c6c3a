// What the grid takes of types of links and of machines with direct links.
#include <gtest/gtest.h>

#include <cmath>

#include "grid/estimate.h"
#include "grid/search.h"
#include "reference/grid.h"

namespace motley::grid {
namespace {

Model small_gpt() {
  TransformerShape shape;
  shape.layers = 8;
  shape.hidden = 1024;
  shape.heads = 16;
  return transformer_model("gpt", shape, fp16_adam());
}

Estimator estimator_of(const Model& model, const Cluster& cluster) {
  return Estimator(model, cluster, default_calibration(cluster, model.precision));
}

SearchOptions options_of(int global_batch, const std::string& fixed) {
  SearchOptions options;
  options.global_batch = global_batch;
  options.fixed = parse_fixed(fixed);
  return options;
}

TEST(Estimate, ConstantsAreOfTheTypeOfDeviceAndLink) {
  // Two nodes of two on links of one type between nodes of another: what is within starts in 30 us,
  // what leaves a node in 40; a message gets 0.8 of NVSwitch and 0.9 of Ethernet.
  const Cluster cluster = parse_cluster(
      "link: {type: Ethernet-100}\ngroups: [{count: 2, link: {type: NVSwitch-A100}, devices: "
      "[{type: "
      "A100-80GB, count: 2}]}]",
      "typed");
  const Model model = small_gpt();
  Calibration calibration = default_calibration(cluster, model.precision);
  EXPECT_EQ(calibration.links.size(), 2u);
  const Estimator e(model, cluster, calibration);
  const auto mesh_of = [&](const Estimator& of, const char* fixed) {
    return of.mesh(complete(of, options_of(32, fixed)));
  };
  const Mesh inside = mesh_of(e, "tp=2,dp=2"), across = mesh_of(e, "tp=4");
  EXPECT_DOUBLE_EQ(inside.tensor[0].latency, 30e-6 + 2 * 3e-6);
  EXPECT_DOUBLE_EQ(inside.data[0].latency, 40e-6 + 2 * 21e-6);
  EXPECT_DOUBLE_EQ(across.tensor[0].latency, 40e-6 + 2 * 3 * 21e-6);
  EXPECT_DOUBLE_EQ(inside.tensor[0].seconds_per_byte, 1 / (0.77 * 300e9));
  EXPECT_DOUBLE_EQ(mesh_of(e, "pp=4").message_seconds_per_byte[0], 1 / (0.8 * 0.77 * 300e9));
  EXPECT_DOUBLE_EQ(mesh_of(e, "pp=4").message_seconds_per_byte[1], 1 / (0.9 * 0.72 * 12.5e9));
  // Of a measured link nothing is taken off.
  const Cluster measured = parse_cluster(
      "link: {bandwidth: 9 GB/s}\ndevices: [{type: A100-80GB, count: 2}]", "measured");
  const Estimator m(model, measured, default_calibration(measured, model.precision));
  EXPECT_DOUBLE_EQ(mesh_of(m, "tp=2").tensor[0].seconds_per_byte, 1 / 9e9);
  EXPECT_DOUBLE_EQ(mesh_of(m, "pp=2").message_seconds_per_byte[0], 1 / 9e9);
  // A framework in Python launches kernels and messages more slowly on the same host.
  const Calibration python = default_calibration(cluster, model.precision, Runtime::deepspeed);
  EXPECT_DOUBLE_EQ(calibration.types["A100-80GB"].launch, 4e-6);
  EXPECT_DOUBLE_EQ(python.types.at("A100-80GB").launch, 52e-6);
  EXPECT_EQ(python.types.at("A100-80GB").flops, calibration.types["A100-80GB"].flops);
  EXPECT_GT(python.message_launch, calibration.message_launch);
}

TEST(Estimate, AProfileTellsTheLaunchesOfALayer) {
  // Launches of 1 s and a device of 1 s that take 4 s together: 63^(1/3) s of launches.
  EXPECT_NEAR(slower_than(1, 1, 4, 3).host, std::cbrt(63), 1e-12);
  EXPECT_EQ(slower_than(1, 1, 4, 3).device, 1);
  // 5 s on the device and 1 s of launches, measured 5.5 s: the rate of the device is as likely.
  EXPECT_EQ(slower_than(1, 5, 5.5, 3).host, 1);
  // Neither takes longer than both.
  EXPECT_DOUBLE_EQ(slower_than(1, 6, 4, 3).device, 4. / 6);
  EXPECT_DOUBLE_EQ(slower_than(6, 1, 4, 3).host, 4. / 6);

  // A model whose blocks launch twice as many kernels as it is told, on a slow host.
  const Cluster cluster = load_cluster("amp-v100x16");
  Model model = small_gpt(), truth = model;
  for (Layer& layer : truth.layers) layer.kernels *= layer.block ? 2 : 1;
  Calibration calibration = default_calibration(cluster, model.precision);
  calibration.types["V100-16GB"].launch = 180e-6;
  const Estimator real(truth, cluster, calibration);
  const Strategy one = complete(real, options_of(32, "tp=1,dp=16,mbs=1"));
  const Mesh mesh = real.mesh(one);
  LayerTimes times;
  for (int l = 0; l < model.size(); ++l)
    if (model.layers[l].block)
      times.add(
          "V100-16GB", l,
          LayerProfile{1, real.layer_time(l, 0, one, mesh.tensor[0], mesh.context[0]).forward});
  const Estimator told(model, cluster, calibration), profiled(model, cluster, calibration, times);
  for (const char* fixed : {"tp=1,dp=16,mbs=2", "pp=4,dp=4,mbs=1", "tp=2,dp=8,mbs=1"}) {
    const Strategy s = complete(real, options_of(32, fixed));
    EXPECT_NEAR(profiled.estimate(s).step / real.estimate(s).step, 1, 0.05) << fixed;
    EXPECT_LT(told.estimate(s).pipeline / real.estimate(s).pipeline, 0.9) << fixed;
  }
}

TEST(Estimate, WhatTakesFourHeadsAtATimeIsNotFusedForFewer) {
  const Cluster cluster = load_cluster("amp-v100x16");
  Model fused = small_gpt(), never = fused;  // of 16 heads
  for (Layer& layer : fused.layers) layer.unfused = layer.block ? 4 : 0;
  const Estimator e = estimator_of(fused, cluster), plain = estimator_of(never, cluster);
  const auto more = [&](const char* fixed) {
    const Strategy s = complete(e, options_of(32, fixed));
    const Mesh mesh = e.mesh(s);
    const auto forward = [&](const Estimator& of) {
      return of.layer_time(1, 0, s, mesh.tensor[0], mesh.context[0]).forward;
    };
    return forward(e) > forward(plain);
  };
  EXPECT_TRUE(more("tp=8,dp=2,mbs=1"));
  EXPECT_FALSE(more("tp=8,dp=2,mbs=2"));
  EXPECT_FALSE(more("tp=4,dp=4,mbs=1"));
}

TEST(Estimate, RingsOfAMachineWithDirectLinksAreItsChannels) {
  const Cluster cluster = load_cluster("dgx-1-v100");
  const Estimator e = estimator_of(small_gpt(), cluster);
  const auto per_second = [&](const char* fixed) {
    const Strategy s = complete(e, options_of(32, fixed));
    const Mesh mesh = e.mesh(s);
    EXPECT_GE(mesh.tensor[0].seconds_per_byte, e.best_ring(s.tp).seconds_per_byte);
    return 2. * (s.tp - 1) / s.tp / mesh.tensor[0].seconds_per_byte / 1e9;
  };
  EXPECT_NEAR(per_second("tp=8"), 135, 0.1);
  EXPECT_NEAR(per_second("tp=4"), 90, 0.1);
  EXPECT_NEAR(per_second("tp=2"), 22.5, 0.1);
}

}  // namespace
}  // namespace motley::grid
