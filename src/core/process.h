// Processes of this machine, as the system describes them.
#pragma once

#include <sys/types.h>

#include <string>

namespace motley {

// Field `number` of /proc/PID/stat (proc(5)), from 3 on: 14 and 15 are the ticks of processors that it
// took, 22 is the tick since the machine's start in which it began. Empty: there is no such process.
std::string process_field(pid_t process, int number);

}  // namespace motley
