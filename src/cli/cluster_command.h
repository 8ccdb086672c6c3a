// `motley cluster`: a cluster file from what other tools print.
#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_cluster_command(CLI::App& app);

}  // namespace motley
