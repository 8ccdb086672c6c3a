// motley schedule: pipeline schedules on given stage and link times.
#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_schedule_command(CLI::App& app);

}  // namespace motley
