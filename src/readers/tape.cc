#include "readers/tape.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace motley::readers {

namespace {

int64_t product(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t last(const Shape& shape) { return shape.back(); }

TensorSpec f32(Shape shape) { return {DType::f32, std::move(shape)}; }

}  // namespace

void Tape::grow() {
  needs_.resize(graph_.values.size());
  loose_.resize(graph_.values.size());
  gradients_.resize(graph_.values.size());
}

ValueId Tape::emit(const std::string& op, std::vector<Arg> args, Shape shape) {
  const NodeId node = graph_.add(op, std::move(args), {f32(std::move(shape))}, phase_);
  grow();
  return graph_.node(node).outputs[0];
}

std::vector<ValueId> Tape::fixed(const std::string& op, std::vector<Arg> args,
                                 const std::vector<TensorSpec>& specs) {
  const NodeId node = graph_.add(op, std::move(args), specs, phase_);
  grow();
  return graph_.node(node).outputs;
}

ValueId Tape::fixed(const std::string& op, std::vector<Arg> args, const TensorSpec& spec) {
  return fixed(op, std::move(args), std::vector<TensorSpec>{spec})[0];
}

void Tape::derive(ValueId out, std::vector<ValueId> from, std::function<void(ValueId)> backward) {
  if (std::none_of(from.begin(), from.end(), [&](ValueId v) { return needed(v); })) return;
  needs_[out.index] = true;
  entries_.push_back({{out}, std::move(backward)});
}

void Tape::accumulate(ValueId v, ValueId gradient) {
  if (!needed(v)) return;
  ValueId& sum = gradients_[v.index];
  const ValueId before = sum;
  const ValueId after = before.valid()
                            ? emit("aten::add.Tensor", {before, gradient, int64_t{1}}, shape(v))
                            : gradient;
  gradients_[v.index] = after;
}

ValueId Tape::parameter(const std::string& name, Shape shape) {
  const ValueId v = graph_.add_parameter(name, f32(std::move(shape)));
  grow();
  needs_[v.index] = true;
  return v;
}

ValueId Tape::input(const std::string& name, const TensorSpec& spec) {
  const ValueId v = graph_.add_input(name, spec);
  grow();
  return v;
}

ValueId Tape::solid(ValueId x) {
  return loose_[x.index] ? emit("aten::clone", {x, std::monostate()}, shape(x)) : x;
}

ValueId Tape::reduced_to(ValueId x, const Shape& wanted) {
  const Shape from = shape(x);
  if (from == wanted) return x;
  std::vector<int64_t> dims;
  Shape kept = from;
  const size_t more = from.size() - wanted.size();
  for (size_t d = 0; d < from.size(); ++d)
    if (d < more || (wanted[d - more] == 1 && from[d] != 1)) {
      dims.push_back(static_cast<int64_t>(d));
      kept[d] = 1;
    }
  if (!dims.empty()) x = emit("aten::sum.dim_IntList", {x, dims, true, std::monostate()}, kept);
  return shape(x) == wanted ? x : emit("aten::view", {x, wanted}, wanted);
}

ValueId Tape::linear(ValueId x, ValueId weight, ValueId bias, bool turned) {
  const Shape in = shape(x), w = shape(weight);
  const int64_t k = w[turned ? 0 : 1], n = w[turned ? 1 : 0], rows = product(in) / k;
  MOTLEY_CHECK(last(in) == k, "linear of {} by {}", last(in), k);
  Shape out = in;
  out.back() = n;
  const ValueId t = turned ? weight : emit("aten::t", {weight}, {k, n});
  const ValueId flat =
      in.size() == 2 ? x : emit("aten::view", {solid(x), Shape{rows, k}}, {rows, k});
  ValueId y = emit("aten::mm", {flat, t}, {rows, n});
  if (out.size() != 2) y = emit("aten::view", {y, out}, out);
  const ValueId result = bias.valid() ? emit("aten::add.Tensor", {y, bias, int64_t{1}}, out) : y;
  derive(result, {x, weight, bias}, [=, this](ValueId g) {
    if (needed(bias)) accumulate(bias, reduced_to(g, {n}));
    const ValueId g2 =
        out.size() == 2 ? g : emit("aten::view", {solid(g), Shape{rows, n}}, {rows, n});
    if (needed(weight)) {
      if (turned)
        accumulate(weight, emit("aten::mm", {emit("aten::t", {flat}, {k, rows}), g2}, {k, n}));
      else
        accumulate(weight, emit("aten::mm", {emit("aten::t", {g2}, {n, rows}), flat}, {n, k}));
    }
    if (!needed(x)) return;
    const ValueId back = turned ? emit("aten::t", {weight}, {n, k}) : weight;
    const ValueId gx = emit("aten::mm", {g2, back}, {rows, k});
    accumulate(x, in.size() == 2 ? gx : emit("aten::view", {gx, in}, in));
  });
  return result;
}

ValueId Tape::embedding(ValueId table, ValueId ids) {
  const Shape t = shape(table);
  Shape out = shape(ids);
  out.push_back(t[1]);
  const ValueId y = emit("aten::embedding", {table, ids, int64_t{-1}, false, false}, out);
  derive(y, {table}, [=, this](ValueId g) {
    accumulate(table, emit("aten::embedding_dense_backward",
                           {solid(g), ids, t[0], int64_t{-1}, false}, t));
  });
  return y;
}

ValueId Tape::layer_norm(ValueId x, ValueId weight, ValueId bias, double eps) {
  const Shape in = shape(x), size = {last(in)};
  Shape one = in;
  one.back() = 1;
  const auto argument = [](ValueId v) { return v.valid() ? Arg(v) : Arg(std::monostate()); };
  const std::vector<ValueId> y =
      fixed("aten::native_layer_norm", {solid(x), size, argument(weight), argument(bias), eps},
            {f32(in), f32(one), f32(one)});
  derive(y[0], {x, weight, bias}, [=, this](ValueId g) {
    const TensorSpec none = f32({-1});
    const std::vector<ValueId> back =
        fixed("aten::native_layer_norm_backward",
              {solid(g), x, size, y[1], y[2], argument(weight), argument(bias),
               std::vector<int64_t>{1, weight.valid(), bias.valid()}},
              {f32(in), weight.valid() ? f32(size) : none, bias.valid() ? f32(size) : none});
    accumulate(x, back[0]);
    if (weight.valid()) accumulate(weight, back[1]);
    if (bias.valid()) accumulate(bias, back[2]);
  });
  return y[0];
}

ValueId Tape::rms_norm(ValueId x, ValueId weight, double eps) {
  const Shape in = shape(x);
  const int64_t n = last(in);
  Shape one = in;
  one.back() = 1;
  const ValueId square = emit("aten::pow.Tensor_Scalar", {x, int64_t{2}}, in);
  const ValueId sums = emit("aten::sum.dim_IntList",
                            {square, std::vector<int64_t>{-1}, true, std::monostate()}, one);
  const ValueId mean = emit("aten::mul.Tensor", {sums, 1.0 / static_cast<double>(n)}, one);
  const ValueId sure = emit("aten::add.Tensor", {mean, eps, int64_t{1}}, one);
  const ValueId r = emit("aten::rsqrt", {sure}, one);
  const ValueId normal = emit("aten::mul.Tensor", {x, r}, in);
  const ValueId y = emit("aten::mul.Tensor", {normal, weight}, in);
  derive(y, {x, weight}, [=, this](ValueId g) {
    accumulate(weight, reduced_to(emit("aten::mul.Tensor", {g, normal}, in), {n}));
    if (!needed(x)) return;
    const ValueId gn = emit("aten::mul.Tensor", {g, weight}, in);
    const ValueId along = emit(
        "aten::sum.dim_IntList",
        {emit("aten::mul.Tensor", {gn, x}, in), std::vector<int64_t>{-1}, true, std::monostate()},
        one);
    const ValueId cube = emit("aten::pow.Tensor_Scalar", {r, int64_t{3}}, one);
    const ValueId less = emit("aten::mul.Tensor", {along, -1.0 / static_cast<double>(n)}, one);
    const ValueId back = emit("aten::mul.Tensor", {less, cube}, one);
    const ValueId direct = emit("aten::mul.Tensor", {gn, r}, in);
    accumulate(x, emit("aten::add.Tensor",
                       {direct, emit("aten::mul.Tensor", {x, back}, in), int64_t{1}}, in));
  });
  return y;
}

ValueId Tape::add(ValueId a, ValueId b) {
  const Shape sa = shape(a), sb = shape(b);
  const ValueId y = emit("aten::add.Tensor", {a, b, int64_t{1}}, sa);
  derive(y, {a, b}, [=, this](ValueId g) {
    accumulate(a, g);
    if (needed(b)) accumulate(b, reduced_to(g, sb));
  });
  return y;
}

ValueId Tape::mul(ValueId a, ValueId b) {
  // Either may be broadcast.
  const Shape sa = shape(a), sb = shape(b);
  Shape out = sa.size() >= sb.size() ? sa : sb;
  for (size_t d = 0; d < out.size(); ++d) {
    const auto at = [&](const Shape& s) {
      return d + s.size() < out.size() ? 1 : s[d + s.size() - out.size()];
    };
    out[d] = std::max(at(sa), at(sb));
  }
  const ValueId y = emit("aten::mul.Tensor", {a, b}, out);
  derive(y, {a, b}, [=, this](ValueId g) {
    if (needed(a)) accumulate(a, reduced_to(emit("aten::mul.Tensor", {g, b}, out), sa));
    if (needed(b)) accumulate(b, reduced_to(emit("aten::mul.Tensor", {g, a}, out), sb));
  });
  return y;
}

ValueId Tape::div(ValueId a, ValueId b) {
  const Shape s = shape(a);
  MOTLEY_CHECK(shape(b) == s);
  const ValueId y = emit("aten::div.Tensor", {a, b}, s);
  derive(y, {a, b}, [=, this](ValueId g) {
    const ValueId part = emit("aten::div.Tensor", {g, b}, s);
    accumulate(a, part);
    if (needed(b)) accumulate(b, emit("aten::neg", {emit("aten::mul.Tensor", {part, y}, s)}, s));
  });
  return y;
}

ValueId Tape::scale(ValueId x, double by) {
  const Shape s = shape(x);
  const ValueId y = emit("aten::mul.Tensor", {x, by}, s);
  derive(y, {x}, [=, this](ValueId g) { accumulate(x, emit("aten::mul.Tensor", {g, by}, s)); });
  return y;
}

ValueId Tape::shift(ValueId x, double by) {
  const ValueId y = emit("aten::add.Tensor", {x, by, int64_t{1}}, shape(x));
  derive(y, {x}, [=, this](ValueId g) { accumulate(x, g); });
  return y;
}

ValueId Tape::neg(ValueId x) {
  const Shape s = shape(x);
  const ValueId y = emit("aten::neg", {x}, s);
  derive(y, {x}, [=, this](ValueId g) { accumulate(x, emit("aten::neg", {g}, s)); });
  return y;
}

ValueId Tape::activation(const std::string& name, ValueId x) {
  const Shape s = shape(x);
  const bool gelu = name == "gelu" || name == "gelu_tanh";
  const std::string kind = name == "gelu_tanh" ? "tanh" : "none";
  const ValueId y = gelu ? emit("aten::gelu", {x, kind}, s) : emit("aten::" + name, {x}, s);
  derive(y, {x}, [=, this](ValueId g) {
    ValueId gx;
    if (gelu)
      gx = emit("aten::gelu_backward", {g, x, kind}, s);
    else if (name == "relu")
      gx = emit("aten::threshold_backward", {g, y, int64_t{0}}, s);
    else  // silu reads what came in, tanh and sigmoid what came out
      gx = emit("aten::" + name + "_backward", {g, name == "silu" ? x : y}, s);
    accumulate(x, gx);
  });
  return y;
}

ValueId Tape::softmax(ValueId x) {
  const Shape s = shape(x);
  const ValueId y = emit("aten::_softmax", {x, int64_t{-1}, false}, s);
  derive(y, {x}, [=, this](ValueId g) {
    accumulate(x, emit("aten::_softmax_backward_data", {g, y, int64_t{-1}, DType::f32}, s));
  });
  return y;
}

ValueId Tape::bmm(ValueId a, ValueId b) {
  const Shape sa = shape(a), sb = shape(b);
  MOTLEY_CHECK(sa[0] == sb[0] && sa[2] == sb[1]);
  const ValueId y = emit("aten::bmm", {a, b}, {sa[0], sa[1], sb[2]});
  derive(y, {a, b}, [=, this](ValueId g) {
    const auto turned = [&](ValueId v, const Shape& s) {
      return emit("aten::transpose.int", {v, int64_t{1}, int64_t{2}}, {s[0], s[2], s[1]});
    };
    if (needed(a)) accumulate(a, emit("aten::bmm", {g, turned(b, sb)}, sa));
    if (needed(b)) accumulate(b, emit("aten::bmm", {turned(a, sa), g}, sb));
  });
  return y;
}

ValueId Tape::view(ValueId x, Shape to) {
  const Shape from = shape(x);
  if (from == to) return x;
  MOTLEY_CHECK(product(from) == product(to));
  const ValueId y = fixed("aten::view", {solid(x), to}, {graph_.spec(x).dtype, to});
  derive(y, {x}, [=, this](ValueId g) {
    accumulate(x, emit("aten::view", {solid(g), from}, from));
  });
  return y;
}

ValueId Tape::transpose(ValueId x, int a, int b) {
  Shape to = shape(x);
  std::swap(to[a], to[b]);
  const auto turn = [=, this](ValueId v, Shape s) {
    const ValueId y = emit("aten::transpose.int", {v, int64_t{a}, int64_t{b}}, std::move(s));
    loose_[y.index] = true;
    return y;
  };
  const Shape from = shape(x);
  const ValueId y = turn(x, to);
  derive(y, {x}, [=, this](ValueId g) { accumulate(x, turn(g, from)); });
  return y;
}

ValueId Tape::expand(ValueId x, Shape to) {
  const Shape from = shape(x);
  const ValueId y = emit("aten::expand", {x, to, false}, to);
  loose_[y.index] = true;
  derive(y, {x}, [=, this](ValueId g) { accumulate(x, reduced_to(g, from)); });
  return y;
}

std::vector<ValueId> Tape::split(ValueId x, const std::vector<int64_t>& sizes) {
  const Shape in = shape(x);
  std::vector<ValueId> parts;
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    Shape s = in;
    s.back() = size;
    const auto dim = static_cast<int64_t>(in.size()) - 1;
    parts.push_back(emit("aten::slice.Tensor", {x, dim, begin, begin + size, int64_t{1}}, s));
    loose_[parts.back().index] = true;
    begin += size;
  }
  MOTLEY_CHECK(begin == last(in));
  // All pieces are of one tensor: its gradient is theirs, put together, once all are there.
  if (!needed(x)) return parts;
  entries_.push_back({parts, [=, this](ValueId) {
                        std::vector<ValueId> list;
                        for (size_t i = 0; i < parts.size(); ++i) {
                          ValueId g = gradients_[parts[i].index];
                          if (!g.valid())
                            g = emit("aten::full",
                                     {shape(parts[i]), 0.0, DType::f32, std::monostate(),
                                      std::monostate(), std::monostate()},
                                     shape(parts[i]));
                          list.push_back(g);
                        }
                        const auto dim = static_cast<int64_t>(in.size()) - 1;
                        accumulate(x, emit("aten::cat", {list, dim}, in));
                      }});
  for (const ValueId part : parts) needs_[part.index] = true;
  return parts;
}

ValueId Tape::cat(const std::vector<ValueId>& parts) {
  Shape s = shape(parts[0]);
  const auto dim = static_cast<int64_t>(s.size()) - 1;
  s.back() = 0;
  for (const ValueId part : parts) s.back() += last(shape(part));
  const ValueId y = emit("aten::cat", {parts, dim}, s);
  derive(y, parts, [=, this](ValueId g) {
    int64_t begin = 0;
    for (const ValueId part : parts) {
      const Shape piece = shape(part);
      if (needed(part)) {
        const ValueId gp =
            emit("aten::slice.Tensor", {g, dim, begin, begin + last(piece), int64_t{1}}, piece);
        loose_[gp.index] = true;
        accumulate(part, gp);
      }
      begin += last(piece);
    }
  });
  return y;
}

ValueId Tape::sum(ValueId x, std::vector<int64_t> dims, bool keep) {
  const Shape in = shape(x);
  Shape kept = in, out;
  for (const int64_t d : dims) kept[static_cast<size_t>(d)] = 1;
  for (size_t d = 0; d < in.size(); ++d)
    if (keep || std::find(dims.begin(), dims.end(), static_cast<int64_t>(d)) == dims.end())
      out.push_back(kept[d]);
  const ValueId y =
      emit("aten::sum.dim_IntList", {x, std::move(dims), keep, std::monostate()}, out);
  derive(y, {x}, [=, this](ValueId g) {
    const ValueId whole = out == kept ? g : emit("aten::view", {solid(g), kept}, kept);
    const ValueId gx = emit("aten::expand", {whole, in, false}, in);
    loose_[gx.index] = true;
    accumulate(x, gx);
  });
  return y;
}

ValueId Tape::sum(ValueId x) {
  const Shape in = shape(x);
  const ValueId y = emit("aten::sum", {x, std::monostate()}, {});
  derive(y, {x}, [=, this](ValueId g) {
    const ValueId gx = emit("aten::expand", {g, in, false}, in);
    loose_[gx.index] = true;
    accumulate(x, gx);
  });
  return y;
}

ValueId Tape::cross_entropy(ValueId logits, ValueId targets) {
  const Shape s = shape(logits);
  constexpr int64_t kSum = 2, kIgnored = -100;
  const ValueId log = emit("aten::_log_softmax", {logits, int64_t{1}, false}, s);
  const ValueId counted = fixed("aten::ne.Scalar", {targets, kIgnored}, {DType::b8, {s[0]}});
  const ValueId ones = emit("aten::_to_copy",
                            {counted, DType::f32, std::monostate(), std::monostate(),
                             std::monostate(), false, std::monostate()},
                            {s[0]});
  const ValueId count = emit("aten::sum", {ones, std::monostate()}, {});
  const std::vector<ValueId> loss =
      fixed("aten::nll_loss_forward", {log, targets, std::monostate(), kSum, kIgnored},
            {f32({}), f32({})});
  const ValueId mean = emit("aten::div.Tensor", {loss[0], count}, {});
  derive(mean, {logits}, [=, this](ValueId g) {
    const ValueId each = emit("aten::div.Tensor", {g, count}, {});
    const ValueId of_log = emit("aten::nll_loss_backward",
                                {each, log, targets, std::monostate(), kSum, kIgnored, count}, s);
    accumulate(logits,
               emit("aten::_log_softmax_backward_data", {of_log, log, int64_t{1}, DType::f32}, s));
  });
  return mean;
}

Graph Tape::finish(ValueId loss) {
  phase_ = Phase::backward;
  gradients_[loss.index] =
      emit("aten::full",
           {Shape{}, 1.0, DType::f32, std::monostate(), std::monostate(), std::monostate()}, {});
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry)
    if (std::any_of(entry->outs.begin(), entry->outs.end(),
                    [&](ValueId v) { return gradients_[v.index].valid(); }))
      entry->backward(gradients_[entry->outs[0].index]);
  graph_.loss = loss;
  for (Parameter& p : graph_.parameters) p.gradient = gradients_[p.value.index];
  remove_dead(&graph_);
  return std::move(graph_);
}

}  // namespace motley::readers
