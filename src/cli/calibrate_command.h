// Measures devices and links and writes a profile.
#pragma once

namespace motley {

class Command;

void add_calibrate_command(Command app);

}  // namespace motley
