// `motley advise`: does a model fit a cluster, how fast, and what would changes of the cluster give.
#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_advise_command(CLI::App& app);

}  // namespace motley
