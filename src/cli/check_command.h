#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_check_command(CLI::App& app);

}  // namespace motley
