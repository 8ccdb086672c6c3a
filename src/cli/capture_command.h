#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_capture_command(CLI::App& app);

}  // namespace motley
