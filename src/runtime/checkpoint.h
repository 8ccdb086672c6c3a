// Checkpoint files: what torch::pickle_save writes and torch.load reads, read with suspicion, and a
// folder for them that one run has at a time.
//
// libtorch reads an archive without its checksums and takes the sizes in it as they come. Here
// every record is found within the file, has the checksum that the file says, and is as large as
// the tensors in it want.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace motley {

// The value in an archive of torch::pickle_save or torch.save. Throws std::runtime_error saying
// what is wrong with it.
c10::IValue read_archive(const std::string& bytes);

// A folder that a run saves to. Throws UserError if it cannot be made or another run has it; what a
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

}  // namespace motley
