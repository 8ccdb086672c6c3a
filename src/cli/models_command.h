#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_models_command(CLI::App& app);

}  // namespace motley
