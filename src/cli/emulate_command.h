// Runs any command once per device of a cluster, inside its emulated network.
#pragma once

namespace motley {

class Command;

void add_emulate_command(Command app);

}  // namespace motley
