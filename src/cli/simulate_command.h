#pragma once

namespace motley {

class Command;

void add_simulate_command(Command app);

}  // namespace motley
