// `motley export`: plans as directories of training frameworks (export/export.h).
#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_export_command(CLI::App& app);

}  // namespace motley
