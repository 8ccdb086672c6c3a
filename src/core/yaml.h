// YAML that users hand us, which may be hostile, and that we write.
//
// yaml-cpp reads and writes it. It is called through C (yaml_library.h): the libtorch of wheels up
// to 2.6 has the strings of before C++11, motley is then compiled with those too, and a library of
// the system is not.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

struct YamlEmitter;

namespace motley {

// A value of a document that was read; copies share it.
class Yaml {
 public:
  // The first document of `text`. Throws UserError "[module] name: line 3: ..." if it is not valid
  // or names a key of a map twice, is larger than 16 MiB, deeper than 64 brackets or 512 columns,
  // or has more than a million values once aliases are followed.
  static Yaml parse(const std::string& text, const char* module, const std::string& name);

  Yaml() = default;  // what is missing
  explicit operator bool() const { return what_ != nullptr; }
  bool is_map() const { return is(Kind::map); }
  bool is_list() const { return is(Kind::list); }
  bool is_scalar() const { return is(Kind::scalar); }

  const std::string& scalar() const;              // as it is written; empty if it is none
  std::optional<bool> boolean() const;            // true, yes, on, false, no, off and the like
  size_t size() const;                            // of a map or a list
  Yaml operator[](const std::string& key) const;  // missing if it is no map
  Yaml operator[](size_t i) const;                // missing if it is no list
  const std::vector<std::pair<std::string, Yaml>>& entries() const;  // of a map, in order
  const std::vector<Yaml>& items() const;                            // of a list

 private:
  enum class Kind { null, scalar, list, map };
  struct Value {
    Kind kind = Kind::null;
    std::string scalar;
    std::vector<Yaml> items;
    std::vector<std::pair<std::string, Yaml>> entries;
  };
  class Builder;
  bool is(Kind kind) const { return what_ && what_->kind == kind; }

  std::shared_ptr<const Value> what_;
};

// Writes a document: begin_map(), key("a"), scalar("1"), end().
class YamlWriter {
 public:
  enum Style { block, flow };

  YamlWriter();
  ~YamlWriter();
  YamlWriter(const YamlWriter&) = delete;
  YamlWriter& operator=(const YamlWriter&) = delete;

  void begin_map(Style style = block) { begin(true, style); }
  void begin_list(Style style = block) { begin(false, style); }
  void end();  // of the innermost
  void key(const std::string& name);
  template <typename Scalar>
  void scalar(const Scalar& value) {
    text(fmt::format("{}", value));
  }
  template <typename Scalar>
  void entry(const std::string& name, const Scalar& value) {
    key(name);
    scalar(value);
  }
  std::string written() const;

 private:
  void begin(bool map, Style style);
  void text(const std::string& scalar);

  YamlEmitter* out_;
  std::vector<bool> open_;  // whether each is a map
};

}  // namespace motley
