#include "core/file.h"

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

bool write_all(const std::string& path, const std::string& content) {
  std::FILE* f = std::fopen(path.c_str(), "wb");
  if (!f) return false;
  const bool written = std::fwrite(content.data(), 1, content.size(), f) == content.size();
  return std::fclose(f) == 0 && written;
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
    temporary = fmt::format("{}.tmp{}", target, getpid());
    written = write_all(temporary, content) && std::rename(temporary.c_str(), target.c_str()) == 0;
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

Fields::Fields(const Json& object, std::string room, std::string where)
    : object_(object), room_(std::move(room)), where_(std::move(where)) {
  if (!object_.is_object())
    throw user_error(room_.c_str(), "{}: is {}; give a JSON object", where_, object_.type_name());
}

UserError Fields::bad(const char* name, const std::string& why) const {
  return user_error(room_.c_str(), "{}: field '{}' {}", where_, name, why);
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
