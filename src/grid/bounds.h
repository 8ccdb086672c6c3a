// Lower bounds of a strategy's step before it is complete, by which grid/search.h leaves out.
#pragma once

#include <map>
#include <tuple>
#include <vector>

#include "grid/search.h"

namespace motley::grid {

// What can be said before anything is placed: perfect balance, what tensor and context parallelism
// send at the speed of the fastest link, gradients and optimizer as if the stages shared them out.
// The work of a layer is its time on the fastest type; a type's speed is the most work per second
// it does in any layer.
//
// A group of several types is at each layer no faster than any of its members. Let stage s of
// replica r have at most speed v_sr, work w_s and gradients that take g_s, M_r micro-batches
// going to replica r. The step T is at least M_r w_s / v_sr + g_s for all of them, so that
//
//     T sum v_sr >= sum M_r w_s + sum g_s v_sr,   T >= total work / joint speed + share * sum g_s
//
// where `share` is the least part that one stage has of all speeds: slowest / (fastest * pp). With
// M_r micro-batches of p_r seconds each, replica r also takes (M_r - 1) p_r and one micro-batch
// from end to end (one of the two where stages are interleaved); the M_r add up to the total and
// the 1 / p_r to at most the joint speed.
class FirstBound {
 public:
  FirstBound(const Estimator& estimator, const SearchOptions& options);

  Seconds operator()(const Strategy& s);
  // What follows the reduction of gradients: some stage has the mean of all parameters at least. Of
  // a strategy that was bounded, at whatever stage of ZeRO.
  Seconds tail(const Strategy& s) const { return tail(s, known_.at(key_of(s))); }

  // Whether all stages together need more than they can have, wherever devices and layers go. Where
  // replicas share the state by their memory a stage has the mean of theirs, else the least: with n
  // devices a stage, the i-th best one cannot have more than the i n-th largest device.
  bool too_large(const Strategy& s) const;

 private:
  struct Layers {
    Seconds work = 0;           // of one micro-batch in all layers, each on its fastest type
    std::vector<double> speed;  // [type]
    std::vector<int> fastest;   // types, the fastest first
    double least_share = 1;     // slowest / fastest
    double parameters = 0;      // of a rank that had all layers
  };

  Seconds tail(const Strategy& s, const Layers& layers) const;
  using Key = std::tuple<int, int, int, int, Recompute, Runtime>;
  // Pipeline depth, replicas and ZeRO change nothing of it.
  static Key key_of(const Strategy& s) {
    return {s.tp, s.cp, s.ep, s.micro_batch, s.recompute, s.runtime};
  }
  const Layers& layers_of(const Strategy& s);

  const Estimator& estimator_;
  const SearchOptions& options_;
  const std::vector<int> counts_;           // [type] devices
  std::vector<Bytes> largest_sum_ = {0.0};  // [n] memory of the n largest devices
  std::map<Key, Layers> known_;
};

// The same once devices are placed and micro-batches given: replica by replica, with the rings it
// has.
Seconds placed_bound(const Estimator& estimator, const Strategy& s, const Mesh& mesh);

}  // namespace motley::grid
