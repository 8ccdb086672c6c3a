#include "core/terminal.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "core/error.h"
#include "core/printable.h"

namespace motley {

namespace {

int failure = 0;   // errno of the first write that failed
std::string rest;  // the first bytes of a character whose others have not come yet

// Bytes at the end that may begin a UTF-8 character.
size_t unfinished(const std::string& text) {
  for (size_t n = 1; n <= 3 && n <= text.size(); ++n) {
    const auto c = static_cast<unsigned char>(text[text.size() - n]);
    if (c >= 0xc0) return n < (c >= 0xf0 ? 4u : c >= 0xe0 ? 3u : 2u) ? n : 0;
    if (c < 0x80) return 0;
  }
  return 0;
}

bool write_all(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = write(STDOUT_FILENO, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (failure == 0) failure = n < 0 ? errno : EIO;
      return false;
    }
    at += static_cast<size_t>(n);
  }
  return true;
}

ssize_t write_printable(void*, const char* data, size_t size) {
  std::string text = rest + std::string(data, size);
  const size_t keep = unfinished(text);
  rest = text.substr(text.size() - keep);
  text.resize(text.size() - keep);
  return write_all(printable(text)) ? static_cast<ssize_t>(size) : 0;
}

}  // namespace

int fail(int code, const std::string& message) {
  std::fprintf(stderr, "motley: %s\n", printable(message, /*line=*/true).c_str());
  return code;
}

void leave(int code) {
  finish_output();
  std::fflush(nullptr);
  std::_Exit(code);
}

void end_process(int code) {
#ifdef __SANITIZE_ADDRESS__
  std::exit(code);
#else
  std::fflush(nullptr);
  std::_Exit(code);
#endif
}

void guard_output() {
  std::FILE* guarded = fopencookie(nullptr, "w", {nullptr, write_printable, nullptr, nullptr});
  if (guarded == nullptr) return;
  if (isatty(STDOUT_FILENO) != 0) std::setvbuf(guarded, nullptr, _IOLBF, BUFSIZ);
  stdout = guarded;
}

void finish_output() {
  const bool flushed = std::fflush(stdout) == 0;
  if (!rest.empty()) write_all(printable(rest));
  rest.clear();
  if (!flushed && failure == 0) failure = errno;
  if (failure != 0)
    throw user_error("motley", "standard output cannot be written: {}", std::strerror(failure));
}

void require_writable(const std::string& option, const std::string& path) {
  struct stat info {};
  const auto fail = [&](const std::string& why) {
    return user_error("file",
                      "{} {}: cannot write: {}; name a file in a folder that exists and is "
                      "writable",
                      option, path, why);
  };
  if (stat(path.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) throw fail("is a folder");
    // A regular file is replaced, for which its folder has to be writable.
    if (!S_ISREG(info.st_mode) && access(path.c_str(), W_OK) != 0) throw fail(std::strerror(errno));
    if (!S_ISREG(info.st_mode)) return;
  } else if (errno != ENOENT) {
    throw fail(std::strerror(errno));
  }
  std::filesystem::path target = path;
  std::error_code none;
  if (std::filesystem::is_symlink(target, none)) {
    const std::filesystem::path there = std::filesystem::weakly_canonical(target, none);
    if (!none) target = there;
  }
  const std::string folder = target.has_parent_path() ? target.parent_path().string() : ".";
  if (stat(folder.c_str(), &info) != 0) throw fail(std::strerror(errno));
  if (!S_ISDIR(info.st_mode)) throw fail(folder + " is not a folder");
  if (access(folder.c_str(), W_OK | X_OK) != 0) throw fail(std::strerror(errno));
}

}  // namespace motley
