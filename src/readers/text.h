// Text of other programs: lines, words and numbers, whatever is in them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/file.h"

namespace motley::readers {

constexpr double kMiB = 1024. * 1024, kGB = 1e9;
constexpr size_t kMostPoints = 100000;  // that are read of one file

std::string lower(std::string text);
std::string trimmed(const std::string& text);
// Without colours (escape sequences) and carriage returns.
std::vector<std::string> lines_of(const std::string& text);
std::vector<std::string> words_of(const std::string& line);
std::vector<std::string> split(const std::string& text, char at);
// A name that a cluster file takes as it is: letters, digits, - _ and .
std::string plain(std::string name);
// The whole text is a number; `negative`: it may be one.
bool whole(const std::string& text, int64_t* value, bool negative = false);
bool real(const std::string& text, double* value);

// "[cluster] NAME: WHAT; give FIX"
UserError cluster_error(const std::string& name, const std::string& what, const std::string& fix);
// What was measured: a finite number above 0. Throws cluster_error() naming the field.
double positive(const Json& value, const std::string& name, const std::string& field);

// The names that Slurm's "dev[0-5,007],login" stands for. Throws UserError that starts with `where`
// if it is not one, or is of more than 131,072.
std::vector<std::string> hostlist(const std::string& text, const std::string& where);

}  // namespace motley::readers
