#include "export/plan_files.h"

#include "core/error.h"
#include "readers/autoparallel.h"

namespace motley {

namespace exports {
// Each from its own file.
PlanFile read_autoparallel(const PlanFileJob& job);
}  // namespace exports

const std::vector<PlanReader>& plan_readers() {
  static const std::vector<PlanReader> table = {
      {"autoparallel", readers::is_autoparallel, exports::read_autoparallel},
  };
  return table;
}

const PlanReader& plan_reader_of(const Json& json, const std::string& name) {
  std::vector<std::string> names;
  for (const PlanReader& reader : plan_readers()) {
    if (reader.is(json)) return reader;
    names.emplace_back(reader.planner);
  }
  throw user_error("import",
                   "{}: is no plan of another planner; give a JSON file of {}, or a "
                   "directory that motley export wrote",
                   name, fmt::join(names, ", "));
}

}  // namespace motley
