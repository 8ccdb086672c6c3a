// Logging goes to standard error, so that standard output holds results only.
#pragma once

#include <spdlog/spdlog.h>

namespace motley {

// Sets the pattern and level ("warn", "info", "debug") of the process's log. Call once, from main.
void init_log(const std::string& level);

}  // namespace motley
