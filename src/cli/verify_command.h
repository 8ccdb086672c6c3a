// motley verify: one step of a plan, on threads of this process or on the workers of a
// launch, against one device.
#pragma once

namespace motley {

class Command;

void add_verify_command(Command app);

}  // namespace motley
