// Tensors made from nothing: every element is the same, or drawn by itself, so any placement is
// made locally.
#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

Signature uniform(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  for (int d = 0; d < static_cast<int>(b.out(0).size()); ++d)
    b.result(0, d, {b.label(b.out(0)[d])});
  return b.take();
}

Signature replicated(const Graph& graph, const Node& node) { return Builder(graph, node).take(); }

OpDef random(const char* name, int size_arg) {
  OpDef op = def(name, uniform, size_arg);
  op.random = true;
  return op;
}

}  // namespace

const std::vector<OpDef>& factory_ops() {
  static const std::vector<OpDef> table = {
      def("aten::arange", replicated),
      def("aten::arange.start", replicated),
      def("aten::arange.start_step", replicated),
      def("aten::eye", replicated),
      def("aten::eye.m", replicated),
      def("aten::full", uniform, 0),
      def("aten::linspace", replicated),
      def("aten::logspace", replicated),
      def("aten::new_empty", uniform, 1),
      def("aten::new_full", uniform, 1),
      def("aten::new_ones", uniform, 1),
      def("aten::new_zeros", uniform, 1),
      def("aten::ones", uniform, 0),
      random("aten::rand", 0),
      random("aten::randint", 1),
      random("aten::randint.low", 2),
      random("aten::randn", 0),
      def("aten::scalar_tensor", replicated),
      def("aten::tril_indices", replicated),
      def("aten::triu_indices", replicated),
      def("aten::zeros", uniform, 0),
  };
  return table;
}

}  // namespace motley::ops
