#include "trials/table.h"

#include <fmt/format.h>

#include <fstream>
#include <sstream>

#include "core/error.h"

namespace motley::grid::trials {

std::vector<Record> read_csv(const std::string& name, const char* folder) {
  const std::string path = fmt::format("{}/{}/{}", MOTLEY_SOURCE_DIR, folder, name);
  std::ifstream in(path);
  if (!in) throw user_error("trials_bench", "{} cannot be read", path);
  auto split = [](const std::string& line) {
    std::vector<std::string> cells;
    size_t at = 0;
    while (true) {
      const bool quoted = line[at] == '"';
      size_t comma = line.find(',', quoted ? line.find('"', at + 1) : at);
      cells.push_back(line.substr(at, comma - at));
      if (quoted) cells.back() = cells.back().substr(1, cells.back().size() - 2);
      if (comma == std::string::npos) return cells;
      at = comma + 1;
    }
  };
  std::vector<Record> records;
  std::vector<std::string> head;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::vector<std::string> cells = split(line);
    if (head.empty()) {
      head = cells;
      continue;
    }
    MOTLEY_CHECK(cells.size() == head.size(), "{}: {}", path, line);
    Record record;
    for (size_t i = 0; i < head.size(); ++i) record[head[i]] = cells[i];
    records.push_back(std::move(record));
  }
  return records;
}

int integer(const Record& r, const char* name) { return std::stoi(r.at(name)); }
double real(const Record& r, const char* name) { return std::stod(r.at(name)); }
std::vector<int> list(const std::string& text) {
  std::vector<int> values;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, '/');) values.push_back(std::stoi(part));
  return values;
}

}  // namespace motley::grid::trials
