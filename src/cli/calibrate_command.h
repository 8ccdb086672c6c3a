// Measures devices and links and writes a profile.
#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_calibrate_command(CLI::App& app);

}  // namespace motley
