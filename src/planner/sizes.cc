#include "planner/sizes.h"

#include <algorithm>

#include "core/error.h"
#include "graph/op.h"
#include "graph/owner.h"
#include "spmd/recompute.h"

namespace motley {

namespace {

class Reader {
 public:
  explicit Reader(const Graph& graph)
      : graph_(graph),
        owner_(owners(graph)),
        block_(spmd::blocks_of(graph)),
        own_(made_by_readers(graph)) {}

  std::optional<Sizes> read(std::string* reason) {
    for (size_t n = 0; n < graph_.nodes.size(); ++n)
      if (!is_source(graph_.nodes[n]) && graph_.nodes[n].phase == Phase::forward) look_at(n);
    if (sizes_.hidden == 0)
      *reason = "it has no token embedding";
    else if (sizes_.heads == 0)
      *reason = "it has no attention";
    else if (sizes_.layers == 0)
      *reason = "its parameters' names number no layers";
    else if (!find_block())
      *reason = "its first layer is not attention and a feed-forward half";
    else
      return sizes_;
    return std::nullopt;
  }

 private:
  const Shape& shape_of(int parameter) const {
    return graph_.spec(graph_.parameters[parameter].value).shape;
  }

  void look_at(size_t n) {
    const Node& node = graph_.nodes[n];
    const int p = owner_[n], b = block_[n];
    if (b >= 0) sizes_.layers = std::max<int64_t>(sizes_.layers, b + 1);
    sizes_.routed.resize(sizes_.layers);
    if (node.op == "aten::embedding" && embedding_ < 0 && p >= 0) {
      embedding_ = p;
      sizes_.vocab = shape_of(p)[0];
      sizes_.hidden = shape_of(p)[1];
      const Shape& out = graph_.spec(node.outputs[0]).shape;
      if (out.size() >= 2) sizes_.seq = out[out.size() - 2];
    } else if (b < 0 && sizes_.layers == 0 && embedding_ >= 0 && p >= 0 && p != embedding_ &&
               shape_of(p).size() == 2 && shape_of(p)[1] == sizes_.hidden) {
      sizes_.positions = shape_of(p)[0];
    }
    const bool fused = node.op.str().find("scaled_dot_product") != std::string::npos;
    if (fused || node.op == "aten::_softmax") {
      const ValueList inputs = graph_.inputs_of(node);
      const Shape& s = graph_.spec(fused ? inputs[0] : node.outputs[0]).shape;
      if (s.size() == 4) {
        sizes_.heads = s[1];
        if (sizes_.seq == 0) sizes_.seq = s[2];
        attended_ = true;
        for (const Arg& arg : node.args)
          if (const bool* flag = std::get_if<bool>(&arg); fused && flag) sizes_.causal |= *flag;
      }
    }
    if (node.op == "aten::triu" || node.op == "aten::tril") sizes_.causal = true;
    if (node.op == "aten::topk")
      if (const int64_t* k = std::get_if<int64_t>(&node.args[1])) sizes_.top = *k;
    if (node.op.str().find("dropout") != std::string::npos && node.args.size() > 1)
      if (const double* rate = std::get_if<double>(&node.args[1])) sizes_.dropout = *rate;
    for (const char* name : {"gelu", "relu", "silu"})
      if (node.op == std::string("aten::") + name) sizes_.activation = name;
    if (p >= 0) read_parameter(node, p, b);
  }

  void read_parameter(const Node& node, int p, int b) {
    const OpDef* op = find_op(node.op);
    const bool product = op && op->flops && op->flops(graph_, node) > 0;
    if (b < 0) {
      sizes_.tied |= product && sizes_.layers > 0 && p == embedding_;
      return;
    }
    // What follows the experts of a layer may be of the next one.
    const ValueList inputs = graph_.inputs_of(node);
    const bool reads = std::any_of(inputs.begin(), inputs.end(), [&](ValueId v) {
      const size_t producer = graph_.value(v).producer.index;
      return own_[producer] && owner_[producer] == p;
    });
    if (shape_of(p).size() == 3 && product && reads) {
      sizes_.routed[b] = true;
      sizes_.experts = shape_of(p)[0];
      if (std::find(expert_matrices_.begin(), expert_matrices_.end(), p) ==
              expert_matrices_.end() &&
          (expert_block_ < 0 || expert_block_ == b)) {
        expert_block_ = b;
        expert_matrices_.push_back(p);
      }
    }
    if (b > 0) return;
    if (node.op == "aten::native_layer_norm") layer_norm_ = true;
    if (shape_of(p).size() == 1 && std::find(vectors_.begin(), vectors_.end(), p) == vectors_.end())
      vectors_.push_back(p);
    if (shape_of(p).size() != 2 || !product) return;
    auto& list = attended_ ? after_ : before_;
    for (const auto& known : {before_, after_})
      if (std::find(known.begin(), known.end(), p) != known.end()) return;
    list.push_back(p);
  }

  // Rows of a matrix whose other side is the hidden size.
  int64_t width(int p) const {
    return graph_.spec(graph_.parameters[p].value).numel() / sizes_.hidden;
  }

  bool find_block() {
    Sizes& s = sizes_;
    if (after_.empty() || s.hidden % s.heads != 0) return false;
    const int64_t head = s.hidden / s.heads;
    if (before_.size() == 1)
      s.kv_heads = (width(before_[0]) - s.hidden) / 2 / head;
    else if (before_.size() == 3)
      s.kv_heads = width(before_[1]) / head;
    else
      return false;
    if (s.kv_heads < 1 || s.heads % s.kv_heads != 0) return false;
    // Behind the projection of attention: the feed-forward half, or the router.
    const size_t dense = s.routed[0] ? 0 : after_.size() - 1;
    if (dense == 2 || dense == 3) {
      s.ffn = width(after_[1]);
      s.gated = dense == 3;
    } else if (s.routed[0] && expert_matrices_.size() >= 2) {
      s.gated = expert_matrices_.size() == 3;
    } else {
      return false;
    }
    if (!expert_matrices_.empty()) {
      const int64_t ffn = width(expert_matrices_[0]) / s.experts;
      if (s.ffn != 0 && s.ffn != ffn) return false;
      s.ffn = ffn;
    }
    s.rms_norm = !layer_norm_;
    s.bias = vectors_.size() > (layer_norm_ ? 4u : 2u);
    return true;
  }

  const Graph& graph_;
  const std::vector<int> owner_, block_;
  const std::vector<bool> own_;
  Sizes sizes_;
  int embedding_ = -1, expert_block_ = -1;
  bool attended_ = false, layer_norm_ = false;
  std::vector<int> before_, after_, vectors_, expert_matrices_;  // parameters, of the first layer
};

}  // namespace

std::optional<Sizes> sizes_of(const Graph& graph, std::string* reason) {
  return Reader(graph).read(reason);
}

std::optional<Sizes> sizes_of(const Graph& graph) {
  std::string reason;
  return sizes_of(graph, &reason);
}

Json to_json(const Sizes& s) {
  Json j = {{"layers", s.layers},   {"hidden", s.hidden},
            {"heads", s.heads},     {"kv_heads", s.kv_heads},
            {"ffn", s.ffn},         {"seq", s.seq},
            {"vocab", s.vocab},     {"positions", s.positions},
            {"experts", s.experts}, {"top", s.top},
            {"causal", s.causal},   {"rms_norm", s.rms_norm},
            {"gated", s.gated},     {"bias", s.bias},
            {"tied", s.tied},       {"activation", s.activation},
            {"dropout", s.dropout}};
  return j;
}

}  // namespace motley
