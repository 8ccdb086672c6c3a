// motley verify: one step of a plan, on threads of this process or on the workers of a
// launch, against one device.
#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_verify_command(CLI::App& app);

}  // namespace motley
