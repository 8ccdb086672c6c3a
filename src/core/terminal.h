// Standard output of a program that prints what files name: what reaches a terminal (or a file, or
// a pipe) is printable (printable.h), and what could not be written is noticed.
#pragma once

#include <string>

namespace motley {

// From here on all of stdout goes through printable(). Call once, first in main.
void guard_output();

// Writes what is buffered. Throws UserError if anything could not be written since the start.
void finish_output();

// One printable line on standard error: why the program ends. Returns its exit code.
int fail(int code, const std::string& message);

// Ends the program here, once output is written: graphs, plans and libraries take up to two seconds
// to be taken apart.
[[noreturn]] void leave(int code);

// Ends the program here: libraries are not taken apart, which takes libtorch a tenth of a second,
// but where leaks are looked for at the end.
[[noreturn]] void end_process(int code);

// Throws UserError unless write_file(path) can be expected to work; nothing is written. Long work
// begins with it.
void require_writable(const std::string& option, const std::string& path);

}  // namespace motley
