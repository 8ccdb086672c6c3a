#include "cli/capture_command.h"

#include <cstdio>

#include "capture/source.h"
#include "cli/commands.h"
#include "core/error.h"
#include "core/log.h"
#include "core/units.h"
#include "graph/op.h"

namespace motley {

void add_capture_command(Command app) {
  struct CaptureArgs {
    std::string model, output, dtype = "f32";
    int64_t batch = 8;
    bool json = false;
  };
  auto args = std::make_shared<CaptureArgs>();
  Command command =
      app.add_subcommand("capture", "Write the training step of a model as a graph file");
  command.add_option("model", args->model, "Model of the zoo: name or name:key=value,...")
      .required();
  command.add_option("-o,--output", args->output, "Graph file to write").required();
  command.add_option("--batch", args->batch, "Global batch, in samples; default: 8")
      .check(in_range(int64_t{1}, int64_t{1} << 24));
  command
      .add_option("--dtype", args->dtype,
                  "Type of the parameters: f32 (default) or f64, for losses without rounding")
      .check(one_of({"f32", "f64"}));
  command.add_flag("--json", args->json, "Print one JSON object");
  command.footer(
      "Example:\n"
      "  motley capture gpt:layers=4,hidden=512 --batch 32 -o gpt.graph");
  command.callback([args] {
    require_writable("--output", args->output);
    const DType dtype = args->dtype == "f64" ? DType::f64 : DType::f32;
    GraphSource source = load_graph(args->model, args->batch, dtype);
    const Graph& graph = source.graph;
    double flops = 0;
    for (const Node& node : graph.nodes)
      if (const OpDef* op = find_op(node.op); op && op->flops) flops += op->flops(graph, node);
    for (const std::string& op : source.unknown_ops)
      spdlog::warn("{} is not in the op table: it runs replicated", op);
    double saved = 0;
    for (ValueId v : saved_activations(graph)) saved += static_cast<double>(graph.spec(v).bytes());
    GraphFile file{args->output, args->batch, graph, 0, {}};
    // Some models take another course at other batches; one sample often does.
    const std::string alone = file.add_other([&](int64_t samples) -> std::optional<Graph> {
      try {
        return load_graph(args->model, samples, dtype).graph;
      } catch (const UserError&) {
        return std::nullopt;
      }
    });
    if (!alone.empty()) spdlog::info("the file has this batch alone: {}", alone);
    save_graph(file);
    if (args->json)
      print_json({{"nodes", graph.nodes.size()},
                  {"parameters", graph.parameters.size()},
                  {"parameter_bytes", graph.parameter_bytes()},
                  {"flops", flops},
                  {"inputs", graph.inputs.size()},
                  {"buffers", graph.buffers.size()},
                  {"saved_activations", saved_activations(graph).size()},
                  {"saved_activation_bytes", saved},
                  {"capture_s", source.capture_s},
                  {"unknown_ops", source.unknown_ops}});
    else
      std::printf("%s: %zu nodes, %zu parameters (%s), %s a step, captured in %s -> %s\n",
                  args->model.c_str(), graph.nodes.size(), graph.parameters.size(),
                  format_bytes(static_cast<double>(graph.parameter_bytes())).c_str(),
                  format_flops(flops).c_str(), format_seconds(source.capture_s).c_str(),
                  args->output.c_str());
  });
}

}  // namespace motley
