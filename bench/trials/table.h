// Tables of comma-separated values, as the public data comes in.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace motley::grid::trials {

using Record = std::map<std::string, std::string>;  // by the name of the column

// The rows of `folder`/`name` of the project; lines that begin with # are comments. Throws
// UserError if it cannot be read.
std::vector<Record> read_csv(const std::string& name, const char* folder = "tests/data");

int integer(const Record& r, const char* name);
double real(const Record& r, const char* name);
std::vector<int> list(const std::string& text);  // "6/6/6/6"

}  // namespace motley::grid::trials
