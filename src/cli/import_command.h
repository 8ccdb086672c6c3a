// `motley import`: a directory that was exported as a plan (export/export.h), or a plan that another
// planner wrote beside the best of ours (export/plan_files.h).
#pragma once

namespace motley {

class Command;

void add_import_command(Command app);

}  // namespace motley
