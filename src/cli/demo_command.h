// motley demo: plan, train and compare in under two minutes, on this machine.
//
// A byte-level language model is planned for four emulated workers of unequal speed behind a slow
// link and trained for real; beside it run even data parallelism under the same emulation and one
// device, which shows the same losses.
#pragma once

namespace motley {

class Command;

void add_demo_command(Command app);

}  // namespace motley
