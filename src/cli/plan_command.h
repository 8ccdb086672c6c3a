#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_plan_command(CLI::App& app);

}  // namespace motley
