#include "interpret/attention.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"

namespace motley {
namespace {

using Mask = c10::optional<at::Tensor>;
using Scale = c10::optional<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The call, as both passes see it.
struct Attention {
  const at::Tensor &q, &k, &v;
  bool causal;
  const Mask& mask;
  Scale scale;

  int64_t shared() const { return q.size(1) / k.size(1); }  // heads of queries for one of keys
  double factor() const { return scale ? *scale : 1 / std::sqrt(static_cast<double>(q.size(3))); }
};

// [b h s d] as [b g h/g s d], and [b g t d] as [b g 1 t d].
at::Tensor by_group(const at::Tensor& x, int64_t groups) {
  return x.reshape({x.size(0), groups, x.size(1) / groups, x.size(2), x.size(3)});
}
at::ScalarType computed_in(const at::Tensor& x) {
  return x.element_size() == 2 ? at::kFloat : x.scalar_type();
}
at::Tensor wide(const at::Tensor& x, int64_t groups) {
  return by_group(x, groups).to(computed_in(x));
}

// [b g h/g s t], with what is masked at minus infinity.
at::Tensor scores(const Attention& a) {
  const int64_t groups = a.k.size(1), s = a.q.size(2), t = a.k.size(2);
  at::Tensor made = wide(a.q, groups).matmul(wide(a.k, groups).transpose(-2, -1)).mul_(a.factor());
  if (a.causal)  // a query sees the keys up to its own number
    made.masked_fill_(at::ones({s, t}, made.options().dtype(at::kBool)).triu_(1), -kInfinity);
  if (a.mask) {
    const at::Tensor whole = a.mask->expand({a.q.size(0), a.q.size(1), s, t});
    made.add_(by_group(whole, groups).to(made.scalar_type()));
  }
  return made;
}

at::Tensor weights(at::Tensor scores, const at::Tensor& sums) {
  return scores.sub_(sums.unsqueeze(-1)).exp_();
}

std::tuple<at::Tensor, at::Tensor> by_products(const Attention& a) {
  const int64_t groups = a.k.size(1);
  at::Tensor of = scores(a);
  at::Tensor sums = of.logsumexp(-1);         // [b g h/g s]
  sums.masked_fill_(sums.eq(-kInfinity), 0);  // a row that sees nothing: so the CPU has it
  const at::Tensor out = weights(std::move(of), sums).matmul(wide(a.v, groups));
  return {out.reshape(a.q.sizes()).to(a.q.scalar_type()),
          sums.reshape({a.q.size(0), a.q.size(1), a.q.size(2)})};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Gradients backward_by_products(const Attention& a, const at::Tensor& dout, const at::Tensor& out,
                               const at::Tensor& sums) {
  const int64_t groups = a.k.size(1);
  const at::Tensor dy = wide(dout, groups);
  const at::Tensor p =
      weights(scores(a), by_group(sums.unsqueeze(-1), groups).squeeze(-1).to(dy.scalar_type()));
  const at::Tensor dv = p.transpose(-2, -1).matmul(dy).sum(2);
  const at::Tensor delta = (dy * wide(out, groups)).sum(-1, /*keepdim=*/true);
  const at::Tensor ds = dy.matmul(wide(a.v, groups).transpose(-2, -1)).sub_(delta).mul_(p);
  const at::Tensor dq = ds.matmul(wide(a.k, groups)).mul_(a.factor());
  const at::Tensor dk = ds.transpose(-2, -1).matmul(wide(a.q, groups)).sum(2).mul_(a.factor());
  return {dq.reshape(a.q.sizes()).to(a.q.scalar_type()), dk.to(a.k.scalar_type()),
          dv.to(a.v.scalar_type())};
}

using Stack = std::vector<c10::IValue>;

// Calls an operator of ATen, whose later arguments are as its schema has them by default.
Stack called(const char* name, Stack stack, Scale scale) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  const auto& arguments = op.schema().arguments();
  while (stack.size() < arguments.size())
    stack.push_back(arguments[stack.size()].name() == "scale"
                        ? c10::IValue(scale)
                        : *arguments[stack.size()].default_value());
  op.callBoxed(&stack);
  return stack;
}

// The kernels of libtorch, by their numbers in SDPBackend.
enum AttentionKernel : int64_t { kProducts = 0, kFlash = 1, kEfficient = 2, kCudnn = 3 };

int64_t chosen(const Attention& a) {
  static const bool asks =
      c10::Dispatcher::singleton().findSchema({"aten::_fused_sdp_choice", ""}).has_value();
  if (!asks || a.q.scalar_type() == at::kDouble) return kProducts;
  Stack said = called("aten::_fused_sdp_choice", {a.q, a.k, a.v, a.mask, 0.0, a.causal}, a.scale);
  return said.at(0).toInt();
}

// A mask as the kernels read it: [b h s t], whose rows begin at multiples of 16 elements. One that is
// broadcast stays so.
Mask aligned(const Attention& a) {
  if (!a.mask) return {};
  constexpr int64_t kAligned = 16;
  const int64_t t = a.k.size(2), missing = (kAligned - t % kAligned) % kAligned;
  at::Tensor mask = a.mask->to(a.q.scalar_type());
  if (missing > 0 && mask.size(-1) == t)
    mask = at::constant_pad_nd(mask, {0, missing}).narrow(-1, 0, t);
  at::Tensor whole = mask.expand({a.q.size(0), a.q.size(1), a.q.size(2), t});
  bool reads = whole.stride(3) == 1;
  for (int64_t d = 0; d < 3; ++d) reads = reads && whole.stride(d) % kAligned == 0;
  if (reads) return whole;
  return at::constant_pad_nd(whole, {0, missing}).contiguous().narrow(-1, 0, t);
}

// Keys or values once for every head of queries, and gradients of those summed.
at::Tensor repeated(const at::Tensor& x, int64_t times) {
  return times == 1 ? x : x.repeat_interleave(times, 1);
}
at::Tensor summed(const at::Tensor& x, int64_t times) {
  if (times == 1) return x;
  return x.reshape({x.size(0), x.size(1) / times, times, x.size(2), x.size(3)}).sum(2);
}

// Which kernel, with operands that it takes: one head of keys for every head of queries.
struct Fused {
  explicit Fused(const Attention& a)
      : k(repeated(a.k, a.shared())),
        v(repeated(a.v, a.shared())),
        call{a.q, k, v, a.causal, a.mask, a.scale},
        kernel(chosen(call)) {
    // torch pads such heads where it differentiates by itself.
    if (kernel == kFlash && a.q.size(3) % 8 != 0) kernel = kProducts;
  }
  at::Tensor k, v;
  Attention call;
  int64_t kernel;
};

std::tuple<at::Tensor, at::Tensor> on_cuda(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, double dropout_p, bool causal,
                                           const Mask& mask, Scale scale) {
  MOTLEY_CHECK(dropout_p == 0);
  const Attention whole{q, k, v, causal, mask, scale};
  const Fused fused(whole);
  const Attention& a = fused.call;
  Stack made;
  switch (fused.kernel) {
    case kFlash:
      made = called("aten::_scaled_dot_product_flash_attention", {q, a.k, a.v, 0.0, causal}, scale);
      break;
    case kEfficient:
      made = called("aten::_scaled_dot_product_efficient_attention",
                    {q, a.k, a.v, aligned(a), true, 0.0, causal}, scale);
      break;
    case kCudnn:
      made = called("aten::_scaled_dot_product_cudnn_attention",
                    {q, a.k, a.v, aligned(a), true, 0.0, causal}, scale);
      break;
    default:
      return by_products(whole);
  }
  // Kernels hold sums for more rows than there are, or for each row alone.
  const at::Tensor sums = made.at(1).toTensor();
  return {made.at(0).toTensor(),
          sums.reshape({q.size(0), q.size(1), -1}).narrow(2, 0, q.size(2)).contiguous()};
}

Gradients backward_on_cuda(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const at::Tensor& out, const at::Tensor& sums,
                           double dropout_p, bool causal, const Mask& mask, Scale scale) {
  MOTLEY_CHECK(dropout_p == 0);
  const Attention whole{q, k, v, causal, mask, scale};
  const Fused fused(whole);
  const Attention& a = fused.call;
  const at::Tensor none, seed = at::empty({}, q.options().dtype(at::kLong));  // of no dropout
  const int64_t s = q.size(2), t = k.size(2);
  const Mask bias = aligned(a);
  Stack made;
  switch (fused.kernel) {
    case kFlash:
      made =
          called("aten::_scaled_dot_product_flash_attention_backward",
                 {dout, q, a.k, a.v, out, sums, none, none, s, t, 0.0, causal, seed, seed}, scale);
      break;
    case kEfficient: {
      constexpr int64_t kRows = 32;
      const at::Tensor padded =
          at::constant_pad_nd(sums, {0, (kRows - s % kRows) % kRows}, kInfinity).contiguous();
      c10::List<bool> wanted({true, true, true, false});
      made = called(
          "aten::_scaled_dot_product_efficient_attention_backward",
          {dout, q, a.k, a.v, bias ? *bias : none, out, padded, seed, seed, 0.0, wanted, causal},
          scale);
      break;
    }
    case kCudnn:
      made = called("aten::_scaled_dot_product_cudnn_attention_backward",
                    {dout, q, a.k, a.v, out, sums.unsqueeze(-1), seed, seed, bias ? *bias : none,
                     none, none, s, t, 0.0, causal},
                    scale);
      break;
    default:
      return backward_by_products(whole, dout, out, sums);
  }
  const int64_t times = whole.shared();
  return {made.at(0).toTensor(), summed(made.at(1).toTensor(), times),
          summed(made.at(2).toTensor(), times)};
}

std::tuple<at::Tensor, at::Tensor> products(const at::Tensor& q, const at::Tensor& k,
                                            const at::Tensor& v, bool causal, const Mask& mask,
                                            Scale scale) {
  return by_products({q, k, v, causal, mask, scale});
}
Gradients products_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& out, const at::Tensor& sums,
                            bool causal, const Mask& mask, Scale scale) {
  return backward_by_products({q, k, v, causal, mask, scale}, dout, out, sums);
}

}  // namespace

void register_attention() {
  // Never freed: the dispatcher outlives it. Several libraries of one process may hold this code.
  static const bool registered = [] {
    auto& dispatcher = c10::Dispatcher::singleton();
    if (dispatcher.findSchema({"motley_torch::attention", ""})) return true;
    auto* l = new torch::Library(torch::Library::FRAGMENT, "motley_torch", c10::nullopt, __FILE__,
                                 __LINE__);
    l->def(
        "attention(Tensor q, Tensor k, Tensor v, bool causal, Tensor? mask, float? scale) -> "
        "(Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &products));
    l->def(
        "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, "
        "bool causal, Tensor? mask, float? scale) -> (Tensor, Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &products_backward));
    const std::string name = "aten::_scaled_dot_product_flash_attention_for_cpu";
    const auto op = dispatcher.findSchema({name, ""});
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) return true;
    auto* kernels = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                       __FILE__, __LINE__);
    kernels->impl(name.c_str(), &on_cuda);
    kernels->impl((name + "_backward").c_str(), &backward_on_cuda);
    return true;
  }();
  MOTLEY_CHECK(registered);
}

}  // namespace motley
