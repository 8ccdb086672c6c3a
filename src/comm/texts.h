#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace motley {

// [rank] What every rank says, on all of them. Collective.
std::vector<std::string> gather_texts(Communicator& group, const std::string& mine);

}  // namespace motley
