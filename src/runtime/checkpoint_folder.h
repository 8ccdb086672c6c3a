// The folder that a run saves to: the last checkpoints, each a folder that is there when it is whole.
//
//   FOLDER/step-0000000000012/manifest.json      {format, run, step, model, optimizer, seed, files}
//                             rank-0.pt, ...     pieces of one worker: {format, run, step, tensors,
//                                                parts}, which torch.load reads
//
// Every worker writes the pieces that it alone counts, in a thread of its own, into a folder of
// another name; when all have, and what they wrote is on disk, rank 0 adds the manifest and renames
// the folder. So a crash at any moment, or a full disk, leaves the checkpoints before it as they
// were. Parts say where a piece lies in the whole tensor (comm/reshard.h), so any plan can read any
// plan's checkpoint.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <string>
#include <vector>

#include "runtime/pieces.h"

namespace motley {

// One run has it at a time. Throws UserError if it cannot be made or another run has it; what a
// killed run left half-written in it is removed.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(const std::string& path);
  ~CheckpointFolder();
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

 private:
  int lock_ = -1;
};

// What a checkpoint is of.
struct CheckpointOf {
  std::string model, optimizer;
  uint64_t seed = 0;
  int64_t step = 0;  // steps taken
  int64_t run = 0;   // a random number, the same in all of its files
};

// The steps of the checkpoints in a folder, newest first. Throws UserError where the folder holds a
// file of an older version of motley.
std::vector<int64_t> checkpoints_in(const std::string& folder);

// Reads one into `assembly`. Throws UserError if it is of another model or optimizer than `of`,
// std::runtime_error saying what is wrong with it otherwise.
CheckpointOf read_checkpoint(const std::string& folder, int64_t step, const CheckpointOf& of,
                             Assembly* assembly);

// The pieces of one worker, as BESIDE/rank-R.pt, which is there when it is whole. Throws where it cannot be written.
void write_pieces(const std::string& beside, int rank, const CheckpointOf& of,
                  const std::vector<HeldPiece>& pieces);
// Throws std::runtime_error or UserError if they are not of that run and step, or damaged.
void parse_pieces(const std::string& bytes, const CheckpointOf& of, Assembly* assembly);
void read_pieces(const std::string& path, const CheckpointOf& of, Assembly* assembly);

// Writes this worker's part of checkpoints, in the background.
class CheckpointWriter {
 public:
  // `keep`: how many checkpoints stay.
  CheckpointWriter(std::string folder, int rank, int ranks, int keep);
  // Waits for what is being written; what is not concluded is removed.
  ~CheckpointWriter();

  // Begins to write pieces, which nobody changes any more. REQUIRES: nothing is under way.
  void begin(const CheckpointOf& of, std::vector<HeldPiece> pieces);
  // Between begin() and conclude().
  bool under_way() const { return written_.valid(); }
  // Whether this worker's part is written, or has failed.
  bool finished() const;
  // Why it could not be written; empty: it was. Waits for it.
  std::string failure() const;
  // When all workers have finished: whether all have written. Rank 0 makes it the newest
  // checkpoint; returns why it could not.
  std::string conclude(bool all_written);

 private:
  std::string beside() const;

  std::string folder_;
  int rank_, ranks_, keep_;
  CheckpointOf of_;
  std::shared_future<std::string> written_;
};

}  // namespace motley
