#include "core/file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace motley {

std::string read_file(const std::string& path, size_t max_bytes) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0)
    throw user_error("file", "{}: {}; give a path to an existing file", path, std::strerror(errno));
  if (!S_ISREG(info.st_mode)) throw user_error("file", "{}: not a regular file", path);
  if (static_cast<size_t>(info.st_size) > max_bytes)
    throw user_error("file", "{}: {} bytes; at most {} are read", path, info.st_size, max_bytes);
  std::FILE* f = std::fopen(path.c_str(), "rb");
  if (!f) throw user_error("file", "{}: {}", path, std::strerror(errno));
  std::string content(static_cast<size_t>(info.st_size), '\0');
  content.resize(std::fread(content.data(), 1, content.size(), f));
  std::fclose(f);
  return content;
}

namespace {

bool write_to(int fd, const std::string& content) {
  for (size_t at = 0; at < content.size();) {
    const ssize_t n = write(fd, content.data() + at, content.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

bool closed(int fd, bool good) {
  const int why = errno;
  const bool done = close(fd) == 0;
  if (!good) errno = why;
  return good && done;
}

// Writes over what is there.
bool write_all(const std::string& path, const std::string& content) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  return fd >= 0 && closed(fd, write_to(fd, content));
}

// A new file beside `target`, of a name that nobody can know before; empty where none can be made.
std::string write_beside(const std::string& target, const std::string& content) {
  for (int attempt = 0; attempt < 16; ++attempt) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != sizeof number) return "";
    const std::string path = fmt::format("{}.tmp{:016x}", target, number);
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EEXIST) continue;
    if (fd < 0) return "";
    if (closed(fd, write_to(fd, content) && fsync(fd) == 0)) return path;
    const int why = errno;
    std::remove(path.c_str());
    errno = why;
    return "";
  }
  return "";
}

// The folder's entries are on disk too.
void sync_folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  const int fd = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);
  close(fd);
}

}  // namespace

void write_file(const std::string& path, const std::string& content) {
  struct stat info {};
  const bool exists = stat(path.c_str(), &info) == 0;
  if (exists && S_ISDIR(info.st_mode))
    throw user_error("file", "{}: cannot write: is a folder; name a file in it", path);
  std::error_code none;
  const bool link = std::filesystem::is_symlink(path, none);
  bool written;
  std::string temporary;
  if (exists ? !S_ISREG(info.st_mode) : link) {
    written = write_all(path, content);
  } else {
    const std::string target = link ? std::filesystem::canonical(path, none).string() : path;
    temporary = write_beside(target, content);
    written = !temporary.empty() && std::rename(temporary.c_str(), target.c_str()) == 0;
    if (written) sync_folder_of(target);
  }
  if (written) return;
  const std::string why = std::strerror(errno);
  if (!temporary.empty()) std::remove(temporary.c_str());
  throw user_error("file",
                   "{}: cannot write: {}; name a file in a folder that exists and is writable",
                   path, why);
}

Json parse_json(const std::string& text, const std::string& name, int max_depth) {
  // The depth is bounded before the recursive value is built.
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > max_depth)
        throw user_error("json", "{}: nested deeper than {} at byte {}", name, max_depth, i);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::exception& e) {
    std::string why = e.what();
    if (auto at = why.find("] "); at != std::string::npos) why = why.substr(at + 2);
    throw user_error("json", "{}: not valid JSON: {}", name, why);
  }
}

Fields::Fields(const Json& object, std::string module, std::string where)
    : object_(object), module_(std::move(module)), where_(std::move(where)) {
  if (!object_.is_object())
    throw user_error(module_.c_str(), "{}: is {}; give a JSON object", where_, object_.type_name());
}

UserError Fields::bad(const char* name, const std::string& why) const {
  return user_error(module_.c_str(), "{}: field '{}' {}", where_, name, why);
}

const Json* Fields::find(const char* name) const {
  auto it = object_.find(name);
  return it == object_.end() ? nullptr : &*it;
}

const Json& Fields::at(const char* name) const {
  const Json* value = find(name);
  if (!value) throw bad(name, "is missing");
  return *value;
}

std::string Fields::text(const char* name) const {
  const Json& value = at(name);
  if (!value.is_string()) throw bad(name, fmt::format("is {}; give a string", value.dump()));
  return value.get<std::string>();
}

double Fields::number(const char* name) const {
  const Json& value = at(name);
  if (!value.is_number() || !std::isfinite(value.get<double>()))
    throw bad(name, fmt::format("is {}; give a finite number", value.dump()));
  return value.get<double>();
}

int64_t Fields::integer(const char* name) const {
  const Json& value = at(name);
  if (!value.is_number_integer())
    throw bad(name, fmt::format("is {}; give an integer", value.dump()));
  return value.get<int64_t>();
}

const Json& Fields::array(const char* name) const {
  const Json& value = at(name);
  if (!value.is_array()) throw bad(name, fmt::format("is {}; give an array", value.type_name()));
  return value;
}

}  // namespace motley
