#include "grid/strategy.h"

#include <charconv>
#include <set>

#include "core/error.h"

namespace motley::grid {

const char* to_string(Runtime runtime) {
  switch (runtime) {
    case Runtime::motley:
      return "motley";
    case Runtime::deepspeed:
      return "deepspeed";
    case Runtime::megatron:
      return "megatron";
  }
  return "?";
}

const char* to_string(Recompute recompute) {
  switch (recompute) {
    case Recompute::none:
      return "none";
    case Recompute::selective:
      return "selective";
    case Recompute::full:
      return "full";
  }
  return "?";
}

std::string to_string(const Strategy& s) {
  std::string text = fmt::format("pp={},dp={},tp={},mbs={}", s.pp, s.dp, s.tp, s.micro_batch);
  if (s.cp > 1) text += fmt::format(",cp={}", s.cp);
  if (s.ep > 1) text += fmt::format(",ep={}", s.ep);
  if (s.interleave > 1) text += fmt::format(",interleave={}", s.interleave);
  if (s.zero > 0) text += fmt::format(",zero={}", s.zero);
  if (s.recompute != Recompute::none) text += fmt::format(",recompute={}", to_string(s.recompute));
  text += fmt::format(",layers={}", fmt::join(s.stages, "/"));
  return text;
}

namespace {

int parse_int(const std::string& key, std::string_view text, int least) {
  int value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least)
    throw user_error("grid", "fixed choice {}={}: give a whole number of at least {}", key, text,
                     least);
  return value;
}

std::vector<int> parse_list(const std::string& key, std::string_view text, int least) {
  std::vector<int> list;
  while (true) {
    size_t cut = text.find('/');
    list.push_back(parse_int(key, text.substr(0, cut), least));
    if (cut == std::string_view::npos) return list;
    text.remove_prefix(cut + 1);
  }
}

}  // namespace

Fixed parse_fixed(const std::string& text) {
  Fixed fixed;
  std::string_view rest = text;
  std::set<std::string> seen;
  while (!rest.empty()) {
    size_t comma = rest.find(',');
    std::string_view item = rest.substr(0, comma);
    rest.remove_prefix(comma == std::string_view::npos ? rest.size() : comma + 1);
    size_t equals = item.find('=');
    if (equals == std::string_view::npos)
      throw user_error("grid", "fixed choice \"{}\" has no \"=\"; write e.g. pp=4,tp=1", item);
    std::string key(item.substr(0, equals));
    std::string_view value = item.substr(equals + 1);
    if (!seen.insert(key).second) throw user_error("grid", "fixed choice {} is given twice", key);
    if (key == "pp") {
      fixed.pp = parse_int(key, value, 1);
    } else if (key == "dp") {
      fixed.dp = parse_int(key, value, 1);
    } else if (key == "tp") {
      fixed.tp = parse_int(key, value, 1);
    } else if (key == "cp") {
      fixed.cp = parse_int(key, value, 1);
    } else if (key == "ep") {
      fixed.ep = parse_int(key, value, 1);
    } else if (key == "mbs") {
      fixed.micro_batch = parse_int(key, value, 1);
    } else if (key == "interleave") {
      fixed.interleave = parse_int(key, value, 1);
    } else if (key == "zero") {
      fixed.zero = parse_int(key, value, 0);
      if (*fixed.zero > 3)
        throw user_error("grid", "fixed choice zero={}: give a stage from 0 to 3", value);
    } else if (key == "recompute") {
      if (value == "none") {
        fixed.recompute = Recompute::none;
      } else if (value == "selective") {
        fixed.recompute = Recompute::selective;
      } else if (value == "full") {
        fixed.recompute = Recompute::full;
      } else {
        throw user_error("grid", "fixed choice recompute={}: give none, selective or full", value);
      }
    } else if (key == "layers") {
      fixed.stages = parse_list(key, value, 1);
    } else if (key == "devices") {
      fixed.devices = parse_list(key, value, 0);
    } else {
      throw user_error("grid",
                       "fixed choice {} is unknown; give pp, dp, tp, cp, ep, mbs, interleave, "
                       "zero, recompute, layers or devices",
                       key);
    }
  }
  return fixed;
}

}  // namespace motley::grid
