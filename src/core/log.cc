#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

namespace motley {

void init_log(const std::string& level) {
  auto logger = std::make_shared<spdlog::logger>(
      "motley", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_pattern("%^%l%$: %v");
  logger->set_level(spdlog::level::from_str(level));
  spdlog::set_default_logger(logger);
}

}  // namespace motley
