// `motley explain`: what limits a plan's step, and what would help.
#pragma once

namespace motley {

class Command;

void add_explain_command(Command app);

}  // namespace motley
