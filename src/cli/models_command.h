#pragma once

namespace motley {

class Command;

void add_models_command(Command app);

}  // namespace motley
