#include "cost/cost.h"

namespace motley {

namespace {

constexpr const char* kFused = "fused-";
constexpr Optimizer kOptimizers[] = {
    Optimizer::adamw,         Optimizer::amsgrad,         Optimizer::sgd,
    {Optimizer::adamw, true}, {Optimizer::amsgrad, true}, {Optimizer::sgd, true}};

}  // namespace

std::string to_string(Optimizer optimizer) {
  return std::string(optimizer.fused ? kFused : "") + to_string(optimizer.kind);
}

const char* to_string(Optimizer::Kind kind) {
  switch (kind) {
    case Optimizer::sgd:
      return "sgd";
    case Optimizer::adamw:
      return "adamw";
    case Optimizer::amsgrad:
      return "amsgrad";
  }
  return "";
}

bool parse_optimizer(const std::string& text, Optimizer* optimizer) {
  for (const Optimizer known : kOptimizers)
    if (text == to_string(known)) return *optimizer = known, true;
  return false;
}

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const Optimizer known : kOptimizers) names.push_back(to_string(known));
  return names;
}

double state_factor(Optimizer optimizer) { return 1 + static_cast<double>(optimizer.kind); }

}  // namespace motley
