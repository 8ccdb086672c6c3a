// The program of the build folder, run as a user runs it, in the root of the project.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "core/file.h"

namespace motley {

struct Outcome {
  int code = -1;
  std::string out, err;
  Json json() const { return parse_json(out, "stdout"); }
};

class Cli : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("motley_cli_{}", getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ / name; }

  Outcome motley(const std::string& arguments) const {
    Outcome o;
    std::string command =
        fmt::format("cd {} && timeout 120 {}/motley {} >{} 2>{} </dev/null", MOTLEY_SOURCE_DIR,
                    MOTLEY_BINARY_DIR, arguments, path("out"), path("err"));
    int status = std::system(command.c_str());
    o.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    o.out = read_file(path("out"));
    o.err = read_file(path("err"));
    return o;
  }

  // A mistake of the user's: exit code 2, one line that says what to fix.
  void expect_mistake(const std::string& arguments, const std::string& message) const {
    Outcome o = motley(arguments);
    EXPECT_EQ(o.code, 2) << arguments << "\n" << o.err;
    EXPECT_THAT(o.err, ::testing::HasSubstr(message)) << arguments;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    EXPECT_EQ(o.out, "") << arguments;
  }

  std::filesystem::path folder_;
};

}  // namespace motley
