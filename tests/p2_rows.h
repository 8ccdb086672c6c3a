// Rows of P2's Appendix A, as tests/data/p2 has them.
#pragma once

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "reduce/best.h"

namespace motley::reduce {

struct AppendixRow {
  std::string system;
  std::string group;  // system, axes and reduction axes
  std::string matrix_text;
  Hierarchy hierarchy;
  std::vector<int> axes, reduce;
  Matrix matrix;
  bool tree = false;
  int programs = 0;                    // of the group, over all its matrices
  double all_reduce = 0, optimal = 0;  // measured seconds; 0: not in the table
};

// "[2 16]" or "[[1 2] [2 8]]", row by row.
inline std::vector<int> numbers(std::string text) {
  for (char& c : text)
    if (c == '[' || c == ']') c = ' ';
  std::istringstream in(text);
  std::vector<int> v;
  for (int x; in >> x;) v.push_back(x);
  return v;
}

// Throws UserError if the file cannot be read.
inline std::vector<AppendixRow> read_appendix(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw user_error("tables", "{} cannot be read; give the folder of the tables", file);
  std::string line;
  auto cells = [&] {
    std::vector<std::string> out;
    std::istringstream s(line);
    for (std::string cell; std::getline(s, cell, ',');) out.push_back(cell);
    return out;
  };
  std::getline(in, line);
  const std::vector<std::string> header = cells();
  std::vector<AppendixRow> rows;
  while (std::getline(in, line)) {
    std::map<std::string, std::string> at;
    const std::vector<std::string> cell = cells();
    for (size_t i = 0; i < cell.size() && i < header.size(); ++i) at[header[i]] = cell[i];
    auto seconds = [&](const char* name) { return at[name].empty() ? 0 : std::stod(at[name]); };
    AppendixRow row;
    row.system = at["system"];
    row.group = at["system"] + " " + at["axes"] + " " + at["reduce_axes"];
    row.matrix_text = at["matrix"];
    row.hierarchy = {{"node", std::stoi(at["nodes"])}, {"gpu", std::stoi(at["gpus_per_node"])}};
    row.axes = numbers(at["axes"]);
    row.reduce = numbers(at["reduce_axes"]);
    row.matrix = {static_cast<int>(row.axes.size()), 2, numbers(at["matrix"])};
    row.tree = at["algo"] == "tree";
    row.programs = std::stoi(at["n_programs_total"]);
    row.all_reduce = seconds("allreduce_s");
    row.optimal = seconds("optimal_s");
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace motley::reduce
