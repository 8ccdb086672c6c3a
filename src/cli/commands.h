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

}  // namespace motley
