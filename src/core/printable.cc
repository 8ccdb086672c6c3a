#include "core/printable.h"

#include <fmt/format.h>

namespace motley {

namespace {

// Bytes of the UTF-8 character at the front; 0 if there is none.
size_t character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t size = first < 0x80    ? 1
                      : first < 0xc2  ? 0
                      : first < 0xe0  ? 2
                      : first < 0xf0  ? 3
                      : first <= 0xf4 ? 4
                                      : 0;
  if (size == 0 || size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i)
    if (byte(i) >> 6 != 2) return 0;
  return size;
}

bool is_control(std::string_view c) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(c[i]); };
  if (c.size() == 1) return byte(0) < 0x20 || byte(0) == 0x7f;
  if (c.size() == 2) return byte(0) == 0xc2 && byte(1) < 0xa0;
  // Marks that turn the direction of text, and separators of lines.
  return c.size() == 3 && byte(0) == 0xe2 &&
         ((byte(1) == 0x80 && byte(2) >= 0xa8 && byte(2) <= 0xae) ||
          (byte(1) == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9));
}

}  // namespace

std::string printable(std::string_view text, bool line) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    size_t plain = 0;  // as most text is
    while (plain < text.size() && text[plain] >= 0x20 && text[plain] < 0x7f) ++plain;
    out += text.substr(0, plain);
    text.remove_prefix(plain);
    if (text.empty()) break;
    const size_t size = character(text);
    const std::string_view c = text.substr(0, size == 0 ? 1 : size);
    const bool layout = !line && (c == "\n" || c == "\t");
    if (layout || (size > 0 && !is_control(c)))
      out += c;
    else
      for (char byte : c) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    text.remove_prefix(c.size());
  }
  return out;
}

bool is_printable(std::string_view name) { return printable(name, true) == name; }

}  // namespace motley
