// The numbers of exported files, each with the field that it stands in, for tests of importers.
#pragma once

#include <string>
#include <vector>

namespace motley {

struct FieldNumber {
  size_t begin = 0, size = 0;  // digits of the text
  std::string field;           // "global_batch_size"; of words "float32" too; "comment"
};
// By the name of the file: JSON, YAML, TOML, CSV, words one a line, Python, hostfile and ranks.txt.
std::vector<FieldNumber> numbers_of(const std::string& file, const std::string& text);

}  // namespace motley
