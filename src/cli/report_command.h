#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_report_command(CLI::App& app);

}  // namespace motley
