// Faults on purpose, for tests: MOTLEY_FAULTS is a list, such as
//
//   kill:step:1:3;stop:collective:0:40@1;delay:checkpoint:2:1
//
// kill, stop or delay (for a second) rank 1 when it comes to the point `step` for the third time, rank 0 at its 40th
// collective of the first attempt behind the one at the start. A fault without @ is of attempt 0. Others: `hang` makes the
// thread that comes there sleep for ever, while the process' others go on; `slow` makes what the
// rank computes take twice as long from then on; `cut` ends its network, and `part` all of it but the way to the launcher, both
// only in a network namespace of an emulated cluster (testbed/network.h); `fill` fills the disk that the folder MOTLEY_FAULT_DISK
// is on, which may be no larger than 1 GiB, and `free` empties it again. The launcher is rank -1, and its point `replanning`:
// there it is the process that plans which is killed or stopped.
#pragma once

#include <string>

namespace motley {

// Which rank of which attempt this process is; before any point.
void set_fault_rank(int rank, int attempt);
// `point`: rendezvous, step, collective, second (sending to second copies), boundary or checkpoint. Costs nothing where the variable is not set.
void fault_point(const char* point);
// The same for whoever does to another process what is due, "kill" or "stop"; empty: nothing is.
std::string fault_due(const char* point);
// How many times as long this process is to take for what it computes.
double fault_slowness();

}  // namespace motley
