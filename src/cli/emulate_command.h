// Runs any command once per device of a cluster, inside its emulated network.
#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_emulate_command(CLI::App& app);

}  // namespace motley
