#include "capture/capture.h"

#include <ATen/Functions.h>
#include <ATen/TensorIndexing.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <fstream>

#include "graph/canonical.h"
#include "graph/rebatch.h"
#include "interpret/dispatch.h"
#include "interpret/interpret.h"
#include "runtime/derivative.h"
#include "runtime/eager.h"

namespace motley {
namespace {

using ::testing::HasSubstr;

// A module of one parameter "w" [4, 6] and one input "x" [batch, 4, 6] around a function.
class Small : public TrainModule {
 public:
  using Function = std::function<at::Tensor(const at::Tensor& w, const at::Tensor& x)>;
  explicit Small(Function function) : function_(std::move(function)) {
    w_ = register_parameter("w", torch::randn({4, 6}));
  }
  std::vector<InputSpec> inputs(int64_t batch) const override {
    return {{"x", {default_dtype(), {batch, 4, 6}}}};
  }
  at::Tensor loss(const std::vector<at::Tensor>& inputs) override {
    return function_(w_, inputs[0]);
  }

 private:
  at::Tensor w_;
  Function function_;
};

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  const double scale = b.abs().max().item<double>();
  return (a - b).abs().max().item<double>() / (scale > 0 ? scale : 1);
}

// Every value of the graph has the recorded spec, and the step's results are those of autograd.
void expect_same_step(const Graph& graph, TrainModule* module, int64_t batch) {
  EXPECT_THAT(verify(graph), testing::IsEmpty());
  const Graph again = parse_graph(to_text(graph), "captured");
  EXPECT_EQ(to_text(again), to_text(graph));

  const Derivative derivative = check_derivative(graph);
  EXPECT_THAT(derivative.problems, testing::IsEmpty());
  EXPECT_EQ(derivative.unchecked, "");

  Feeds feeds{parameters_of(*module), buffers_of(*module),
              random_inputs(*module, batch, 7, DType::f64)};
  for (auto& [name, tensor] : feeds.buffers) tensor = tensor.clone();
  InterpretOptions options;
  options.observe = [&](ValueId v, const at::Tensor& t) {
    EXPECT_EQ(spec_of(t), graph.spec(v)) << graph.node(graph.value(v).producer).op;
  };
  torch::manual_seed(11);
  const StepResult interpreted = interpret(again, feeds, options);
  torch::manual_seed(11);
  const StepResult eager = eager_step(module, feeds.inputs);
  EXPECT_LT(relative_error(interpreted.loss, eager.loss), 1e-12);
  EXPECT_EQ(interpreted.gradients.size(), eager.gradients.size());
  for (const auto& [name, gradient] : eager.gradients) {
    ASSERT_TRUE(interpreted.gradients.count(name)) << name;
    EXPECT_LT(relative_error(interpreted.gradients.at(name), gradient), 1e-12) << name;
  }
  for (const auto& [name, value] : interpreted.updates)
    EXPECT_LT(relative_error(value, eager.updates.at(name)), 1e-12) << name;
  for (const auto& [name, value] : eager.updates)
    EXPECT_EQ(interpreted.updates.count(name), value.equal(feeds.buffers.at(name)) ? 0u : 1u)
        << name;
}

class ZooTest : public testing::TestWithParam<const char*> {};

TEST_P(ZooTest, CapturedStepIsTheEagerStep) {
  const ModelSpec spec = parse_model(GetParam());
  const Capture captured = capture(GetParam(), 4, DType::f64);
  EXPECT_THAT(whole_ops(canonicalize(captured.graph)), testing::IsEmpty());
  EXPECT_EQ(captured.graph.model, spec.text());
  for (const Parameter& p : captured.graph.parameters) EXPECT_TRUE(p.gradient.valid()) << p.name;
  const std::shared_ptr<TrainModule> module = materialize(spec, 3, DType::f64);
  expect_same_step(captured.graph, module.get(), 4);
}

// Parameters are shown before the step is run, and whoever looks may end the capture.
TEST_P(ZooTest, ParametersAreSeenFirst) {
  Graph seen;
  const Graph graph = capture(GetParam(), 4, DType::f32, [&](const Graph& g) { seen = g; }).graph;
  EXPECT_FALSE(seen.loss.valid());
  ASSERT_EQ(seen.parameters.size(), graph.parameters.size());
  for (size_t p = 0; p < graph.parameters.size(); ++p) {
    EXPECT_EQ(seen.parameters[p].name, graph.parameters[p].name);
    EXPECT_EQ(seen.parameters[p].frozen, graph.parameters[p].frozen);
    EXPECT_EQ(seen.spec(seen.parameters[p].value), graph.spec(graph.parameters[p].value));
  }
  EXPECT_THROW(capture(GetParam(), 4, DType::f32, [](const Graph&) { throw 1; }), int);
  EXPECT_EQ(to_text(capture(GetParam(), 4).graph), to_text(graph));
}

TEST_P(ZooTest, TwoCapturesGiveAnyBatch) {
  auto at = [](int64_t batch) { return canonicalize(capture(GetParam(), batch).graph); };
  const Graph two = at(2), four = at(4);
  // The running variance of batch normalisation has n / (n - 1) in it.
  if (!two.buffers.empty() && two.buffers[0].update.valid()) {
    EXPECT_THROW(at_batch(two, 2, four, 4, 3, "zoo"), UserError);
    return;
  }
  for (int64_t batch : {3, 7})
    EXPECT_EQ(to_text(at_batch(two, 2, four, 4, batch, "zoo")), to_text(at(batch)));
}

INSTANTIATE_TEST_SUITE_P(
    Toys, ZooTest,
    testing::Values("bert:layers=2,hidden=16,heads=4,seq=8,vocab=20",
                    "bert-moe:layers=2,hidden=16,heads=4,seq=8,vocab=20,experts=3,every=2,top=1",
                    "bert-moe:layers=3,hidden=16,heads=4,seq=8,vocab=20,experts=5",
                    "bert:layers=1,hidden=16,heads=2,seq=8,vocab=20,dropout=0.2",
                    "convnet:width=4,image=8,classes=5",
                    "convnet:width=4,image=8,classes=5,dropout=0.5",
                    "gpt:layers=2,hidden=16,heads=4,seq=8,vocab=20",
                    "gpt:layers=1,hidden=16,heads=2,seq=8,vocab=20,dropout=0.1",
                    "llama:layers=2,hidden=16,heads=4,kv_heads=4,ffn=24,seq=8,vocab=20",
                    "llama:layers=2,hidden=16,heads=4,kv_heads=2,ffn=24,seq=8,vocab=20,dropout=0.1",
                    "mlp:layers=3,hidden=8,in=6,classes=5", "mlp:layers=1,hidden=8,in=6,classes=5",
                    "mlp:layers=3,hidden=8,in=6,classes=5,dropout=0.3",
                    "moe:layers=1,hidden=16,heads=4,kv_heads=2,ffn=24,experts=3,seq=8,vocab=20",
                    "resnet50:width=2,image=32,classes=5", "vgg19:width=2,image=32,classes=5",
                    "vgg19:width=2,image=64,classes=5,dropout=0.5",
                    "transgan:layers=1,hidden=128,heads=2,side=2,latent=8",
                    "vit:layers=2,hidden=16,heads=4,image=8,patch=4,classes=5",
                    "vit:layers=1,hidden=16,heads=2,image=8,patch=2,classes=5,dropout=0.1"));

struct Case {
  const char* name;
  Small::Function function;
};

class FunctionalTest : public testing::TestWithParam<Case> {};

TEST_P(FunctionalTest, AliasesAndWritesMeanTheSame) {
  const Small::Function function = GetParam().function;
  auto build = [&] { return std::make_shared<Small>(function); };
  const Capture captured = capture(GetParam().name, build, 3, DType::f64);
  for (const Node& node : captured.graph.nodes) EXPECT_NE(node.op.str().back(), '_') << node.op;
  DefaultDType dtype(DType::f64);
  torch::manual_seed(5);
  const auto module = build();
  expect_same_step(captured.graph, module.get(), 3);
}

at::Tensor sum_of_squares(const at::Tensor& t) { return (t * t).sum(); }

const Case kCases[] = {
    {"add_to_view",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = x * w;
       y.view({-1, 8}).add_(1.5);
       return sum_of_squares(y);
     }},
    {"assign_to_select",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = x * w;
       y.index_put_({"...", 0}, 2.0);
       y.select(1, 2).copy_(w.select(0, 1));
       return sum_of_squares(y);
     }},
    {"relu_of_transpose",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = x * w;
       y.transpose(1, 2).relu_();
       return sum_of_squares(y);
     }},
    {"masked_fill",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = x * w;
       y.masked_fill_(x > 0.5, -3);
       return sum_of_squares(y);
     }},
    {"write_by_chunks",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = at::zeros_like(x);
       y.narrow(2, 0, 2).copy_((x * w).slice(2, 0, 2));
       y.narrow(2, 4, 2).add_(w.slice(1, 4, 6));
       y.narrow(2, 2, 2).mul_(3).sub_(w.slice(1, 1, 3));
       at::Tensor z = x.clone();
       std::vector<at::Tensor> parts = z.chunk(3, 2);
       parts[0].mul_(2);
       parts[2].add_(parts[0]);
       z.add_(1);
       return sum_of_squares(y) + (z * w).sum() + (parts[1] * w.slice(1, 0, 2)).sum();
     }},
    {"view_sees_write_to_base",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = x * w;
       at::Tensor z = y.permute({2, 0, 1}).slice(0, 1, 5, 2);
       y.mul_(w);
       return sum_of_squares(z);
     }},
    {"view_sees_write_to_sibling",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = (x * w).view({3, 24});
       at::Tensor a = y.view({3, 6, 4}), b = y.view({3, 2, 12});
       a.select(2, 1).zero_();
       return sum_of_squares(b) + b.select(1, 0).sum();
     }},
    {"write_through_diagonal",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = x * w;
       y.diagonal(0, 1, 2).fill_(2.5);
       return sum_of_squares(y);
     }},
    {"copy_broadcasts_and_casts",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = at::empty_like(x);
       y.copy_(w.select(0, 0).to(at::kFloat));
       return sum_of_squares(y + w);
     }},
    {"squeeze_in_place",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = (x * w).unsqueeze(1);
       y.squeeze_(1);
       y.transpose_(1, 2);
       return sum_of_squares(y + w.t());
     }},
    {"out_argument",
     [](const at::Tensor& w, const at::Tensor& x) {
       torch::NoGradGuard no_grad;
       at::Tensor y = at::empty_like(x);
       at::mul_out(y, x, x);
       torch::AutoGradMode grad(true);
       return sum_of_squares(y * w);
     }},
    {"index_put_with_tensors",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = x * w;
       y.index_put_({torch::tensor({0, 2}), torch::tensor({1, 1})}, w.select(0, 3));
       return sum_of_squares(y);
     }},
    {"gather_and_scatter",
     [](const at::Tensor& w, const at::Tensor& x) {
       const at::Tensor order = x.argsort(/*dim=*/2, /*descending=*/false);
       at::Tensor y = at::gather(x * w, 2, order).cumsum(2);
       y.scatter_add_(2, order, x);
       return sum_of_squares(y);
     }},
    {"top_k_and_where",
     [](const at::Tensor& w, const at::Tensor& x) {
       const auto [values, indices] = (x * w).topk(2, 2);
       return sum_of_squares(at::where(values > 0, values, values * 0.5));
     }},
    {"einsum_and_mean_squared_error",
     [](const at::Tensor& w, const at::Tensor& x) {
       const at::Tensor y = at::einsum("bij,kj->bik", {x, w});
       return at::mse_loss(y, y.detach() * 0.5) + y.logsumexp(1).mean() + at::std(y, 1).sum();
     }},
    {"expanded_mask_and_number_types",
     [](const at::Tensor& w, const at::Tensor& x) {
       const at::Tensor mask = at::ones({6, 6}, at::kBool).tril().unsqueeze(0);
       const at::Tensor scores = at::matmul(x.transpose(1, 2), w).masked_fill(~mask, -1e9);
       return sum_of_squares(scores.softmax(-1)) + 2 * w.pow(2).mean() - w.abs().mean() / 3 +
              x.mul(w).max();
     }},
    {"stack_unbind_flip_roll",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = x * w;
       y.select(1, 1).mul_(2);
       std::vector<at::Tensor> rows = y.unbind(1);
       return sum_of_squares(at::stack({rows[1], rows[0], rows[3]}, 1).flip({2}).roll(1, 0));
     }},
    {"clamp_and_other_pointwise",
     [](const at::Tensor& w, const at::Tensor& x) {
       at::Tensor y = (x * w).clamp_(-1, 1).sigmoid_();
       y = y.add(1).log_();
       y = y + at::silu(y) + at::softplus(y) + at::leaky_relu(y) + at::elu(y) + at::tanh(y) +
           at::hardtanh(y) + at::hardswish(y) + at::mish(y) + at::erf(y) + y.rsqrt();
       return sum_of_squares(y);
     }},
};

INSTANTIATE_TEST_SUITE_P(Cases, FunctionalTest, testing::ValuesIn(kCases),
                         [](const auto& test) { return test.param.name; });

std::string error_of(const Small::Function& function) {
  try {
    capture(
        "small", [&] { return std::make_shared<Small>(function); }, 3);
  } catch (const UserError& e) {
    return e.what();
  }
  return "no error";
}

TEST(CaptureErrors, ControlFlowOnValues) {
  EXPECT_THAT(error_of([](const at::Tensor& w, const at::Tensor& x) {
                return x.sum().item<double>() > 0 ? w.sum() : w.mean();
              }),
              HasSubstr("depend on values"));
}

TEST(CaptureErrors, ShapesThatDependOnValues) {
  EXPECT_THAT(error_of([](const at::Tensor& w, const at::Tensor& x) {
                return at::masked_select(w * x, x > 0).sum();
              }),
              HasSubstr("depend on values"));
}

TEST(CaptureErrors, TensorMadeWithTheModelButNotRegistered) {
  class Forgetful : public Small {
   public:
    Forgetful()
        : Small([this](const at::Tensor& w, const at::Tensor& x) {
            return (w * x * scale_).sum();
          }) {}

   private:
    at::Tensor scale_ = torch::ones({6});
  };
  try {
    capture(
        "forgetful", [] { return std::make_shared<Forgetful>(); }, 3);
    FAIL();
  } catch (const UserError& e) {
    EXPECT_THAT(e.what(), HasSubstr("aten::mul.Tensor reads a tensor f32[6] that is neither"));
  }
}

TEST(CaptureErrors, LargeTensorFromOutside) {
  const at::Tensor table = at::ones({4097});
  EXPECT_THAT(
      error_of([&](const at::Tensor& w, const at::Tensor&) { return w.sum() * table.sum(); }),
      HasSubstr("register it as a buffer"));
}

TEST(CaptureErrors, ChangedParameter) {
  EXPECT_THAT(error_of([](const at::Tensor& w, const at::Tensor& x) {
                w.detach().mul_(0.9);
                return (w * x).sum();
              }),
              HasSubstr("changes parameter w"));
}

TEST(CaptureErrors, LossMustBeAScalarThatDependsOnAParameter) {
  EXPECT_THAT(error_of([](const at::Tensor& w, const at::Tensor& x) { return w * x; }),
              HasSubstr("the loss is f32[3,4,6]"));
  EXPECT_THAT(error_of([](const at::Tensor&, const at::Tensor& x) { return x.sum(); }),
              HasSubstr("depends on a parameter"));
}

TEST(CaptureErrors, Batch) { EXPECT_THROW(capture("mlp", 0), UserError); }

TEST(Capture, SmallTensorsFromOutsideAreConstants) {
  const at::Tensor table = at::arange(6, at::kDouble);
  const Capture captured = capture(
      "small",
      [&] {
        return std::make_shared<Small>(
            [&](const at::Tensor& w, const at::Tensor& x) { return (w * x * table).sum(); });
      },
      3, DType::f64);
  EXPECT_THAT(to_text(captured.graph),
              HasSubstr("motley::constant([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]) : f64[6]"));
}

TEST(Capture, TiedParametersAppearOnce) {
  class Tied : public Small {
   public:
    Tied() : Small([](const at::Tensor& w, const at::Tensor& x) { return (w * x).sum(); }) {
      register_parameter("head", named_parameters()["w"]);
    }
  };
  const Capture captured = capture(
      "tied", [] { return std::make_shared<Tied>(); }, 3);
  EXPECT_EQ(captured.graph.parameters.size(), 1u);
  EXPECT_THAT(captured.tied, testing::ElementsAre(testing::Pair("head", "w")));
}

TEST(Capture, FortyBillionParametersInAGigabyte) {
  const Capture captured = capture("gpt:layers=48,hidden=8192,heads=64", 8);
  EXPECT_GT(captured.graph.parameter_bytes(), int64_t{150'000'000'000});
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) {
      EXPECT_LT(std::stol(line.substr(6)), 1 << 20);  // kB
    }
}

TEST(Interpret, NamesWhatIsMissing) {
  const Capture captured = capture("mlp:layers=1,in=3,classes=2", 2);
  Feeds feeds;
  try {
    interpret(captured.graph, feeds);
    FAIL();
  } catch (const UserError& e) {
    EXPECT_STREQ(e.what(), "[interpret] parameter 'head.weight' has no tensor");
  }
  feeds.parameters["head.weight"] = at::ones({3, 3});
  try {
    interpret(captured.graph, feeds);
    FAIL();
  } catch (const UserError& e) {
    EXPECT_STREQ(e.what(),
                 "[interpret] parameter 'head.weight' is f32[3,3]; the graph has f32[2,3]");
  }
}

TEST(Interpret, KernelsReplaceOperators) {
  const ModelSpec spec = parse_model("mlp:layers=2,hidden=8,in=6,classes=5,dropout=0.5");
  const auto module = materialize(spec, 1);
  const Feeds feeds{parameters_of(*module), {}, random_inputs(*module, 4, 2)};
  InterpretOptions options;
  int calls = 0;
  options.kernels["aten::bernoulli.p"] = [&](const Graph&, const Node&,
                                             const std::vector<at::Tensor>& operands) {
    calls++;
    return std::vector<at::Tensor>{at::full_like(operands[0], 0.5)};
  };
  const StepResult dropped = interpret(capture(spec.text(), 4).graph, feeds, options);
  const StepResult plain =
      interpret(capture("mlp:layers=2,hidden=8,in=6,classes=5", 4).graph, feeds);
  EXPECT_EQ(calls, 1);
  EXPECT_LT(relative_error(dropped.loss, plain.loss), 1e-6);
}

}  // namespace
}  // namespace motley
