// `motley explain`: what limits a plan's step, and what would help.
#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_explain_command(CLI::App& app);

}  // namespace motley
