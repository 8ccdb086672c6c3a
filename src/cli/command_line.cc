#include "cli/command_line.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdlib>

namespace motley {

template <typename Number>
Check in_range(Number least, Number most) {
  return [=](CLI::Option& option) { option.check(CLI::Range(least, most)); };
}
template Check in_range(int, int);
template Check in_range(int64_t, int64_t);
template Check in_range(double, double);

Check in_range_or(int least, int most, const std::string& word) {
  return [=](CLI::Option& option) {
    option.check(CLI::Range(least, most) | CLI::IsMember(std::vector<std::string>{word}));
  };
}

Check one_of(const std::vector<std::string>& words) {
  return [words](CLI::Option& option) { option.check(CLI::IsMember(words)); };
}

Check positive_number() {  // CLI::PositiveNumber takes nan
  return [](CLI::Option& option) {
    option.check([](const std::string& text) -> std::string {
      char* end = nullptr;
      const double value = std::strtod(text.c_str(), &end);
      if (end == text.c_str() || *end != 0 || !std::isfinite(value) || !(value > 0))
        return "is '" + text + "'; give a number greater than 0";
      return "";
    });
  };
}

Check whole_number() {
  return [](CLI::Option& option) {
    option.check([](const std::string& text) -> std::string {
      const bool digits = !text.empty() && text.size() < 20 &&
                          text.find_first_not_of("0123456789") == std::string::npos;
      return digits ? "" : "is '" + text + "'; give a whole number from 0 on";
    });
  };
}

Option Option::required() {
  option_->required();
  return *this;
}

Option Option::group(const std::string& title) {
  option_->group(title);
  return *this;
}

Option Option::check(const Check& what) {
  what(*option_);
  return *this;
}

Option Option::take_all() {
  option_->expected(1)->take_all();
  return *this;
}

Command Command::add_subcommand(const std::string& name, const std::string& summary) {
  return Command(*app_->add_subcommand(name, summary));
}

template <typename Value>
Option Command::add_option(const std::string& name, Value& value, const std::string& help) {
  return Option(*app_->add_option(name, value, help));
}
template Option Command::add_option(const std::string&, std::string&, const std::string&);
template Option Command::add_option(const std::string&, std::vector<std::string>&,
                                    const std::string&);
template Option Command::add_option(const std::string&, std::vector<int64_t>&, const std::string&);
template Option Command::add_option(const std::string&, int&, const std::string&);
template Option Command::add_option(const std::string&, int64_t&, const std::string&);
template Option Command::add_option(const std::string&, uint64_t&, const std::string&);
template Option Command::add_option(const std::string&, double&, const std::string&);

Option Command::add_flag(const std::string& name, bool& value, const std::string& help) {
  return Option(*app_->add_flag(name, value, help));
}

void Command::footer(const std::string& text) { app_->footer(text); }

void Command::callback(std::function<void()> run) { app_->callback(std::move(run)); }

}  // namespace motley
