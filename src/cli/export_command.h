// `motley export`: plans as directories of training frameworks (export/export.h).
#pragma once

namespace motley {

class Command;

void add_export_command(Command app);

}  // namespace motley
