#include "planner/options.h"

#include <charconv>

#include "core/error.h"
#include "core/limits.h"
#include "graph/segment.h"
#include "shard/duplex.h"

namespace motley::planner {

namespace {

constexpr int kMostLayers = 2000;

bool read_number(const std::string& text, int* number) {
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, *number);
  return error == std::errc() && at == end;
}

}  // namespace

VirtualDevices parse_virtual_devices(const std::string& text) {
  VirtualDevices wanted;
  if (text == "auto") return wanted;
  wanted.automatic = false;
  wanted.off = text == "off";
  wanted.machine = text == "machine";
  if (wanted.off || wanted.machine) return wanted;
  if (!read_number(text, &wanted.size) || wanted.size < 2 || wanted.size > kMaxDevices)
    throw user_error("plan",
                     "--virtual-devices is '{}'; give auto, off, machine, or a number of devices "
                     "from 2 on",
                     text);
  return wanted;
}

SegmentRequest parse_segments(const std::string& text) {
  SegmentRequest request;
  if (text == "auto") {
    request.automatic = true;
    return request;
  }
  if (!text.empty() && text.find_first_not_of("0123456789") == std::string::npos) {
    request.count = text.size() > 4 ? 0 : std::stoi(text);
    if (request.count < 1 || request.count > kMaxSegments)
      throw user_error("plan", "--segments is {}; give a number from 1 to {}, auto, or modules",
                       text, kMaxSegments);
    return request;
  }
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    request.modules.push_back(text.substr(start, end - start));
    if (request.modules.back().empty())
      throw user_error("plan",
                       "--segments is '{}'; give a number, auto, or modules such as "
                       "features,classifier",
                       text);
    start = end + 1;
  }
  if (request.modules.size() >= static_cast<size_t>(kMaxSegments))
    throw user_error("plan", "--segments names {} modules; give at most {}", request.modules.size(),
                     kMaxSegments - 1);
  return request;
}

int parse_duplex(const std::string& text) {
  if (text == "auto") return 0;
  if (text == "off") return -1;
  int parts = 0;
  if (!read_number(text, &parts) || parts < 1 || parts > kMaxParts)
    throw user_error("plan", "--duplex is '{}'; give auto, off, or a number from 1 to {}", text,
                     kMaxParts);
  return parts;
}

int parse_layers(const std::string& text) {
  if (text.empty()) return 0;
  if (text == "auto") return kAutomaticLayers;
  int layers = 0;
  if (!read_number(text, &layers) || layers < 1 || layers > kMostLayers)
    throw user_error("plan", "--layers is '{}'; give auto, or a number from 1 to {}", text,
                     kMostLayers);
  return layers;
}

}  // namespace motley::planner
