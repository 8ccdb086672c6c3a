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

const std::vector<Rule> kSource = {{{}, {R}}, {{}, {S0}}, {{}, {S1}}};

constexpr int kAct = 5, kMatrix = 4, kVector = 3, kIds = 4;  // how many forms

// The nodes of a step in their order; dx is the gradient of x.
class Gpt {
 public:
  explicit Gpt(const GptShape& shape)
      : shape_(shape),
        b_(shape),
        tokens_(shape.batch * shape.sequence),
        h_(shape.hidden),
        f_(4 * h_),
        act_(tokens_ * h_),
        wide_(tokens_ * f_),
        scores_(shape.batch * shape.heads * shape.sequence * shape.sequence) {}

  Problem step() {
    int x = embed();
    std::vector<Layer> layers(shape_.layers);
    for (Layer& layer : layers) x = forward(x, &layer);
    int dhead = 0;
    int dx = head(x, &dhead);
    for (int i = shape_.layers - 1; i >= 0; --i) dx = backward(layers[i], dx);
    embed_backward(dx, dhead);
    return b_.take();
  }

 private:
  struct Linear {
    int x, w, b;
    double in, out;
  };
  struct Norm {
    int x, stats, w, b;
  };
  struct Layer {
    Norm norm1, norm2;
    Linear q, k, v, out, up, down;
    int query, key, val, probability, hidden;
  };

  int norm(int x, Norm* saved) {
    const int w = b_.parameter(h_, kVector), bias = b_.parameter(h_, kVector);
    const int y = b_.value(act_, kAct), stats = b_.value(2 * tokens_, kIds);
    b_.node("norm", 8 * act_, 4 * act_, kNorm, {x, w, bias}, {y, stats});
    *saved = {x, stats, w, bias};
    return y;
  }

  int linear(int x, double in, double out, Linear* saved) {
    const int w = b_.parameter(in * out, kMatrix), bias = b_.parameter(out, kVector);
    const int y = b_.value(tokens_ * out, kAct);
    b_.node("linear", 2 * tokens_ * in * out, 2 * (in * out + tokens_ * (in + out)), kLinear,
            {x, w, bias}, {y});
    *saved = {x, w, bias, in, out};
    return y;
  }

  int norm_backward(const Norm& saved, int dy) {
    const int dx = b_.value(act_, kAct), dw = b_.gradient_of(saved.w), db = b_.gradient_of(saved.b);
    b_.node("norm_backward", 16 * act_, 8 * act_, kNormBackward,
            {dy, saved.x, saved.stats, saved.w}, {dx, dw, db});
    b_.update(saved.w, dw);
    b_.update(saved.b, db);
    return dx;
  }

  int linear_backward(const Linear& saved, int dy) {
    const double flops = 2 * tokens_ * saved.in * saved.out;
    const double bytes = 2 * (saved.in * saved.out + tokens_ * (saved.in + saved.out));
    const int dx = b_.value(tokens_ * saved.in, kAct);
    const int dw = b_.gradient_of(saved.w), db = b_.gradient_of(saved.b);
    b_.node("linear_input", flops, bytes, kLinearInput, {dy, saved.w}, {dx});
    b_.node("linear_weight", flops, bytes, kLinearWeight, {saved.x, dy}, {dw});
    b_.node("linear_bias", tokens_ * saved.out, 2 * tokens_ * saved.out, kBias, {dy}, {db});
    b_.update(saved.w, dw);
    b_.update(saved.b, db);
    return dx;
  }

  int unary(const char* op, double elements, const std::vector<Rule>& rules,
            const std::vector<int>& in) {
    const int y = b_.value(elements, kAct);
    b_.node(op, 4 * elements, 4 * elements, rules, in, {y});
    return y;
  }

  int attend(const char* op, double elements, const std::vector<Rule>& rules, int x, int y) {
    const int z = b_.value(elements, kAct);
    b_.node(op, 2 * scores_ * h_ / shape_.heads, 2 * (scores_ + 2 * act_), rules, {x, y}, {z});
    return z;
  }

  int embed() {
    ids_ = b_.value(tokens_, kIds);
    mask_ = b_.value(shape_.sequence * shape_.sequence, kIds);
    targets_ = b_.value(tokens_, kIds);
    b_.node("ids", 0, 0, kSource, {}, {ids_});
    b_.node("mask", 1e3, shape_.sequence * shape_.sequence, kSource, {}, {mask_});
    table_ = b_.parameter(shape_.vocabulary * h_, kMatrix);
    const int x = b_.value(act_, kAct);
    const std::vector<Rule> rules = {
        {{S0, R}, {S0}}, {{S1, R}, {S1}}, {{R, S1}, {S2}}, {{R, S0}, {P}}, {{R, R}, {R}}};
    b_.node("embed", act_, 6 * act_, rules, {ids_, table_}, {x});
    return x;
  }

  int forward(int x, Layer* l) {
    const int y = norm(x, &l->norm1);
    l->query = linear(y, h_, h_, &l->q);
    l->key = linear(y, h_, h_, &l->k);
    l->val = linear(y, h_, h_, &l->v);
    const int raw = attend("scores", scores_, kScores, l->query, l->key);
    const int masked = b_.value(scores_, kAct);
    b_.node("mask_add", scores_, 4 * scores_, kMask, {raw, mask_}, {masked});
    l->probability =
        unary("softmax", scores_, {kUnary[0], kUnary[1], kUnary[2], kUnary[3]}, {masked});
    const int context = attend("mix", act_, kMix, l->probability, l->val);
    const int projected = linear(context, h_, h_, &l->out);
    x = unary("add", act_, kAdd, {x, projected});
    const int z = norm(x, &l->norm2);
    l->hidden = linear(z, h_, f_, &l->up);
    const int active = unary("gelu", wide_, kUnary, {l->hidden});
    const int down = linear(active, f_, h_, &l->down);
    return unary("add", act_, kAdd, {x, down});
  }

  // Behind the layers, to the loss and back.
  int head(int x, int* dhead) {
    Norm last;
    const int y = norm(x, &last);
    const double v = shape_.vocabulary;
    const int weight = shape_.tied ? table_ : b_.parameter(v * h_, kMatrix);
    const int logits = b_.value(tokens_ * v, kAct);
    const std::vector<Rule> project = {
        {{S0, R}, {S0}}, {{S1, R}, {S1}}, {{R, S0}, {S2}}, {{S2, S1}, {P}}, {{R, R}, {R}}};
    b_.node("logits", 2 * act_ * v, 2 * tokens_ * v, project, {y, weight}, {logits});
    b_.node("targets", 0, 0, kSource, {}, {targets_});
    const int loss = b_.value(1, 2);
    const std::vector<Rule> entropy = {{{S0, S0}, {P}}, {{S1, S1}, {P}}, {{R, R}, {R}}};
    b_.node("loss", 4 * tokens_ * v, 4 * tokens_ * v, entropy, {logits, targets_}, {loss});

    b_.begin_backward();
    const int dlogits = b_.value(tokens_ * v, kAct);
    b_.node("loss_backward", 4 * tokens_ * v, 4 * tokens_ * v,
            {{{S0, S0}, {S0}}, {{S1, S1}, {S1}}, {{R, R}, {R}}}, {logits, targets_}, {dlogits});
    const int dy = b_.value(act_, kAct);
    const std::vector<Rule> project_input = {
        {{S0, R}, {S0}}, {{S1, R}, {S1}}, {{S2, S0}, {P}}, {{R, S1}, {S2}}, {{R, R}, {R}}};
    b_.node("logits_input", 2 * act_ * v, 2 * tokens_ * v, project_input, {dlogits, weight}, {dy});
    const std::vector<Rule> project_weight = {
        {{S0, S0}, {P}}, {{S1, S1}, {P}}, {{S2, R}, {S0}}, {{R, S2}, {S1}}, {{R, R}, {R}}};
    *dhead = b_.gradient_of(weight);
    b_.node("logits_weight", 2 * act_ * v, 2 * tokens_ * v, project_weight, {dlogits, y}, {*dhead});
    if (!shape_.tied) b_.update(weight, *dhead);
    return norm_backward(last, dy);
  }

  int backward(const Layer& l, int dx) {
    const int dactive = linear_backward(l.down, dx);
    const int dhidden = unary("gelu_backward", wide_, kBinary, {dactive, l.hidden});
    const int dz = norm_backward(l.norm2, linear_backward(l.up, dhidden));
    dx = unary("add", act_, kAdd, {dx, dz});
    const int dcontext = linear_backward(l.out, dx);
    const int dp = attend("scores", scores_, kScores, dcontext, l.val);
    const int dval = attend("mix_t", act_, kMixT, l.probability, dcontext);
    const int draw = unary("softmax_backward", scores_, kBinary, {dp, l.probability});
    const int dquery = attend("mix", act_, kMix, draw, l.key);
    const int dkey = attend("mix_t", act_, kMixT, draw, l.query);
    int dnorm =
        unary("add", act_, kAdd, {linear_backward(l.q, dquery), linear_backward(l.k, dkey)});
    dnorm = unary("add", act_, kAdd, {dnorm, linear_backward(l.v, dval)});
    return unary("add", act_, kAdd, {dx, norm_backward(l.norm1, dnorm)});
  }

  void embed_backward(int dx, int dhead) {
    int dtable = b_.gradient_of(table_);
    const std::vector<Rule> embed_weight = {
        {{S0, S0}, {P}}, {{S1, S1}, {P}}, {{R, S2}, {S1}}, {{R, R}, {R}}, {{R, P}, {P}}};
    b_.node("embed_weight", act_, 6 * act_, embed_weight, {ids_, dx}, {dtable});
    if (shape_.tied) {
      const double v = shape_.vocabulary;
      const int sum = b_.gradient_of(table_);
      const std::vector<Rule> add = {
          {{R, R}, {R}}, {{P, P}, {P}}, {{S0, S0}, {S0}}, {{S1, S1}, {S1}}};
      b_.node("add_matrix", v * h_, 12 * v * h_, add, {dtable, dhead}, {sum});
      dtable = sum;
    }
    b_.update(table_, dtable);
  }

  const GptShape& shape_;
  ProblemBuilder b_;
  const double tokens_, h_, f_, act_, wide_, scores_;
  int ids_ = 0, mask_ = 0, targets_ = 0, table_ = 0;
};

}  // namespace

Problem gpt_problem(const GptShape& shape) { return Gpt(shape).step(); }

}  // namespace motley::solver
