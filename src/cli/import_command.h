// `motley import`: a directory that was exported as a plan (export/export.h), or a plan that another
// planner wrote beside the best of ours (export/plan_files.h).
#pragma once

namespace CLI {
class App;
}

namespace motley {

void add_import_command(CLI::App& app);

}  // namespace motley
