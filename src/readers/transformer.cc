#include "readers/transformer.h"

#include <cmath>
#include <limits>

#include "core/error.h"
#include "readers/tape.h"

namespace motley::readers {

namespace {

constexpr double kCapacity = 1.25;  // slots of an expert, in multiples of an even distribution

class Builder {
 public:
  Builder(const Transformer& t, int64_t batch) : t_(t), batch_(batch), seq_(t.seq) {}

  Graph run() {
    tables();
    ValueId x = t_.image > 0 ? patches() : tokens();
    for (int64_t i = 0; i < t_.layers; ++i) {
      x = layer(x, i, t_.shared_layers ? "model.layer." : fmt::format("model.layers.{}.", i));
    }
    if (t_.final_norm) x = norm(x, "model.norm", t_.hidden);
    return finish(x);
  }

 private:
  ValueId parameter(const std::string& name, Shape shape) {
    for (const auto& [known, v] : named_)
      if (known == name) return v;
    const ValueId v = tape_.parameter(name, std::move(shape));
    if (t_.shared_layers) named_.emplace_back(name, v);
    return v;
  }
  ValueId linear(ValueId x, const std::string& name, int64_t in, int64_t out, bool bias) {
    const ValueId w = parameter(name + ".weight", t_.turned ? Shape{in, out} : Shape{out, in});
    const ValueId b = bias ? parameter(name + ".bias", {out}) : ValueId();
    return tape_.linear(x, w, b, t_.turned);
  }
  ValueId norm(ValueId x, const std::string& name, int64_t size) {
    if (t_.norm == NormKind::rms)
      return tape_.rms_norm(x, parameter(name + ".weight", {size}), t_.eps);
    const ValueId w =
        t_.norm == NormKind::layer_bare ? ValueId() : parameter(name + ".weight", {size});
    const ValueId b = t_.norm == NormKind::layer ? parameter(name + ".bias", {size}) : ValueId();
    return tape_.layer_norm(x, w, b, t_.eps);
  }

  // What all layers share: rotation angles [seq, rotary] and what is added to scores, [seq, seq] or
  // [heads, seq, seq].
  void tables() {
    using std::monostate;
    const TensorSpec square{DType::f32, {seq_, seq_}};
    const auto numbers = [&](int64_t n) {
      return tape_.fixed("aten::arange", {n, DType::f32, monostate(), monostate(), monostate()},
                         {DType::f32, {n}});
    };
    if (t_.causal) {
      const ValueId full = tape_.fixed("aten::full",
                                       {square.shape, -std::numeric_limits<double>::infinity(),
                                        DType::f32, monostate(), monostate(), monostate()},
                                       square);
      mask_ = tape_.fixed("aten::triu", {full, int64_t{1}}, square);
    }
    if (t_.alibi) {  // a slope for each head, times the distance
      const ValueId slope = tape_.scale(numbers(t_.heads), -8.0 / static_cast<double>(t_.heads));
      const ValueId far = tape_.view(numbers(seq_), {1, 1, seq_});
      const ValueId bias = tape_.mul(tape_.view(slope, {t_.heads, 1, 1}), far);
      mask_ = tape_.add(tape_.expand(bias, {t_.heads, seq_, seq_}), mask_);
    }
    if (t_.rotary == 0) return;
    const TensorSpec half{DType::f32, {t_.rotary / 2}};
    const ValueId power =
        tape_.scale(numbers(t_.rotary / 2), -2 * std::log(1e4) / static_cast<double>(t_.rotary));
    const ValueId frequency = tape_.fixed("aten::exp", {power}, half);
    const ValueId angle = tape_.mul(tape_.view(numbers(seq_), {seq_, 1}), frequency);
    const ValueId both = tape_.cat({angle, angle});
    const TensorSpec table{DType::f32, {seq_, t_.rotary}};
    cos_ = tape_.fixed("aten::cos", {both}, table);
    sin_ = tape_.fixed("aten::sin", {both}, table);
  }

  ValueId tokens() {
    const TensorSpec ids{DType::i64, {batch_, seq_}};
    const int64_t width = t_.embedding > 0 ? t_.embedding : t_.hidden;
    table_ = parameter("model.embed_tokens.weight", {t_.vocab, width});
    const ValueId in = tape_.input("tokens", ids);
    targets_ = tape_.input("targets", ids);
    ValueId x = tape_.embedding(table_, in);
    if (t_.positions > 0) {
      // The rows of the sequence; models may have more.
      ValueId rows = parameter("model.embed_positions.weight", {t_.positions, width});
      x = tape_.add(x, t_.positions == seq_
                           ? rows
                           : tape_.embedding(rows, tape_.fixed("aten::arange",
                                                               {seq_, DType::i64, std::monostate(),
                                                                std::monostate(), std::monostate()},
                                                               {DType::i64, {seq_}})));
    }
    if (t_.types > 0) {
      const ValueId types = parameter("model.embed_types.weight", {t_.types, width});
      const ValueId zero = tape_.fixed("aten::full",
                                       {Shape{seq_}, int64_t{0}, DType::i64, std::monostate(),
                                        std::monostate(), std::monostate()},
                                       {DType::i64, {seq_}});
      x = tape_.add(x, tape_.embedding(types, zero));
    }
    if (t_.embedding_norm) x = norm(x, "model.embed_norm", width);
    if (t_.embedding > 0 && t_.embedding != t_.hidden)
      x = linear(x, "model.embed_projection", width, t_.hidden, true);
    return x;
  }

  // Images in patches, [batch, 1 + patches, hidden], a class token first.
  ValueId patches() {
    const int64_t side = t_.image / t_.patch, n = side * side, p = t_.patch, c = t_.channels;
    const ValueId images = tape_.input("images", {DType::f32, {batch_, c, t_.image, t_.image}});
    targets_ = tape_.input("labels", {DType::i64, {batch_}});
    ValueId x = tape_.view(images, {batch_, c, side, p, side, p});
    x = tape_.transpose(x, 1, 2);  // [batch, side, c, p, side, p]
    x = tape_.transpose(x, 3, 4);  // [batch, side, c, side, p, p]
    x = tape_.transpose(x, 2, 3);  // [batch, side, side, c, p, p]
    x = tape_.view(x, {batch_, n, c * p * p});
    const ValueId w = parameter("model.patch_embeddings.weight", {t_.hidden, c, p, p});
    const ValueId b = parameter("model.patch_embeddings.bias", {t_.hidden});
    x = tape_.linear(x, tape_.view(w, {t_.hidden, c * p * p}), b);
    const ValueId first = parameter("model.cls_token", {1, 1, t_.hidden});
    const ValueId where = parameter("model.position_embeddings", {1, n + 1, t_.hidden});
    // The class token is put in front along the last dimension of the turned sequence.
    const ValueId token = tape_.transpose(tape_.expand(first, {batch_, 1, t_.hidden}), 1, 2);
    x = tape_.transpose(tape_.cat({token, tape_.transpose(x, 1, 2)}), 1, 2);
    return tape_.add(x, where);
  }

  ValueId layer(ValueId x, int64_t i, const std::string& name) {
    using Place = Transformer::Place;
    const auto before = [&](const char* which, ValueId v) {
      return t_.place == Place::behind ? v : norm(v, name + which, t_.hidden);
    };
    const auto behind = [&](const char* which, ValueId v) {
      return t_.place == Place::both ? norm(v, name + which, t_.hidden) : v;
    };
    if (t_.place == Place::parallel || t_.place == Place::parallel_one) {
      const ValueId one = before("input_layernorm", x);
      const ValueId two = t_.place == Place::parallel ? before("post_attention_layernorm", x) : one;
      return tape_.add(tape_.add(x, attention(one, name + "self_attn.")),
                       feed_forward(two, i, name + "mlp."));
    }
    const bool add_norm = t_.place == Place::behind && t_.causal == false;  // norm of the sum
    const bool norm_add = t_.place == Place::behind && t_.causal;           // sum of the norm
    ValueId y = behind("post_attention_layernorm",
                       attention(before("input_layernorm", x), name + "self_attn."));
    if (norm_add) y = norm(y, name + "post_attention_layernorm", t_.hidden);
    y = tape_.add(x, y);
    if (add_norm) y = norm(y, name + "input_layernorm", t_.hidden);
    const char* second =
        t_.place == Place::both ? "pre_feedforward_layernorm" : "post_attention_layernorm";
    ValueId z =
        behind("post_feedforward_layernorm", feed_forward(before(second, y), i, name + "mlp."));
    if (norm_add) z = norm(z, name + "post_feedforward_layernorm", t_.hidden);
    z = tape_.add(y, z);
    return add_norm ? norm(z, name + "post_attention_layernorm", t_.hidden) : z;
  }

  // x [batch, heads, seq, n]: the first `rotary` dimensions turned.
  ValueId rotated(ValueId x) {
    if (t_.rotary == 0) return x;
    const int64_t n = tape_.shape(x).back();
    ValueId turned = x, rest;
    if (n > t_.rotary) {
      const auto parts = tape_.split(x, {t_.rotary, n - t_.rotary});
      turned = parts[0], rest = parts[1];
    }
    const auto halves = tape_.split(turned, {t_.rotary / 2, t_.rotary / 2});
    const ValueId across = tape_.mul(tape_.cat({tape_.neg(halves[1]), halves[0]}), sin_);
    turned = tape_.add(tape_.mul(turned, cos_), across);
    return rest.valid() ? tape_.cat({turned, rest}) : turned;
  }

  ValueId by_head(ValueId x, int64_t heads) {
    const int64_t seq = tape_.shape(x)[1], n = tape_.shape(x)[2] / heads;
    return tape_.transpose(tape_.view(x, {batch_, seq, heads, n}), 1, 2);
  }
  // Each head of keys or values for its group of queries.
  ValueId shared(ValueId x) {
    if (t_.kv_heads == t_.heads) return x;
    const Shape s = tape_.shape(x);
    const int64_t each = t_.heads / t_.kv_heads;
    x = tape_.view(x, {batch_, t_.kv_heads, 1, s[2], s[3]});
    x = tape_.expand(x, {batch_, t_.kv_heads, each, s[2], s[3]});
    return tape_.view(x, {batch_, t_.heads, s[2], s[3]});
  }

  // q, k [batch, heads, seq, head], v [batch, heads, seq, value]: [batch, seq, heads * value].
  ValueId attend(ValueId q, ValueId k, ValueId v, const std::string& name) {
    const int64_t h = t_.heads, n = tape_.shape(q)[3], value = tape_.shape(v)[3],
                  seq = tape_.shape(q)[2];
    q = tape_.view(q, {batch_ * h, seq, n});
    k = tape_.view(tape_.transpose(k, 2, 3), {batch_ * h, n, seq});
    v = tape_.view(v, {batch_ * h, seq, value});
    ValueId scores = tape_.scale(tape_.bmm(q, k), 1 / std::sqrt(static_cast<double>(n)));
    scores = tape_.view(scores, {batch_, h, seq, seq});
    if (t_.softcap > 0)
      scores =
          tape_.scale(tape_.activation("tanh", tape_.scale(scores, 1 / t_.softcap)), t_.softcap);
    if (mask_.valid()) scores = tape_.add(scores, mask_);
    if (t_.sinks) {
      const ValueId sinks = parameter(name + "sinks", {h});
      const ValueId one = tape_.expand(tape_.view(sinks, {1, h, 1, 1}), {batch_, h, seq, 1});
      scores = tape_.split(tape_.softmax(tape_.cat({scores, one})), {seq, 1})[0];
    } else {
      scores = tape_.softmax(scores);
    }
    ValueId y = tape_.bmm(tape_.view(scores, {batch_ * h, seq, seq}), v);
    y = tape_.transpose(tape_.view(y, {batch_, h, seq, value}), 1, 2);
    return tape_.view(y, {batch_, seq, h * value});
  }

  ValueId attention(ValueId x, const std::string& name) {
    if (t_.latent.kv_rank > 0) return latent_attention(x, name);
    const int64_t q_size = t_.heads * t_.head, kv_size = t_.kv_heads * t_.head;
    ValueId q, k, v;
    if (t_.fused_qkv) {
      const ValueId qkv =
          linear(x, name + "qkv_proj", t_.hidden, q_size + 2 * kv_size, t_.qkv_bias);
      const auto parts = tape_.split(qkv, {q_size, kv_size, kv_size});
      q = parts[0], k = parts[1], v = parts[2];
    } else {
      q = linear(x, name + "q_proj", t_.hidden, q_size, t_.qkv_bias);
      k = linear(x, name + "k_proj", t_.hidden, kv_size, t_.qkv_bias);
      v = linear(x, name + "v_proj", t_.hidden, kv_size, t_.qkv_bias);
    }
    if (t_.qk_norm == Transformer::QkNorm::whole) {
      q = norm(q, name + "q_norm", q_size);
      k = norm(k, name + "k_norm", kv_size);
    }
    q = by_head(q, t_.heads), k = by_head(k, t_.kv_heads), v = by_head(v, t_.kv_heads);
    if (t_.qk_norm == Transformer::QkNorm::head) {
      q = norm(q, name + "q_norm", t_.head);
      k = norm(k, name + "k_norm", t_.head);
    }
    const ValueId y = attend(rotated(q), shared(rotated(k)), shared(v), name);
    return linear(y, name + "o_proj", q_size, t_.hidden, t_.out_bias);
  }

  ValueId latent_attention(ValueId x, const std::string& name) {
    const Latent& l = t_.latent;
    const int64_t head = l.nope + l.rope, h = t_.heads;
    ValueId q;
    if (l.q_rank > 0) {
      q = norm(linear(x, name + "q_a_proj", t_.hidden, l.q_rank, t_.qkv_bias),
               name + "q_a_layernorm", l.q_rank);
      q = linear(q, name + "q_b_proj", l.q_rank, h * head, false);
    } else {
      q = linear(x, name + "q_proj", t_.hidden, h * head, false);
    }
    const auto q_parts = tape_.split(by_head(q, h), {l.nope, l.rope});
    const auto kv = tape_.split(
        linear(x, name + "kv_a_proj_with_mqa", t_.hidden, l.kv_rank + l.rope, t_.qkv_bias),
        {l.kv_rank, l.rope});
    ValueId wide = norm(kv[0], name + "kv_a_layernorm", l.kv_rank);
    wide = by_head(linear(wide, name + "kv_b_proj", l.kv_rank, h * (l.nope + l.value), false), h);
    const auto kv_parts = tape_.split(wide, {l.nope, l.value});
    // One head of turned keys for all.
    const ValueId one = rotated(by_head(kv[1], 1));
    const ValueId all = tape_.expand(one, {batch_, h, seq_, l.rope});
    q = tape_.cat({q_parts[0], rotated(q_parts[1])});
    const ValueId k = tape_.cat({kv_parts[0], all});
    const ValueId y = attend(q, k, kv_parts[1], name);
    return linear(y, name + "o_proj", h * l.value, t_.hidden, t_.out_bias);
  }

  ValueId dense(ValueId x, const std::string& name, int64_t ffn) {
    ValueId y;
    if (t_.gated && t_.fused_gate) {
      const auto parts = tape_.split(
          linear(x, name + "gate_up_proj", t_.hidden, 2 * ffn, t_.ffn_bias), {ffn, ffn});
      y = tape_.mul(tape_.activation(t_.act, parts[0]), parts[1]);
    } else if (t_.gated) {
      const ValueId gate = linear(x, name + "gate_proj", t_.hidden, ffn, t_.ffn_bias);
      const ValueId up = linear(x, name + "up_proj", t_.hidden, ffn, t_.ffn_bias);
      y = tape_.mul(tape_.activation(t_.act, gate), up);
    } else {
      y = linear(x, name + "up_proj", t_.hidden, ffn, t_.ffn_bias);
      const bool square = t_.act == "relu2";
      y = tape_.activation(square ? "relu" : t_.act, y);
      if (square) y = tape_.mul(y, y);
    }
    return linear(y, name + "down_proj", ffn, t_.hidden, t_.ffn_bias);
  }

  ValueId feed_forward(ValueId x, int64_t i, const std::string& name) {
    if (!t_.moe.at(i)) return dense(x, name, t_.ffn);
    ValueId y = experts(x, name);
    if (t_.moe.shared_ffn == 0) return y;
    ValueId shared = dense(x, name + "shared_expert.", t_.moe.shared_ffn);
    if (t_.moe.shared_gate) {
      const ValueId w = parameter(name + "shared_expert_gate.weight", {1, t_.hidden});
      shared = tape_.mul(shared, tape_.activation("sigmoid", tape_.linear(x, w)));
    }
    return tape_.add(y, shared);
  }

  ValueId experts(ValueId x, const std::string& name) {
    const Moe& m = t_.moe;
    const ValueId combine = route(x, name);
    const int64_t slots = tape_.shape(combine)[3], e = m.experts;
    const ValueId flat = tape_.view(combine, {batch_, seq_, e * slots});
    const TensorSpec spec{DType::f32, {batch_, seq_, e * slots}};
    const ValueId taken =
        tape_.fixed("aten::gt.Scalar", {flat, int64_t{0}}, {DType::b8, spec.shape});
    const ValueId dispatch = copied(taken, spec);
    ValueId in = tape_.bmm(tape_.transpose(dispatch, 1, 2), x);
    in = tape_.transpose(tape_.view(in, {batch_, e, slots, t_.hidden}), 0, 1);
    in = tape_.view(in, {e, batch_ * slots, t_.hidden});
    const auto product = [&](ValueId v, const char* weight, int64_t from, int64_t to) {
      ValueId y = tape_.bmm(v, parameter(name + "experts." + weight, {e, from, to}));
      if (m.bias)
        y = tape_.add(
            y, tape_.view(parameter(name + "experts." + weight + "_bias", {e, to}), {e, 1, to}));
      return y;
    };
    ValueId y;
    if (t_.gated)
      y = tape_.mul(tape_.activation(t_.act, product(in, "gate_proj", t_.hidden, m.ffn)),
                    product(in, "up_proj", t_.hidden, m.ffn));
    else
      y = tape_.activation(t_.act, product(in, "up_proj", t_.hidden, m.ffn));
    y = product(y, "down_proj", m.ffn, t_.hidden);
    y = tape_.transpose(tape_.view(y, {e, batch_, slots, t_.hidden}), 0, 1);
    return tape_.bmm(flat, tape_.view(y, {batch_, e * slots, t_.hidden}));
  }

  ValueId copied(ValueId v, const TensorSpec& spec) {
    return tape_.fixed("aten::_to_copy",
                       {v, DType::f32, std::monostate(), std::monostate(), std::monostate(), false,
                        std::monostate()},
                       spec);
  }

  // [batch, seq, expert, slot] weights of what each slot returns to each token (zoo/experts.h).
  ValueId route(ValueId x, const std::string& name) {
    const Moe& m = t_.moe;
    const auto slots = static_cast<int64_t>(
        std::ceil(kCapacity * static_cast<double>(m.top * seq_) / static_cast<double>(m.experts)));
    const ValueId logits =
        tape_.linear(x, parameter(name + "gate.weight", {m.experts, t_.hidden}),
                     m.router_bias ? parameter(name + "gate.bias", {m.experts}) : ValueId());
    const ValueId gates = m.sigmoid ? tape_.activation("sigmoid", logits) : tape_.softmax(logits);
    const Shape chosen = {batch_, seq_, m.top}, each = {batch_, seq_, m.experts},
                one = {batch_, seq_, 1}, few = {batch_, 1, m.experts}, slot = {batch_, seq_, slots};
    const auto f32 = [](const Shape& s) { return TensorSpec{DType::f32, s}; };
    const auto range = [&](int64_t n, DType type) {
      return tape_.fixed("aten::arange",
                         {n, type, std::monostate(), std::monostate(), std::monostate()},
                         TensorSpec{type, {n}});
    };
    const ValueId best = tape_.fixed("aten::topk", {gates, m.top, int64_t{-1}, true, true},
                                     std::vector<TensorSpec>{f32(chosen), {DType::i64, chosen}})[1];
    const ValueId numbers = range(m.experts, DType::i64), slot_numbers = range(slots, DType::f32);
    ValueId taken, total;
    std::vector<ValueId> weight, place;
    for (int64_t j = 0; j < m.top; ++j) {
      const ValueId jth = tape_.fixed("aten::select.int", {best, int64_t{2}, j},
                                      TensorSpec{DType::i64, {batch_, seq_}});
      const ValueId column = tape_.fixed("aten::view", {jth, one}, TensorSpec{DType::i64, one});
      const ValueId is =
          tape_.fixed("aten::eq.Tensor", {column, numbers}, TensorSpec{DType::b8, each});
      const ValueId mine = copied(is, f32(each));
      const ValueId sums =
          tape_.fixed("aten::cumsum", {mine, int64_t{1}, std::monostate()}, f32(each));
      ValueId position = tape_.fixed("aten::sub.Tensor", {sums, mine, int64_t{1}}, f32(each));
      if (taken.valid())
        position = tape_.fixed("aten::add.Tensor", {position, taken, int64_t{1}}, f32(each));
      const ValueId count =
          tape_.fixed("aten::sum.dim_IntList",
                      {mine, std::vector<int64_t>{1}, true, std::monostate()}, f32(few));
      taken = taken.valid() ? tape_.fixed("aten::add.Tensor", {taken, count, int64_t{1}}, f32(few))
                            : count;
      const ValueId room = tape_.fixed("aten::lt.Scalar", {position, static_cast<double>(slots)},
                                       TensorSpec{DType::b8, each});
      const ValueId kept = tape_.fixed("aten::mul.Tensor", {mine, room}, f32(each));
      const ValueId there = tape_.fixed("aten::mul.Tensor", {position, kept}, f32(each));
      const ValueId at =
          tape_.fixed("aten::sum.dim_IntList",
                      {there, std::vector<int64_t>{-1}, true, std::monostate()}, f32(one));
      const ValueId hit =
          tape_.fixed("aten::eq.Tensor", {at, slot_numbers}, TensorSpec{DType::b8, slot});
      const ValueId own = tape_.sum(tape_.mul(gates, mine), {2}, true);
      weight.push_back(own);
      total = total.valid() ? tape_.add(total, own) : own;
      place.push_back(tape_.mul(tape_.view(kept, {batch_, seq_, m.experts, 1}),
                                tape_.view(copied(hit, f32(slot)), {batch_, seq_, 1, slots})));
    }
    ValueId combine;
    for (int64_t j = 0; j < m.top; ++j) {
      ValueId w = weight[static_cast<size_t>(j)];
      if (m.top > 1) w = tape_.div(w, total);
      const ValueId term =
          tape_.mul(tape_.view(w, {batch_, seq_, 1, 1}), place[static_cast<size_t>(j)]);
      combine = combine.valid() ? tape_.add(combine, term) : term;
    }
    return combine;
  }

  Graph finish(ValueId x) {
    if (t_.image > 0) {
      // The class token: the first of the last dimension of the turned sequence.
      const int64_t n = tape_.shape(x)[1];
      const ValueId first = tape_.split(tape_.transpose(x, 1, 2), {1, n - 1})[0];
      x = tape_.view(first, {batch_, t_.hidden});
      return tape_.finish(
          tape_.cross_entropy(linear(x, "classifier", t_.hidden, t_.vocab, true), targets_));
    }
    const int64_t width = t_.embedding > 0 ? t_.embedding : t_.hidden;
    if (t_.head_transform) {
      x = linear(x, "head.dense", t_.hidden, width, true);
      x = norm(tape_.activation(t_.act, x), "head.norm", width);
    }
    const ValueId w = t_.tied ? table_ : parameter("lm_head.weight", {t_.vocab, width});
    const ValueId b = t_.head_bias ? parameter("lm_head.bias", {t_.vocab}) : ValueId();
    if (t_.spare_bias) parameter("lm_head.spare_bias", {t_.vocab});
    ValueId logits = tape_.linear(tape_.view(x, {batch_ * seq_, width}), w, b);
    if (t_.head_softcap > 0)
      logits = tape_.scale(tape_.activation("tanh", tape_.scale(logits, 1 / t_.head_softcap)),
                           t_.head_softcap);
    return tape_.finish(tape_.cross_entropy(logits, tape_.view(targets_, {batch_ * seq_})));
  }

  const Transformer& t_;
  const int64_t batch_, seq_;
  Tape tape_;
  ValueId mask_, cos_, sin_, table_, targets_;
  std::vector<std::pair<std::string, ValueId>> named_;
};

}  // namespace

Graph training_step(const Transformer& t, int64_t batch) { return Builder(t, batch).run(); }

}  // namespace motley::readers
