// `motley advise`: does a model fit a cluster, how fast, and what would changes of the cluster give.
#pragma once

namespace motley {

class Command;

void add_advise_command(Command app);

}  // namespace motley
