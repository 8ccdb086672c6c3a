#include "comm/reshard.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "comm/moment.h"
#include "core/error.h"

namespace motley {

namespace {

int64_t begin_of(const Layout& layout, int rank) {
  int64_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += layout.pieces[r];
  return begin;
}

}  // namespace

Layout layout_of(const Theory& theory, ValueId value, Placement placement, const Shares& shares) {
  MOTLEY_CHECK(!placement.is_partial());
  Layout layout;
  layout.ranks = shares.devices();
  const auto& factors = theory.factors(value);
  if (!placement.is_shard()) {
    layout.inner = theory.graph().spec(value).numel();
    return layout;
  }
  bool behind = false;
  for (size_t d = 0; d < factors.size(); ++d)
    for (size_t k = 0; k < factors[d].size(); ++k) {
      if (d == placement.dim && k == placement.factor) {
        layout.size = factors[d][k];
        behind = true;
      } else {
        (behind ? layout.inner : layout.outer) *= factors[d][k];
      }
    }
  layout.pieces = shares.of(theory.cut(value, placement));
  return layout;
}

Part part_of(const Layout& layout, int rank, int group) {
  Part part{layout.outer, layout.size, layout.inner, 0, layout.size, group, 0, layout.numel(rank)};
  if (layout.pieces.empty()) return part;
  part.begin = begin_of(layout, rank);
  part.length = layout.pieces[rank];
  return part;
}

Resharding::Resharding(const Layout& from, const Layout& to) : from_(from), to_(to) {
  MOTLEY_CHECK(from.numel() == to.numel(), "layouts of different values");
  counts_.resize(static_cast<size_t>(from.ranks) * to.ranks);
  for (int s = 0; s < from.ranks; ++s)
    for (int r = 0; r < to.ranks; ++r) {
      int64_t& n = counts_[static_cast<size_t>(s) * to.ranks + r];
      if (from.pieces.empty()) {
        // Receivers take turns among the senders; a receiver that is one of as many asks its like.
        n = s == static_cast<int>(static_cast<int64_t>(r) * from.ranks / to.ranks) ? to.numel(r)
                                                                                   : 0;
        continue;
      }
      Box b;
      if (box(s, r, false, &b)) {
        n = b.length;
        for (size_t a = 0; a < b.shape.size(); ++a)
          if (static_cast<int64_t>(a) != b.axis) n *= b.shape[a];
      } else {
        n = indices(s, r, false).numel();
      }
    }
}

// The part of the sender's (receiver's) piece that the other holds too, if it is a box.
bool Resharding::box(int s, int r, bool sender, Box* out) const {
  const Layout& mine = sender ? from_ : to_;
  const Layout& other = sender ? to_ : from_;
  const int me = sender ? s : r, they = sender ? r : s;
  const int64_t begin = mine.pieces.empty() ? 0 : begin_of(mine, me);
  const int64_t length = mine.pieces.empty() ? mine.size : mine.pieces[me];
  if (other.pieces.empty()) {
    *out = {{mine.outer, length, mine.inner}, 1, 0, length};
    return true;
  }
  const int64_t from = begin_of(other, they), size = other.pieces[they];
  if (mine.pieces.empty()) {
    *out = {{other.outer, other.size, other.inner}, 1, from, size};
    return true;
  }
  if (mine.outer == other.outer && mine.size == other.size) {
    const int64_t low = std::max(begin, from), high = std::min(begin + length, from + size);
    *out = {{mine.outer, length, mine.inner},
            1,
            std::min(std::max<int64_t>(low - begin, 0), length),
            std::max<int64_t>(high - low, 0)};
    return true;
  }
  if (other.outer % (mine.outer * mine.size) == 0) {  // the other cut lies within
    *out = {{mine.outer, length, other.outer / (mine.outer * mine.size), other.size, other.inner},
            3,
            from,
            size};
    return true;
  }
  if (mine.outer % (other.outer * other.size) == 0) {  // around it
    *out = {{other.outer, other.size, mine.outer / (other.outer * other.size), length, mine.inner},
            1,
            from,
            size};
    return true;
  }
  return false;
}

// The elements of a piece that the other holds too, ascending by their place in the value.
at::Tensor Resharding::indices(int s, int r, bool sender) const {
  const Layout& mine = sender ? from_ : to_;
  const Layout& other = sender ? to_ : from_;
  const int me = sender ? s : r, they = sender ? r : s;
  at::Tensor all = at::arange(mine.numel(), at::kLong).reshape({mine.outer, mine.size, mine.inner});
  all = all.narrow(1, begin_of(mine, me), mine.pieces[me]).reshape({-1});
  const at::Tensor at = at::remainder(at::floor_divide(all, other.inner), other.size);
  const int64_t from = begin_of(other, they);
  return at::logical_and(at.ge(from), at.lt(from + other.pieces[they])).nonzero().reshape({-1});
}

at::Tensor Resharding::extract(int s, int r, const at::Tensor& local) const {
  Box b;
  if (!box(s, r, true, &b))
    return local.reshape({-1})
        .index_select(0, moved_to(indices(s, r, true), local.device()))
        .contiguous();
  return local.reshape(b.shape).narrow(b.axis, b.begin, b.length).reshape({-1}).contiguous();
}

void Resharding::insert(int s, int r, const at::Tensor& message, at::Tensor& flat) const {
  Box b;
  if (!box(s, r, false, &b)) {
    flat.index_copy_(0, moved_to(indices(s, r, false), flat.device()), message);
    return;
  }
  at::Tensor part = flat.view(b.shape).narrow(b.axis, b.begin, b.length);
  part.copy_(message.reshape(part.sizes()));
}

}  // namespace motley
