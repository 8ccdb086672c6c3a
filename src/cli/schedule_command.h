// motley schedule: pipeline schedules on given stage and link times.
#pragma once

namespace motley {

class Command;

void add_schedule_command(Command app);

}  // namespace motley
