#include "capture/source.h"

#include "capture/capture.h"
#include "graph/canonical.h"

namespace motley {

GraphSource load_graph(const std::string& model, int64_t batch, DType dtype,
                       const std::function<void(const Graph&)>& look) {
  GraphSource source;
  if (is_graph_file(model)) {
    source.graph = load_graph_file(model, batch);
    return source;
  }
  Capture captured = capture(model, batch, dtype, look);
  source.capture_s = captured.seconds;
  source.graph = canonicalize(captured.graph);
  source.unknown_ops = whole_ops(source.graph);
  return source;
}

}  // namespace motley
