// Archives: what torch::pickle_save writes and torch.load reads, read with suspicion.
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

}  // namespace motley
