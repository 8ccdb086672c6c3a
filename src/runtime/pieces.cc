#include "runtime/pieces.h"

#include <ATen/ATen.h>

#include <stdexcept>

#include "core/error.h"
#include "interpret/dispatch.h"

namespace motley {

namespace {

// Products of sizes of files stay below this.
constexpr int64_t kMost = int64_t{1} << 48;

int64_t product(int64_t a, int64_t b) { return a == 0 || b <= kMost / a ? a * b : kMost + 1; }

// The piece as a view of the whole; undefined where it is none.
at::Tensor view_of(const Part& p, const at::Tensor& whole) {
  if (p.count == 0) return whole.narrow(0, 0, 0);
  if (p.length == p.size) return whole.narrow(0, p.first, p.count);
  if (p.first != 0 || p.count != p.outer * p.length * p.inner) return {};
  return whole.view({p.outer, p.size, p.inner}).narrow(1, p.begin, p.length);
}

}  // namespace

Part whole_part(int64_t numel) { return {1, numel, 1, 0, numel, 0, 0, numel}; }

std::string problem_of(const Part& p, int64_t numel) {
  for (int64_t n : {p.outer, p.size, p.inner, p.begin, p.length, p.first, p.count})
    if (n < 0 || n > kMost) return "a part has the extent " + std::to_string(n);
  if (product(product(p.outer, p.size), p.inner) != numel)
    return fmt::format("a part is of {} elements, the tensor of {}",
                       product(product(p.outer, p.size), p.inner), numel);
  if (p.begin + p.length > p.size || p.first + p.count > p.outer * p.length * p.inner)
    return "a part lies outside of its tensor";
  return "";
}

at::Tensor elements_of(const Part& p) {
  return at::arange(p.outer * p.size * p.inner, at::kLong)
      .view({p.outer, p.size, p.inner})
      .narrow(1, p.begin, p.length)
      .reshape({-1})
      .narrow(0, p.first, p.count);
}

void put_piece(const Part& part, const at::Tensor& piece, at::Tensor& whole) {
  const at::Tensor view = view_of(part, whole);
  if (view.defined())
    view.copy_(piece.reshape(view.sizes()));
  else
    whole.index_copy_(0, elements_of(part).to(whole.device()), piece.reshape({-1}));
}

at::Tensor take_piece(const Part& part, const at::Tensor& whole) {
  const at::Tensor view = view_of(part, whole);
  return view.defined() ? view.reshape({-1})
                        : whole.index_select(0, elements_of(part).to(whole.device()));
}

void Assembly::add(const HeldPiece& piece) {
  const auto spec = specs_.find(piece.name);
  if (spec == specs_.end())
    throw std::runtime_error("it has " + piece.name + ", the model has not");
  const at::ScalarType type = to_torch(spec->second.dtype);
  int64_t numel = 1;
  for (int64_t d : spec->second.shape) numel *= d;
  const at::Tensor& t = piece.tensor;
  if (t.scalar_type() != type)
    throw std::runtime_error(fmt::format("{} is of {}, the model's of {}", piece.name,
                                         at::toString(t.scalar_type()), at::toString(type)));
  std::string problem = problem_of(piece.part, numel);
  if (problem.empty() && t.numel() != piece.part.count) problem = "a piece is not what its part is";
  if (!problem.empty()) throw std::runtime_error(piece.name + ": " + problem);
  Partial& partial = partial_[piece.name];
  if (!partial.whole.defined()) {
    partial.whole = at::empty({numel}, at::TensorOptions().dtype(type));
    partial.there = at::zeros({numel}, at::TensorOptions().dtype(at::kBool));
  }
  put_piece(piece.part, t, partial.whole);
  put_piece(piece.part, at::ones({piece.part.count}, at::kBool), partial.there);
}

bool Assembly::complete(const std::string& name) const {
  const auto it = partial_.find(name);
  return it != partial_.end() && it->second.there.all().item<bool>();
}

at::Tensor Assembly::whole(const std::string& name) const {
  if (!complete(name)) throw std::runtime_error("parts of " + name + " are missing");
  return partial_.at(name).whole.view(specs_.at(name).shape);
}

}  // namespace motley
