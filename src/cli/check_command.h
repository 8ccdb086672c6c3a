#pragma once

namespace motley {

class Command;

void add_check_command(Command app);

}  // namespace motley
