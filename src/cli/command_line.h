// Commands and their options, without the headers of CLI11: they take the compiler longer than most
// commands do. Names and meaning are those of CLI11.
//
//   Command command = app.add_subcommand("simulate", "Simulate one step of a plan");
//   command.add_option("--seed", args->seed, "Of what is drawn").check(in_range(1, 1024)).group("Search");
//   command.callback([args] { run(*args); });
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace motley {

// Puts a condition on what an option is given; --help says which.
using Check = std::function<void(CLI::Option&)>;

template <typename Number>
Check in_range(Number least, Number most);  // of int, int64_t and double; both ends belong to it
Check in_range_or(int least, int most, const std::string& word);
Check one_of(const std::vector<std::string>& words);
Check positive_number();  // finite and above zero
Check whole_number();     // from 0 on, such as a seed

class Option {
 public:
  explicit Option(CLI::Option& option) : option_(&option) {}
  Option required();
  Option group(const std::string& title);
  Option check(const Check& what);
  Option take_all();  // one each time that it is given, as often as it is

 private:
  CLI::Option* option_;
};

// What is referred to has to live until the callback returns.
class Command {
 public:
  explicit Command(CLI::App& app) : app_(&app) {}
  Command add_subcommand(const std::string& name, const std::string& summary);
  // Of std::string, int, int64_t, uint64_t, double, and vectors of std::string and int64_t.
  template <typename Value>
  Option add_option(const std::string& name, Value& value, const std::string& help);
  Option add_flag(const std::string& name, bool& value, const std::string& help);
  void footer(const std::string& text);
  void callback(std::function<void()> run);
  CLI::App& app() { return *app_; }

 private:
  CLI::App* app_;
};

}  // namespace motley
