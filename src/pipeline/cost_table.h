// What the search of pipelines keeps of stages: times, limits of micro-batches in flight and
// reductions, filled as they are asked for.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/error.h"
#include "pipeline/search.h"

namespace motley::pipeline {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kUnlimited = 1 << 30;
constexpr double kSlack = 1e-12;
constexpr int kSizeBits = 20;  // of sub-clusters' sizes

// Micro-batches that fit beside the state of a stage, up to rounding; all of them: no limit.
int in_flight_limit(const StageProfile& profile, Bytes memory, int micro_batches, bool limited);

// Seconds of a clock that only goes forward.
double steady_seconds();

// Zero-filled memory; if it is large, its pages cost nothing until they are touched. (What calloc()
// takes from the heap, it clears.)
template <typename T>
class Sparse {
 public:
  T* allocate(size_t n) {
    const size_t bytes = n * sizeof(T), mapped = bytes < kHeap ? 0 : bytes;
    void* memory = mapped == 0 ? std::calloc(n, sizeof(T))
                               : mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MOTLEY_CHECK(memory != nullptr && memory != MAP_FAILED, "out of memory");
    data_ = {static_cast<T*>(memory), Free{mapped}};
    return data_.get();
  }
  T* get() const { return data_.get(); }

 private:
  static constexpr size_t kHeap = size_t{1} << 16;  // bytes
  struct Free {
    size_t mapped = 0;
    void operator()(T* p) const { mapped > 0 ? void(munmap(p, mapped)) : std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
};

// Stage costs of one micro-batch size and number of pipelines, by mesh and (last layer, length).
// Where the layers before one end are those before a later one, as in a model of equal blocks, both
// ends share a row, so that the rows in use stay in the caches.
class CostTable {
 public:
  CostTable(const SearchProblem& problem, const SearchOptions& options, int64_t micro_batch,
            int micro_batches, int pipelines);

  // Number of a mesh in this table.
  int mesh(const Mesh& mesh);
  const Mesh& mesh(int m) const { return meshes_[m]; }
  // Whether some layer fits the mesh.
  bool useful(int m) {
    if (useful_[m] < 0) {
      useful_[m] = 0;
      for (int l = 0; l < layers_ && useful_[m] == 0; ++l)
        useful_[m] = time(m, l, l + 1) < kInfinity;
    }
    return useful_[m] == 1;
  }

  // t of layers first..end-1; infinite if not one micro-batch fits.
  Seconds time(int m, int first, int end) {
    size_t at = index(first, end);
    Seconds* table = time_[m].get();
    if (table == nullptr || table[at] == 0) {
      fill(m, first, end, at);
      table = time_[m].get();
    }
    return table[at];
  }
  // Times by length of stages that end at `end`: entry [length - 1] up to `lengths`, 0 where not
  // yet known.
  struct Row {
    const Seconds* times;
    int lengths;
  };
  Row row(int m, int end) {
    if (time_[m].get() == nullptr) allocate(m);
    return {time_[m].get() + static_cast<size_t>(row_of_[end - 1]) * layers_, shared_[end - 1]};
  }
  // Leftmost first layer of a stage that ends at `end` and takes at most p; `end` if none. Gallops
  // from a stage of `length` layers.
  int leftmost(int m, int end, Seconds p, int length);
  // Greatest end of a stage that starts at `first`; `first` if none.
  int rightmost(int m, int first, Seconds p);
  int limit(int m, int first, int end) { return limit_[m].get()[index(first, end)]; }
  Seconds reduce(int m, int first, int end) {
    return pipelines_ == 1 ? 0 : reduce_[m].get()[index(first, end)];
  }
  const StageProfile& profile(int m, int first, int end);
  LinkTime link(int layer, int from, int to) const {
    return problem_.link_cost(layer, from, to, micro_batch_, pipelines_);
  }

  int64_t planned = 0;
  double seconds = 0;

 private:
  // Place of a stage in the tables.
  size_t index(int first, int end) const {
    const int length = end - first;
    const int row = length <= shared_[end - 1] ? row_of_[end - 1] : end - 1;
    return static_cast<size_t>(row) * layers_ + (length - 1);
  }
  // From the last end on: an end that has most of its layers in common with one that has a row of
  // its own uses that row. common[a * layers + b], b <= a: as in the constructor.
  void share_rows(const std::vector<int>& common);
  void allocate(int m);
  void fill(int m, int first, int end, size_t at);

  const SearchProblem& problem_;
  const SearchOptions& options_;
  int64_t micro_batch_;
  int micro_batches_, pipelines_, layers_;
  std::vector<int> least_end_;
  std::vector<int> row_of_, shared_;  // [last layer] row of stages up to so many layers
  std::unordered_map<uint64_t, int> numbers_;
  std::vector<Mesh> meshes_;
  std::vector<int> useful_;  // [mesh] -1: not yet known
  std::vector<Sparse<Seconds>> time_, reduce_;
  std::vector<Sparse<int>> limit_;
  std::unordered_map<uint64_t, StageProfile> profiles_;
};

}  // namespace motley::pipeline
