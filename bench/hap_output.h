// What hap_bench prints, and its tables and pictures.
#pragma once

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace motley::hap {

struct Panel {
  std::string title;
  std::vector<std::string> at;                                       // labels of the groups
  std::vector<std::pair<std::string, std::vector<double>>> systems;  // a bar per group; 0: none
};

// What one section prints and writes.
class Bench {
 public:
  // Rows of the table go to `rows`.
  Bench(std::string folder, std::FILE* rows) : folder_(std::move(folder)), rows_(rows) {}

  void figure(const std::string& name, const std::string& title);
  void row(const std::string& model, int devices, const std::string& system, double value,
           const std::string& unit = "s");
  void draw(const std::vector<Panel>& panels, const std::string& unit);
  // The rows of the paper that speak of this.
  void paper(const std::string& experiment) const;
  void expect(bool holds, const std::string& what);
  int failures() const { return failures_; }

 private:
  std::string folder_, figure_;
  std::FILE* rows_;
  int failures_ = 0;
};

}  // namespace motley::hap
