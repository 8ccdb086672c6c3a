#include "reference/spmd_gpt.h"

#include <initializer_list>
#include <limits>
#include <map>
#include <string>

namespace motley::solver {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
// Forms. A weight matrix [in, out] has S0 (rows) and S1 (columns); a vector has S0. Attention
// scores [batch, heads, query, key] use S2 for heads and S1 for the query.
enum Form : uint8_t { R, P, S0, S1, S2 };

struct Rule {
  std::vector<uint8_t> in, out;
};

class ProblemBuilder {
 public:
  explicit ProblemBuilder(const GptShape& shape) : shape_(shape) {
    problem_.types = static_cast<int>(shape.flops.size());
    for (size_t j = 0; j < shape.flops.size(); ++j) {
      total_ += shape.flops[j] * shape.devices[j];
      count_ += shape.devices[j];
    }
  }

  Problem take() { return std::move(problem_); }

  int value(double elements, int forms) {
    problem_.value_table.push_back(forms_of(elements, forms));
    return static_cast<int>(problem_.value_table.size()) - 1;
  }

  // A node whose options follow `rules`; replicated (all R) rules cost `flops` on every device,
  // the others a share.
  void node(const std::string& op, double flops, double bytes, const std::vector<Rule>& rules,
            const std::vector<int>& inputs, const std::vector<int>& outputs) {
    std::string key = op + "/" + std::to_string(flops) + "/" + std::to_string(bytes);
    auto [it, fresh] = tables_.try_emplace(key, static_cast<int>(problem_.option_tables.size()));
    if (fresh) {
      OptionTable table;
      for (const Rule& rule : rules) table.options.push_back(option(rule, flops, bytes, 0));
      problem_.option_tables.push_back(std::move(table));
    }
    problem_.nodes.push_back({it->second, inputs, outputs, backward_});
  }

  // A parameter: returns its value, and remembers its token for update().
  int parameter(double elements, int forms) {
    const int weight = value(elements, forms), token = problem_token(forms);
    const std::string key = "parameter/" + std::to_string(elements) + "/" + std::to_string(forms);
    auto [it, fresh] = tables_.try_emplace(key, static_cast<int>(problem_.option_tables.size()));
    if (fresh) {
      OptionTable table;
      for (uint8_t form = 0; form < forms; ++form) {
        if (form == P) continue;
        table.options.push_back(option({{}, {form, form}}, 0, 0, 16 * elements));
      }
      problem_.option_tables.push_back(std::move(table));
    }
    problem_.nodes.push_back({it->second, {}, {weight, token}, false});
    token_[weight] = token;
    elements_[weight] = elements;
    matrix_[weight] = forms;
    return weight;
  }

  void update(int weight, int gradient) {
    std::vector<Rule> rules;
    for (uint8_t form = 0; form < matrix_[weight]; ++form) {
      if (form != P) rules.push_back({{form, form}, {}});
    }
    node("update" + std::to_string(matrix_[weight]), 10 * elements_[weight], 20 * elements_[weight],
         rules, {token_[weight], gradient}, {});
  }

  int gradient_of(int weight) { return value(elements_[weight], matrix_[weight]); }
  void begin_backward() { backward_ = true; }

 private:
  static bool shared(const Rule& rule) {
    for (uint8_t form : rule.in) {
      if (form >= S0) return true;
    }
    for (uint8_t form : rule.out) {
      if (form >= S0) return true;
    }
    return false;
  }

  Option option(const Rule& rule, double flops, double bytes, double stored) const {
    Option option{rule.in, rule.out, 0, {}, {}};
    for (double speed : shape_.flops) {
      const double share = shared(rule) ? speed / total_ : 1;
      option.compute.push_back(share * (flops / speed + bytes / (speed / 100)));
      option.memory.push_back(share * stored);
    }
    return option;
  }

  int forms_of(double elements, int forms) {
    const auto [it, fresh] =
        form_tables_.try_emplace({elements, forms}, static_cast<int>(problem_.form_tables.size()));
    if (!fresh) return it->second;
    const double move = 2 * elements / shape_.bandwidth * (count_ - 1) / count_;
    FormTable table{forms, std::vector<double>(forms * forms, kInf)};
    const auto set = [&](int a, int b, double s) { table.convert[a * forms + b] = s; };
    for (int f = 0; f < forms; ++f) {
      set(f, f, 0);
      if (f < S0) continue;
      set(R, f, 0);
      set(P, f, shape_.latency + move);
      set(f, R, shape_.latency + 1.1 * move);
      for (int g = S0; g < forms; ++g) {
        if (g != f) set(f, g, shape_.latency + 1.2 * move / count_);
      }
    }
    set(P, R, 1.5 * shape_.latency + 2 * move);
    problem_.form_tables.push_back(std::move(table));
    return it->second;
  }

  int problem_token(int forms) {
    const auto [it, fresh] =
        form_tables_.try_emplace({-1, forms}, static_cast<int>(problem_.form_tables.size()));
    if (fresh) {
      FormTable table{forms, std::vector<double>(forms * forms, kInf)};
      for (int f = 0; f < forms; ++f) table.convert[f * forms + f] = 0;
      problem_.form_tables.push_back(std::move(table));
    }
    problem_.value_table.push_back(it->second);
    return static_cast<int>(problem_.value_table.size()) - 1;
  }

  const GptShape& shape_;
  Problem problem_;
  double total_ = 0, count_ = 0;
  bool backward_ = false;
  std::map<std::string, int> tables_;
  std::map<std::pair<double, int>, int> form_tables_;
  std::map<int, int> token_, matrix_;
  std::map<int, double> elements_;
};

const std::vector<Rule> kLinear = {{{S0, R, R}, {S0}}, {{S1, R, R}, {S1}}, {{R, S1, S0}, {S2}},
                                   {{S2, S0, P}, {P}}, {{R, S0, P}, {P}},  {{R, R, R}, {R}}};
const std::vector<Rule> kLinearInput = {{{S0, R}, {S0}}, {{S1, R}, {S1}}, {{S2, S1}, {P}},
                                        {{R, S0}, {S2}}, {{P, R}, {P}},   {{R, R}, {R}}};
const std::vector<Rule> kLinearWeight = {{{S0, S0}, {P}}, {{S1, S1}, {P}}, {{S2, R}, {S0}},
                                         {{R, S2}, {S1}}, {{R, P}, {P}},   {{R, R}, {R}}};
const std::vector<Rule> kBias = {{{S0}, {P}}, {{S1}, {P}}, {{S2}, {S0}}, {{P}, {P}}, {{R}, {R}}};
const std::vector<Rule> kAdd = {
    {{S0, S0}, {S0}}, {{S1, S1}, {S1}}, {{S2, S2}, {S2}}, {{P, P}, {P}}, {{R, R}, {R}}};
const std::vector<Rule> kUnary = {{{S0}, {S0}}, {{S1}, {S1}}, {{S2}, {S2}}, {{R}, {R}}};
const std::vector<Rule> kBinary = {
    {{S0, S0}, {S0}}, {{S1, S1}, {S1}}, {{S2, S2}, {S2}}, {{R, R}, {R}}};
// q k^T; scores k and scores v; scores^T q and scores^T d.
const std::vector<Rule> kScores = {
    {{S0, S0}, {S0}}, {{S2, S2}, {S2}}, {{S1, R}, {S1}}, {{R, R}, {R}}};
const std::vector<Rule> kMix = kScores;
const std::vector<Rule> kMixT = {
    {{S0, S0}, {S0}}, {{S2, S2}, {S2}}, {{S1, S1}, {P}}, {{R, R}, {R}}};
const std::vector<Rule> kMask = {{{S0, R}, {S0}}, {{S2, R}, {S2}}, {{S1, S0}, {S1}}, {{R, R}, {R}}};
const std::vector<Rule> kNorm = {
    {{S0, R, R}, {S0, S0}}, {{S1, R, R}, {S1, S1}}, {{R, R, R}, {R, R}}};
const std::vector<Rule> kNormBackward = {
    {{S0, S0, S0, R}, {S0, P, P}}, {{S1, S1, S1, R}, {S1, P, P}}, {{R, R, R, R}, {R, R, R}}};

}  // namespace

Problem gpt_problem(const GptShape& shape) {
  ProblemBuilder b(shape);
  const double tokens = shape.batch * shape.sequence, h = shape.hidden, f = 4 * h;
  const double act = tokens * h, wide = tokens * f;
  const double scores = shape.batch * shape.heads * shape.sequence * shape.sequence;
  const int kAct = 5, kMatrix = 4, kVector = 3, kIds = 4;

  struct Linear {
    int x, w, b;
    double in, out;
  };
  struct Norm {
    int x, stats, w, b;
  };
  const auto norm = [&](int x, Norm* saved) {
    const int w = b.parameter(h, kVector), bias = b.parameter(h, kVector);
    const int y = b.value(act, kAct), stats = b.value(2 * tokens, kIds);
    b.node("norm", 8 * act, 4 * act, kNorm, {x, w, bias}, {y, stats});
    *saved = {x, stats, w, bias};
    return y;
  };
  const auto linear = [&](int x, double in, double out, Linear* saved) {
    const int w = b.parameter(in * out, kMatrix), bias = b.parameter(out, kVector);
    const int y = b.value(tokens * out, kAct);
    b.node("linear", 2 * tokens * in * out, 2 * (in * out + tokens * (in + out)), kLinear,
           {x, w, bias}, {y});
    *saved = {x, w, bias, in, out};
    return y;
  };
  const auto norm_backward = [&](const Norm& saved, int dy) {
    const int dx = b.value(act, kAct), dw = b.gradient_of(saved.w), db = b.gradient_of(saved.b);
    b.node("norm_backward", 16 * act, 8 * act, kNormBackward, {dy, saved.x, saved.stats, saved.w},
           {dx, dw, db});
    b.update(saved.w, dw);
    b.update(saved.b, db);
    return dx;
  };
  const auto linear_backward = [&](const Linear& saved, int dy) {
    const double flops = 2 * tokens * saved.in * saved.out;
    const double bytes = 2 * (saved.in * saved.out + tokens * (saved.in + saved.out));
    const int dx = b.value(tokens * saved.in, kAct);
    const int dw = b.gradient_of(saved.w), db = b.gradient_of(saved.b);
    b.node("linear_input", flops, bytes, kLinearInput, {dy, saved.w}, {dx});
    b.node("linear_weight", flops, bytes, kLinearWeight, {saved.x, dy}, {dw});
    b.node("linear_bias", tokens * saved.out, 2 * tokens * saved.out, kBias, {dy}, {db});
    b.update(saved.w, dw);
    b.update(saved.b, db);
    return dx;
  };
  const auto unary = [&](const char* op, double elements, const std::vector<Rule>& rules,
                         const std::vector<int>& in) {
    const int y = b.value(elements, kAct);
    b.node(op, 4 * elements, 4 * elements, rules, in, {y});
    return y;
  };
  const auto attend = [&](const char* op, double elements, const std::vector<Rule>& rules, int x,
                          int y) {
    const int z = b.value(elements, kAct);
    b.node(op, 2 * scores * h / shape.heads, 2 * (scores + 2 * act), rules, {x, y}, {z});
    return z;
  };
  const std::vector<Rule> source = {{{}, {R}}, {{}, {S0}}, {{}, {S1}}};

  const int ids = b.value(tokens, kIds), mask = b.value(shape.sequence * shape.sequence, kIds);
  const int targets = b.value(tokens, kIds);
  b.node("ids", 0, 0, source, {}, {ids});
  b.node("mask", 1e3, shape.sequence * shape.sequence, source, {}, {mask});
  const int table = b.parameter(shape.vocabulary * h, kMatrix);
  int x = b.value(act, kAct);
  const std::vector<Rule> embed = {
      {{S0, R}, {S0}}, {{S1, R}, {S1}}, {{R, S1}, {S2}}, {{R, S0}, {P}}, {{R, R}, {R}}};
  b.node("embed", act, 6 * act, embed, {ids, table}, {x});

  struct Layer {
    Norm norm1, norm2;
    Linear q, k, v, out, up, down;
    int query, key, val, probability, hidden;
  };
  std::vector<Layer> layers(shape.layers);
  for (Layer& l : layers) {
    const int y = norm(x, &l.norm1);
    l.query = linear(y, h, h, &l.q);
    l.key = linear(y, h, h, &l.k);
    l.val = linear(y, h, h, &l.v);
    const int raw = attend("scores", scores, kScores, l.query, l.key);
    const int masked = b.value(scores, kAct);
    b.node("mask_add", scores, 4 * scores, kMask, {raw, mask}, {masked});
    l.probability =
        unary("softmax", scores, {kUnary[0], kUnary[1], kUnary[2], kUnary[3]}, {masked});
    const int context = attend("mix", act, kMix, l.probability, l.val);
    const int projected = linear(context, h, h, &l.out);
    x = unary("add", act, kAdd, {x, projected});
    const int z = norm(x, &l.norm2);
    l.hidden = linear(z, h, f, &l.up);
    const int active = unary("gelu", wide, kUnary, {l.hidden});
    const int down = linear(active, f, h, &l.down);
    x = unary("add", act, kAdd, {x, down});
  }
  Norm last;
  const int y = norm(x, &last);
  const double v = shape.vocabulary;
  const int head = shape.tied ? table : b.parameter(v * h, kMatrix);
  const int logits = b.value(tokens * v, kAct);
  const std::vector<Rule> project = {
      {{S0, R}, {S0}}, {{S1, R}, {S1}}, {{R, S0}, {S2}}, {{S2, S1}, {P}}, {{R, R}, {R}}};
  b.node("logits", 2 * act * v, 2 * tokens * v, project, {y, head}, {logits});
  b.node("targets", 0, 0, source, {}, {targets});
  const int loss = b.value(1, 2);
  const std::vector<Rule> entropy = {{{S0, S0}, {P}}, {{S1, S1}, {P}}, {{R, R}, {R}}};
  b.node("loss", 4 * tokens * v, 4 * tokens * v, entropy, {logits, targets}, {loss});

  b.begin_backward();
  const int dlogits = b.value(tokens * v, kAct);
  b.node("loss_backward", 4 * tokens * v, 4 * tokens * v,
         {{{S0, S0}, {S0}}, {{S1, S1}, {S1}}, {{R, R}, {R}}}, {logits, targets}, {dlogits});
  const int dy = b.value(act, kAct);
  const std::vector<Rule> project_input = {
      {{S0, R}, {S0}}, {{S1, R}, {S1}}, {{S2, S0}, {P}}, {{R, S1}, {S2}}, {{R, R}, {R}}};
  b.node("logits_input", 2 * act * v, 2 * tokens * v, project_input, {dlogits, head}, {dy});
  const std::vector<Rule> project_weight = {
      {{S0, S0}, {P}}, {{S1, S1}, {P}}, {{S2, R}, {S0}}, {{R, S2}, {S1}}, {{R, R}, {R}}};
  int dhead = b.gradient_of(head);
  b.node("logits_weight", 2 * act * v, 2 * tokens * v, project_weight, {dlogits, y}, {dhead});
  if (!shape.tied) b.update(head, dhead);
  int dx = norm_backward(last, dy);
  for (int i = shape.layers - 1; i >= 0; --i) {
    const Layer& l = layers[i];
    const int dactive = linear_backward(l.down, dx);
    const int dhidden = unary("gelu_backward", wide, kBinary, {dactive, l.hidden});
    const int dz = norm_backward(l.norm2, linear_backward(l.up, dhidden));
    dx = unary("add", act, kAdd, {dx, dz});
    const int dcontext = linear_backward(l.out, dx);
    const int dp = attend("scores", scores, kScores, dcontext, l.val);
    const int dval = attend("mix_t", act, kMixT, l.probability, dcontext);
    const int draw = unary("softmax_backward", scores, kBinary, {dp, l.probability});
    const int dquery = attend("mix", act, kMix, draw, l.key);
    const int dkey = attend("mix_t", act, kMixT, draw, l.query);
    int dnorm = unary("add", act, kAdd, {linear_backward(l.q, dquery), linear_backward(l.k, dkey)});
    dnorm = unary("add", act, kAdd, {dnorm, linear_backward(l.v, dval)});
    dx = unary("add", act, kAdd, {dx, norm_backward(l.norm1, dnorm)});
  }
  int dtable = b.gradient_of(table);
  const std::vector<Rule> embed_weight = {
      {{S0, S0}, {P}}, {{S1, S1}, {P}}, {{R, S2}, {S1}}, {{R, R}, {R}}, {{R, P}, {P}}};
  b.node("embed_weight", act, 6 * act, embed_weight, {ids, dx}, {dtable});
  if (shape.tied) {
    const int sum = b.gradient_of(table);
    const std::vector<Rule> add = {
        {{R, R}, {R}}, {{P, P}, {P}}, {{S0, S0}, {S0}}, {{S1, S1}, {S1}}};
    b.node("add_matrix", v * h, 12 * v * h, add, {dtable, dhead}, {sum});
    dtable = sum;
  }
  b.update(table, dtable);
  return b.take();
}

}  // namespace motley::solver
