#include "core/yaml_library.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <cstdio>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr size_t kDeepest = 128;
constexpr int64_t kMostNodes = 1 << 20;  // aliases followed

// Tells a listener what the parser finds, node by node: yaml-cpp's own nodes take twice as long. From
// the first anchor on, nodes are kept for aliases to tell them again. After the first thing wrong
// nothing is told, but the text is read on: where it is not YAML, that is said.
class Walk final : public YAML::EventHandler {
 public:
  explicit Walk(const YamlListener& listener) : to_(listener) {}
  const std::string& wrong() const { return wrong_; }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    hear(Kind::null, mark.line + 1, "", anchor);
  }
  void OnScalar(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                const std::string& text) override {
    hear(Kind::scalar, mark.line + 1, text, anchor);
  }
  void OnAlias(const YAML::Mark&, YAML::anchor_t anchor) override {
    if (!anchors_.empty()) kept_.push_back({Kind::alias, 0, "", anchor});
    again(anchor);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    hear(Kind::list, mark.line + 1, "", anchor);
  }
  void OnSequenceEnd() override { hear_end(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    hear(Kind::map, mark.line + 1, "", anchor);
  }
  void OnMapEnd() override { hear_end(); }

 private:
  enum class Kind : uint8_t { null, scalar, list, map, end, alias };
  struct Event {
    Kind kind;
    int line;
    std::string text;
    YAML::anchor_t anchor;  // of an alias
  };
  struct Anchored {
    int line;
    size_t begin, end;  // in kept_; end 0: it is still open
  };
  struct Open {  // a list, or a map
    bool map;
    bool key;  // is next
    std::set<std::string> seen;
  };

  void hear(Kind kind, int line, const std::string& text, YAML::anchor_t anchor) {
    const bool opens = kind == Kind::list || kind == Kind::map;
    if (anchor != 0) anchors_[anchor] = {line, kept_.size(), opens ? 0 : kept_.size() + 1};
    if (opens) anchors_open_.push_back(anchor);
    if (!anchors_.empty()) kept_.push_back({kind, line, text, 0});
    tell(kind, line, text);
  }
  void hear_end() {
    if (!anchors_.empty()) kept_.push_back({Kind::end, 0, "", 0});
    if (anchors_open_.back() != 0) anchors_[anchors_open_.back()].end = kept_.size();
    anchors_open_.pop_back();
    tell(Kind::end, 0, "");
  }

  bool key_is_next() const { return !open_.empty() && open_.back().map && open_.back().key; }
  void no_key(int line) {
    wrong_ = "line " + std::to_string(line) + ": a key is not a single value";
  }

  void again(YAML::anchor_t anchor) {
    const Anchored& what = anchors_.at(anchor);
    if (what.end == 0 && wrong_.empty()) {
      if (key_is_next())
        no_key(what.line);
      else
        wrong_ = "nested too deep, or an alias of itself";
    }
    for (size_t i = what.begin; i < what.end && wrong_.empty(); ++i) {
      const Event& event = kept_[i];
      if (event.kind == Kind::alias)
        again(event.anchor);
      else
        tell(event.kind, event.line, event.text);
    }
  }

  void tell(Kind kind, int line, const std::string& text) {
    if (!wrong_.empty()) return;
    if (kind == Kind::end) {
      open_.pop_back();
      return to_.end(to_.self);
    }
    if (key_is_next()) return key(kind, line, text);
    if (open_.size() > kDeepest)
      wrong_ = "nested too deep, or an alias of itself";
    else if (++nodes_ > kMostNodes)
      wrong_ = "more than a million values";
    if (!wrong_.empty()) return;
    if (!open_.empty()) open_.back().key = true;
    if (kind == Kind::scalar) return to_.scalar(to_.self, text.data(), text.size());
    if (kind == Kind::null) return to_.null(to_.self);
    open_.push_back({kind == Kind::map, true, {}});
    kind == Kind::map ? to_.begin_map(to_.self) : to_.begin_list(to_.self);
  }

  void key(Kind kind, int line, const std::string& text) {
    if (kind != Kind::scalar) return no_key(line);
    if (!open_.back().seen.insert(text).second) {
      wrong_ = "line " + std::to_string(line) + ": '" + text.substr(0, 60) + "' is given twice";
      return;
    }
    open_.back().key = false;
    to_.key(to_.self, text.data(), text.size());
  }

  const YamlListener& to_;
  std::vector<Open> open_;
  int64_t nodes_ = 0;
  std::string wrong_;
  std::map<YAML::anchor_t, Anchored> anchors_;
  std::vector<YAML::anchor_t> anchors_open_;  // of what is open; 0: it has none
  std::vector<Event> kept_;
};

}  // namespace

struct YamlEmitter {
  YAML::Emitter out;
};

extern "C" {

int yaml_read(const char* text, size_t size, const YamlListener* listener, char* why, size_t room) {
  try {
    std::istringstream stream(std::string(text, size));
    YAML::Parser parser(stream);
    Walk walk(*listener);
    if (!parser.HandleNextDocument(walk)) listener->null(listener->self);
    if (walk.wrong().empty()) return 0;
    std::snprintf(why, room, "%s", walk.wrong().c_str());
  } catch (const YAML::Exception& e) {
    std::snprintf(why, room, "line %d: not valid YAML: %s", e.mark.line + 1, e.msg.c_str());
  } catch (const std::exception& e) {
    std::snprintf(why, room, "%s", e.what());
  }
  return 1;
}

YamlEmitter* yaml_emitter(void) { return new YamlEmitter; }

void yaml_begin(YamlEmitter* to, bool map, bool flow) {
  if (flow) to->out << YAML::Flow;
  if (map)
    to->out << YAML::BeginMap;
  else
    to->out << YAML::BeginSeq;
}

void yaml_end(YamlEmitter* to, bool map) {
  if (map)
    to->out << YAML::EndMap;
  else
    to->out << YAML::EndSeq;
}

void yaml_key(YamlEmitter* to, const char* text, size_t size) {
  to->out << YAML::Key << std::string(text, size) << YAML::Value;
}

void yaml_scalar(YamlEmitter* to, const char* text, size_t size) {
  to->out << std::string(text, size);
}

const char* yaml_text(YamlEmitter* of) { return of->out.c_str(); }

void yaml_free(YamlEmitter* of) { delete of; }

}  // extern "C"
