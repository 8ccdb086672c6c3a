#pragma once

namespace motley {

class Command;

void add_report_command(Command app);

}  // namespace motley
