#include "cli/kept_graphs.h"

#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "graph/graph.h"

namespace motley {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMostFiles = 64, kMostPrograms = 4;

// Changes when the file does. Empty: there is none.
std::string stamp_of(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return {};
  return fmt::format("{:x}-{:x}-{:x}", info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
}

// Nobody else may write there, or has.
bool is_mine(const std::string& folder) {
  struct stat info {};
  return stat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid() &&
         (info.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// Empty: nothing is to be kept.
std::string folder_of_user() {
  if (const char* asked = std::getenv("MOTLEY_CACHE"); asked && std::string(asked) == "off")
    return {};
  const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  if (cache && *cache == '/') return std::string(cache) + "/motley";
  return home && *home == '/' ? std::string(home) + "/.cache/motley" : std::string();
}

// Names of models are names of files as they are.
bool names_file(const std::string& model) {
  constexpr size_t kMost = 160;
  return !model.empty() && model.size() <= kMost && model[0] != '.' &&
         std::all_of(model.begin(), model.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 ||
                  std::string("_:=,.-").find(static_cast<char>(c)) != std::string::npos;
         });
}

// The libtorch of this process, and how it is now: "path stamp"; empty without one.
std::string loaded_libtorch() {
  std::string path;
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* found) {
        const std::string name = library->dlpi_name;
        if (name.find("/libtorch_cpu.so") == std::string::npos) return 0;  // Debian adds a version
        *static_cast<std::string*>(found) = name;
        return 1;
      },
      &path);
  return path.empty() ? path : fmt::format("{} {}\n", path, stamp_of(path));
}

bool is_unchanged(const std::string& libtorch) {
  const size_t space = libtorch.rfind(' ');
  return space != std::string::npos &&
         libtorch.substr(space + 1) == stamp_of(libtorch.substr(0, space)) + "\n";
}

// Of a file, before the text of the graph.
std::string first_line(int64_t samples, size_t bytes) {
  return fmt::format("batch {}, {} bytes\n", samples, bytes);
}

// All but the newest; `spared` stays.
void remove_oldest(const std::string& folder, size_t most, const std::string& spared) {
  std::vector<std::pair<fs::file_time_type, fs::path>> all;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (entry.path() != spared) all.emplace_back(entry.last_write_time(), entry.path());
  if (all.size() < most) return;
  std::sort(all.begin(), all.end());
  all.resize(all.size() - (most - 1));
  for (const auto& [time, path] : all) fs::remove_all(path);
}

}  // namespace

KeptGraphs::KeptGraphs(const std::string& program, const std::string& model) : model_(model) {
  const std::string stamp = stamp_of(program), folder = folder_of_user();
  if (!stamp.empty() && !folder.empty() && names_file(model)) folder_ = folder + "/" + stamp;
}

std::string KeptGraphs::file(int64_t samples) const {
  return folder_.empty() ? folder_ : fmt::format("{}/{}@{}.txt", folder_, model_, samples);
}

std::optional<Graph> KeptGraphs::find(int64_t samples) const {
  const std::string path = file(samples);
  if (path.empty() || access(path.c_str(), R_OK) != 0 || !is_mine(folder_)) return std::nullopt;
  try {
    if (!is_unchanged(read_file(folder_ + "/libtorch", size_t{1} << 16))) return std::nullopt;
    const std::string text = read_file(path);
    const size_t end = text.find('\n');
    if (end == std::string::npos ||
        text.substr(0, end + 1) != first_line(samples, text.size() - end - 1))
      return std::nullopt;
    return parse_graph(text.substr(end + 1), path);
  } catch (const UserError& e) {
    spdlog::info("not read: {}", e.what());
    return std::nullopt;
  }
}

bool KeptGraphs::keep(int64_t samples, const Graph& graph) const {
  const std::string libtorch = loaded_libtorch(), path = file(samples);
  if (libtorch.empty() || path.empty()) return false;
  try {
    const fs::path all = fs::path(folder_).parent_path();
    fs::create_directories(all.parent_path());
    for (const std::string& folder : {all.string(), folder_}) {
      mkdir(folder.c_str(), S_IRWXU);
      if (!is_mine(folder)) return false;
    }
    const std::string said = folder_ + "/libtorch";
    if (access(said.c_str(), R_OK) != 0 || read_file(said, size_t{1} << 16) != libtorch) {
      for (const fs::directory_entry& entry : fs::directory_iterator(folder_))
        fs::remove(entry.path());
      write_file(said, libtorch);
      remove_oldest(all, kMostPrograms, folder_);
    }
    remove_oldest(folder_, kMostFiles, said);
    const std::string text = to_text(graph);
    write_file(path, first_line(samples, text.size()) + text);
    return true;
  } catch (const std::exception& e) {
    spdlog::info("{} is not kept for the next run: {}", model_, e.what());
    return false;
  }
}

}  // namespace motley
