// All commands of the program. A command is one file, <name>_command.cc, and one line in
// add_commands.
#pragma once

#include <stdexcept>
#include <string>

#include "cli/command_line.h"
#include "core/file.h"
#include "core/terminal.h"

namespace motley {

// No plan satisfies the constraints: exit code 3.
class NoPlan : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void add_commands(Command app);

// The program, from its arguments to its exit code.
int run_program(int argc, char** argv);

// --optimizer of commands that plan.
Option add_optimizer(Command command, std::string& optimizer);

// Prints exactly one JSON object on standard output.
void print_json(const Json& json);

// Remembers the command line of this process for become_torch().
void remember_arguments(char** argv);

// motley-torch, which lies in the folder of this program.
std::string torch_program();
bool has_torch();

// Replaces this process by motley-torch, the same program with libtorch, with the same arguments.
// Throws UserError where it was not built. Does not return otherwise.
[[noreturn]] void become_torch();
// The other way round, from the program with libtorch, which has captured and kept what this one
// needs and took so long: plans are found faster without it. Once only: returns where it was done
// before, or cannot be.
void become_plain(double captured_s);
// What that program said, in the one it became; else 0.
double captured_before();

}  // namespace motley
