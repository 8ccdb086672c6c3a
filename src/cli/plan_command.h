#pragma once

namespace motley {

class Command;

void add_plan_command(Command app);

}  // namespace motley
