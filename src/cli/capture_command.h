#pragma once

namespace motley {

class Command;

void add_capture_command(Command app);

}  // namespace motley
