#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_simulate_command(CLI::App& app);

}  // namespace motley
