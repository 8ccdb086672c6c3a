// `motley cluster`: a cluster file from what other tools print.
#pragma once

namespace motley {

class Command;

void add_cluster_command(Command app);

}  // namespace motley
