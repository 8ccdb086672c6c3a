// Names of operators and lists of a call's operands, which planning copies, compares and looks up
// for every node over and over.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/id.h"

namespace motley {

struct OpDef;

using ValueId = Id<struct ValueTag>;

// "aten::add.Tensor". Names of the op table (op.h) and of sources are kept once, so that they are
// copied and compared as pointers; others are text.
class OpName {
 public:
  OpName() = default;
  template <class Text, class = std::enable_if_t<std::is_convertible_v<Text, std::string_view>>>
  OpName(const Text& name) {  // NOLINT: as a string is made
    set(std::string_view(name));
  }

  const std::string& str() const;
  operator const std::string&() const { return str(); }  // NOLINT: as a string is read
  // Its entry in the op table; null: there is none.
  const OpDef* def() const { return known_ ? known_->def : nullptr; }
  // Whether it is motley::parameter, buffer, input or constant.
  bool is_source() const { return known_ && known_->is_source; }

  friend bool operator==(const OpName& a, const OpName& b) {
    return a.known_ == b.known_ && (a.known_ || a.str() == b.str());
  }
  template <class Text, class = std::enable_if_t<std::is_convertible_v<Text, std::string_view>>>
  friend bool operator==(const OpName& a, const Text& b) {
    return a.str() == std::string_view(b);
  }
  friend std::ostream& operator<<(std::ostream& out, const OpName& name) {
    return out << name.str();
  }

 private:
  struct Known {
    std::string name;
    const OpDef* def = nullptr;
    bool is_source = false;
  };
  void set(std::string_view name);

  static const Known* find(std::string_view name);

  const Known* known_ = nullptr;
  std::shared_ptr<const std::string> other_;  // unless it is known; null: empty
};

// A list of values that is short, mostly, and then takes no allocation.
class ValueList {
 public:
  void push_back(ValueId value) {
    if (size_ == few_.size()) many_.assign(few_.begin(), few_.end());
    if (size_ < few_.size())
      few_[size_] = value;
    else
      many_.push_back(value);
    ++size_;
  }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const ValueId* data() const { return size_ <= few_.size() ? few_.data() : many_.data(); }
  ValueId* begin() { return size_ <= few_.size() ? few_.data() : many_.data(); }
  ValueId* end() { return begin() + size_; }
  const ValueId* begin() const { return data(); }
  const ValueId* end() const { return data() + size_; }
  ValueId operator[](size_t i) const { return data()[i]; }
  ValueId back() const { return data()[size_ - 1]; }
  operator std::vector<ValueId>() const { return {begin(), end()}; }  // NOLINT: as a list is read

 private:
  std::array<ValueId, 6> few_;
  size_t size_ = 0;
  std::vector<ValueId> many_;  // all, where there are more
};

}  // namespace motley

template <>
struct fmt::formatter<motley::OpName> : fmt::formatter<fmt::string_view> {
  template <class Context>
  auto format(const motley::OpName& name, Context& context) const {
    return fmt::formatter<fmt::string_view>::format(name.str(), context);
  }
};
