#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "cost/storage.h"
#include "graph/op.h"
#include "graph/ops/builder.h"
#include "graph/segment.h"

namespace motley {

namespace {

constexpr int64_t kBlock = 16;         // channels that convolutions compute at a time ...
constexpr int64_t kFewChannels = 4;    // ... unless there are so few
constexpr double kSmallInput = 20480;  // elements of the input of a small convolution

// Operators that make their results straight from their operands.
constexpr std::string_view kDirect =
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _log_softmax _log_softmax_backward_data "
    "_softmax _softmax_backward_data _to_copy _unsafe_view abs addcdiv addcmul addmm amax amin "
    "arange argmax argmin avg_pool2d avg_pool2d_backward baddbmm bmm cat ceil clamp clamp_max "
    "clamp_min clone constant_pad_nd copy cos elu elu_backward embedding embedding_dense_backward "
    "erf exp fill floor full full_like gather gelu gelu_backward hardswish hardswish_backward "
    "hardtanh hardtanh_backward index_select leaky_relu leaky_relu_backward log masked_fill "
    "max_pool2d_with_indices max_pool2d_with_indices_backward mean mm mse_loss mse_loss_backward "
    "native_batch_norm native_batch_norm_backward native_group_norm native_layer_norm "
    "native_layer_norm_backward neg new_empty new_full new_ones new_zeros nll_loss2d_backward "
    "nll_loss2d_forward nll_loss_backward nll_loss_forward ones ones_like reciprocal relu repeat "
    "rsqrt scalar_tensor select_backward sigmoid sigmoid_backward silu silu_backward sin "
    "slice_backward softplus softplus_backward sqrt stack sum tan tanh tanh_backward threshold "
    "threshold_backward tril triu zeros zeros_like";

// Operators of one element each of operands that are broadcast, and converted to one type.
constexpr std::string_view kElementwise =
    "add atan2 bitwise_and bitwise_or div eq fmod ge gt le lt logical_and logical_or maximum "
    "minimum mul ne pow remainder rsub sub where xlogy bitwise_not logical_not "
    "logical_xor isnan isinf";

std::unordered_set<std::string_view> words_of(std::string_view text) {
  std::unordered_set<std::string_view> words;
  for (size_t at = 0, end = 0; at < text.size(); at = end + 1) {
    end = std::min(text.find(' ', at), text.size());
    words.insert(text.substr(at, end - at));
  }
  return words;
}

class Workspace {
 public:
  Workspace(const Theory& theory, const Step& step, const Fractions& fractions)
      : theory_(theory), graph_(theory.graph()), step_(step), fractions_(fractions) {}

  std::vector<Amount> run() {
    if (step_.is_compute())
      compute(graph_.node(step_.node));
    else
      convert();
    return std::move(amounts_);
  }

 private:
  void add(Bytes bytes, Cut cut = {}) {
    if (bytes > 0) amounts_.push_back({bytes, cut});
  }
  void add(ValueId v, Placement p, double factor = 1) {
    add(factor * static_cast<Bytes>(graph_.spec(v).bytes()), theory_.cut(v, p));
  }
  double largest(ValueId v, Placement p) const {
    const auto& f = fractions_.by_device(theory_.cut(v, p));
    return *std::max_element(f.begin(), f.end());
  }

  void convert() {
    const ValueId v = step_.value;
    const TensorSpec& spec = graph_.spec(v);
    const auto bytes = static_cast<Bytes>(spec.bytes());
    const double wide = is_half(spec.dtype) ? 2 : 1;  // sums of 16-bit numbers have 32 bits
    switch (step_.kind) {
      case Collective::all_reduce:
        // A chain of a planned reduction has all of it once more, a ring less.
        add(wide * bytes);
        if (wide > 1) add(wide * bytes);
        break;
      case Collective::all_gather:
        if (!is_one_run(theory_, v, step_.from)) add(bytes);
        break;
      case Collective::reduce_scatter:
        if (!is_one_run(theory_, v, step_.to)) add(bytes);
        add(2 * wide * bytes * largest(v, step_.to));
        break;
      case Collective::all_to_all:
        if (!is_one_run(theory_, v, step_.to)) add(v, step_.from);
        if (!is_one_run(theory_, v, step_.from)) add(v, step_.to);
        break;
      default:
        break;
    }
  }

  void compute(const Node& node) {
    const Triple& triple = theory_.triples(step_.node)[step_.triple];
    const ValueList inputs = graph_.inputs_of(node);
    if (is_source(node)) {
      // Numbers of a constant are in double precision first.
      const TensorSpec& spec = graph_.spec(node.outputs[0]);
      if (node.op == "motley::constant")
        add(static_cast<Bytes>(spec.bytes()) + 8. * static_cast<double>(spec.numel()));
      return;
    }
    if (is_boundary(node)) {
      if (moves_nothing(theory_, step_.node, triple, fractions_.shares())) return;
      add(inputs[0], triple.in[0]);
      add(node.outputs[0], triple.out[0]);
      return;
    }
    static const std::unordered_set<std::string_view> elementwise_words = words_of(kElementwise),
                                                      direct_words = words_of(kDirect);
    const OpDef* op = find_op(node.op);
    if (op && op->random) return draw(node.outputs[0], triple.out[0]);
    if (op && op->alias) return;
    std::string_view name = node.op.str();
    name.remove_prefix(std::min(name.size(), std::string_view("aten::").size()));
    name = name.substr(0, name.find('.'));
    if (!triple.kernel.empty())
      rule(triple, inputs);
    else if (name == "convolution" || name == "convolution_backward")
      convolution(node, triple, inputs, name == "convolution");
    else if (elementwise_words.count(name))
      elementwise(node, triple, inputs);
    else if (!direct_words.count(name))
      largest_again(node, triple, inputs);
  }

  // Indices and numbers in 64 bits (runtime/random.h); a kernel that makes them holds less.
  void draw(ValueId v, Placement p) {
    constexpr double kNumbers = 5 * 8;
    const auto numel = static_cast<double>(graph_.spec(v).numel());
    if (numel * largest(v, p) > kDrawnAtOnce)
      add(kNumbers * kDrawnAtOnce);
    else
      add(kNumbers * numel, theory_.cut(v, p));
  }

  // Kernels of the runtime: something as large as the first operand, and masks and places of
  // indices.
  void rule(const Triple& triple, const std::vector<ValueId>& inputs) {
    const bool direct = triple.kernel.starts_with("nll_loss") || triple.kernel == "embedding.vocab";
    if (!direct) add(inputs[0], triple.in[0]);
    for (size_t i = 0; i < inputs.size(); ++i)
      if (graph_.spec(inputs[i]).dtype == DType::i64) add(inputs[i], triple.in[i], 4);
  }

  void elementwise(const Node& node, const Triple& triple, const std::vector<ValueId>& inputs) {
    int64_t widest = 0;
    for (ValueId v : inputs) widest = std::max(widest, size_of(graph_.spec(v).dtype));
    const TensorSpec& result = graph_.spec(node.outputs[0]);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const TensorSpec& spec = graph_.spec(inputs[i]);
      const bool condition = i == 0 && node.op.str().starts_with("aten::where");
      const bool converted = spec.dtype != graph_.spec(inputs.back()).dtype ||
                             spec.dtype != graph_.spec(inputs[0]).dtype ||
                             (is_float(result.dtype) && result.dtype != spec.dtype);
      if (converted && !condition)
        add(inputs[i], triple.in[i],
            static_cast<double>(std::max(widest, size_of(result.dtype))) /
                static_cast<double>(size_of(spec.dtype)));
    }
  }

  void largest_again(const Node& node, const Triple& triple, const std::vector<ValueId>& inputs) {
    Amount most;
    auto take = [&](ValueId v, Placement p) {
      const auto bytes = static_cast<Bytes>(graph_.spec(v).bytes());
      if (bytes * largest(v, p) > most.bytes) most = {bytes * largest(v, p), theory_.cut(v, p)};
    };
    for (size_t i = 0; i < inputs.size(); ++i) take(inputs[i], triple.in[i]);
    for (size_t o = 0; o < node.outputs.size(); ++o)
      if (node.outputs[o].valid()) take(node.outputs[o], triple.out[o]);
    if (most.cut.size > 0) most.bytes /= largest_of(most.cut);
    add(most.bytes, most.cut);
  }
  double largest_of(Cut cut) const {
    const auto& f = fractions_.by_device(cut);
    return *std::max_element(f.begin(), f.end());
  }

  // Convolutions of f32 copy tensors into blocks of channels; others, and those of small inputs,
  // lay out what every output reads.
  void convolution(const Node& node, const Triple& triple, const std::vector<ValueId>& inputs,
                   bool forward) {
    const size_t data = forward ? 0 : 1;  // (x, w, ...) or (dy, x, w, ...)
    if (inputs.size() < data + 2) return largest_again(node, triple, inputs);
    const ValueId x = inputs[data], w = inputs[data + 1];
    const ValueId y = forward ? node.outputs[0] : inputs[0];
    // Pictures of a few colours stay as they are.
    const bool few = graph_.spec(x).shape[1] <= kFewChannels;
    for (size_t i = 0; i < data + 2; ++i) {
      const bool again = i == data + 1 || (!forward && i == 0);
      blocked(inputs[i], triple.in[i], again ? 2 : 1, i == data + 1,
              inputs[i] == y || (!few && i <= data + 1));
    }
    for (size_t o = 0; o < node.outputs.size() && o < 2; ++o)
      if (node.outputs[o].valid())
        blocked(node.outputs[o], triple.out[o], o == 1 ? 2 : 1, o == 1, forward || !few);
    // What an output reads, at all places: a transposed one lays out what an input adds to.
    const bool transposed = ops::bool_arg(node, forward ? 6 : 7);
    const auto groups = static_cast<double>(ops::int_arg(node, forward ? 8 : 9, 1));
    const TensorSpec &weight = graph_.spec(w), &in = graph_.spec(x);
    const TensorSpec& at = transposed ? in : graph_.spec(y);
    const double places = static_cast<double>(at.numel()) / static_cast<double>(at.shape[1]);
    const double reads =
        groups * static_cast<double>(weight.numel()) / static_cast<double>(weight.shape[0]);
    const Cut cut = transposed ? theory_.cut(y, forward ? triple.out[0] : triple.in[0])
                               : theory_.cut(x, triple.in[data]);
    Amount columns{places * reads * static_cast<double>(size_of(weight.dtype)), cut};
    if (in.dtype == DType::f32) {
      // For small ones only.
      const int64_t kernel = *std::max_element(weight.shape.begin() + 2, weight.shape.end());
      const std::vector<int64_t> strides = ops::ints_arg(node, forward ? 3 : 4);
      if (kernel == 1 || kernel > 3 || *std::max_element(strides.begin(), strides.end()) > 1)
        return;
      columns.below = columns.bytes * kSmallInput / static_cast<double>(in.numel());
    }
    amounts_.push_back(columns);
  }
  void blocked(ValueId v, Placement p, double factor, bool weight, bool padded) {
    const TensorSpec& spec = graph_.spec(v);
    double bytes = factor * static_cast<double>(spec.bytes()), few = 0;
    auto pad = [&](int dim) {
      if (spec.shape.size() <= static_cast<size_t>(dim) || spec.shape[dim] == 0) return;
      const int64_t n = spec.shape[dim], rounded = (n + kBlock - 1) / kBlock * kBlock;
      // A piece of channels is rounded up by itself.
      if (p.is_shard() && p.dim == dim)
        few += bytes / static_cast<double>(n) * (kBlock - 1);
      else
        bytes *= static_cast<double>(rounded) / static_cast<double>(n);
    };
    if (weight) pad(0);
    if (padded) pad(1);
    add(bytes, theory_.cut(v, p));
    add(few);
  }

  const Theory& theory_;
  const Graph& graph_;
  const Step& step_;
  const Fractions& fractions_;
  std::vector<Amount> amounts_;
};

}  // namespace

std::vector<Amount> workspace_of(const Theory& theory, const Step& step,
                                 const Fractions& fractions) {
  return Workspace(theory, step, fractions).run();
}

void local_bytes(const Amount& amount, const Fractions& fractions, std::vector<Bytes>* local) {
  *local = amount.below < std::numeric_limits<Bytes>::infinity()
               ? fractions.by_type(amount.cut, amount.below / amount.bytes)
               : fractions.by_type(amount.cut);
  for (Bytes& x : *local) x *= amount.bytes;
}

double update_workspace(Optimizer optimizer) {
  return optimizer.fused ? 0 : optimizer.kind == Optimizer::sgd ? 2 : 3;
}

Bytes bucket_workspace(Bytes all, Bytes largest) {
  return 3 * std::min(all, std::max(kBucketBytes, largest));
}

Bytes held_throughout(const Graph& graph) {
  Bytes bytes = kSmallChange;
  for (const Input& input : graph.inputs)
    bytes += static_cast<Bytes>(graph.spec(input.value).bytes());
  return bytes;
}

}  // namespace motley
