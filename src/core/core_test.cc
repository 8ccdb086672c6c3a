#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <vector>

#include "core/deadline.h"
#include "core/error.h"
#include "core/file.h"
#include "core/limits.h"
#include "core/parallel.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/rng.h"
#include "core/units.h"

namespace motley {
namespace {

using ::testing::HasSubstr;

template <typename F>
std::string message_of(F f) {
  try {
    f();
  } catch (const UserError& e) {
    return e.what();
  }
  return "no error";
}

TEST(Units, ParsesAndRefuses) {
  EXPECT_DOUBLE_EQ(parse_quantity("10.4 Gbps", "bandwidth", "x"), 1.3e9);
  EXPECT_DOUBLE_EQ(parse_quantity("15.7TFLOPS", "flops", "x"), 15.7e12);
  EXPECT_DOUBLE_EQ(parse_quantity("16 GiB", "bytes", "x"), 17179869184.);
  EXPECT_DOUBLE_EQ(parse_quantity("30 us", "time", "x"), 3e-5);
  EXPECT_DOUBLE_EQ(parse_quantity("5e9", "bandwidth", "x"), 5e9);
  EXPECT_EQ(message_of([] {
              parse_quantity("fast", "bandwidth", "link.bandwidth");
            }).rfind("[units] link.bandwidth is 'fast': not a number", 0),
            0u);
  EXPECT_THAT(message_of([] { parse_quantity("3 Gbbs", "bandwidth", "b"); }),
              HasSubstr("unknown unit 'Gbbs'"));
  EXPECT_THAT(message_of([] { parse_quantity("-3 GB/s", "bandwidth", "b"); }),
              HasSubstr("negative"));
  EXPECT_THAT(message_of([] { parse_quantity("inf", "flops", "b"); }), HasSubstr("finite"));
}

TEST(Ranges, Formats) {
  EXPECT_EQ(format_ranges({}), "");
  EXPECT_EQ(format_ranges({4}), "4");
  EXPECT_EQ(format_ranges({0, 1, 2, 5, 7, 8}), "0-2, 5, 7-8");
}

TEST(Units, Formats) {
  EXPECT_EQ(format_seconds(0.00125), "1.25 ms");
  EXPECT_EQ(format_bytes(3. * 1024 * 1024), "3 MiB");
  EXPECT_EQ(format_flops(12.4e12), "12.4 TFLOP");
}

TEST(File, WritesWholeFilesOnly) {
  auto path = std::filesystem::temp_directory_path() / fmt::format("motley_core_{}", getpid());
  write_file(path, "hello");
  EXPECT_EQ(read_file(path), "hello");
  EXPECT_THAT(message_of([&] { read_file(path, 3); }), HasSubstr("at most 3"));
  std::filesystem::remove(path);
  EXPECT_THAT(message_of([&] { read_file(path); }), HasSubstr("No such file"));
  EXPECT_THAT(message_of([] { write_file("/nonexistent/x", ""); }), HasSubstr("cannot write"));
  EXPECT_THAT(message_of([] { read_file("/tmp"); }), HasSubstr("not a regular file"));
  EXPECT_THAT(message_of([] { write_file("/tmp", ""); }), HasSubstr("is a folder"));
}

TEST(File, ReplacesRegularFilesOnly) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / fmt::format("motley_links_{}", getpid());
  fs::create_directory(folder);
  fs::create_symlink("target", folder / "link");
  write_file(folder / "link", "first");
  write_file(folder / "link", "second");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "target"), "second");
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  write_file(pipe, "through");
  char text[8] = {};
  EXPECT_EQ(read(reader, text, 7), 7);
  EXPECT_STREQ(text, "through");
  close(reader);
  EXPECT_TRUE(fs::is_fifo(pipe));
  fs::remove_all(folder);
}

TEST(Json, BoundsDepthAndNamesPlace) {
  EXPECT_THAT(message_of([] { parse_json(std::string(1000000, '['), "deep.json"); }),
              HasSubstr("deep.json: nested deeper than 64"));
  EXPECT_THAT(message_of([] { parse_json("{\"a\":", "cut.json"); }),
              HasSubstr("cut.json: not valid JSON"));
  Json j = parse_json(R"({"n": 1.5, "s": "x"})", "j");
  Fields f(j, "test", "j");
  EXPECT_THAT(message_of([&] { f.integer("n"); }), HasSubstr("field 'n' is 1.5; give an integer"));
  EXPECT_THAT(message_of([&] { f.text("missing"); }), HasSubstr("field 'missing' is missing"));
}

TEST(Rng, IsReproducible) {
  Rng a(7), b(7);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(a.below(1000), b.below(1000));
}

TEST(Parallel, DoesAllOnceAndPassesOnWhatIsThrown) {
  for (int threads : {0, 1, 2, 7}) {
    std::vector<std::atomic<int>> done(100);
    parallel_for(100, threads, [&](int i) { ++done[i]; });
    for (const auto& times : done) EXPECT_EQ(times, 1);
    EXPECT_THAT(message_of([&] {
                  parallel_for(100, threads, [](int i) {
                    if (i % 10 == 3) throw user_error("test", "thrown");
                  });
                }),
                HasSubstr("thrown"));
  }
  parallel_for(0, 2, [](int) { FAIL(); });
}

TEST(Parallel, LoopsInLoops) {
  start_threads(3);
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> done = 0;
    parallel_for(4, 3, [&](int i) {
      parallel_for(5, 1 + i, [&](int) { parallel_for(3, 2, [&](int) { ++done; }); });
    });
    ASSERT_EQ(done, 4 * 5 * 3);
  }
}

// Threads of a process are not in its forks.
TEST(Parallel, InAForkedProcess) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not follow forks of processes with threads";
#endif
  parallel_for(4, 4, [](int) {});
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> done = 0;
    for (int round = 0; round < 20; ++round) parallel_for(10, 4, [&](int) { ++done; });
    _exit(done == 200 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Check, NamesThePlace) {
  try {
    MOTLEY_CHECK(1 == 2, "one is {}", 1);
    FAIL();
  } catch (const InternalError& e) {
    EXPECT_THAT(e.what(), HasSubstr("1 == 2: one is 1"));
  }
}

TEST(Printable, ControlCharactersAreShown) {
  EXPECT_EQ(printable("plain \xc3\xb6 \xe2\x82\xac\n\tx"), "plain \xc3\xb6 \xe2\x82\xac\n\tx");
  EXPECT_EQ(printable("a\nb", true), "a\\x0ab");
  EXPECT_EQ(printable("\x1b[31m\x07\x7f\r"), "\\x1b[31m\\x07\\x7f\\x0d");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\xc2\\x9b31m");  // CSI as one character
  EXPECT_EQ(printable("\xe2\x80\xae"
                      "abc"),
            "\\xe2\\x80\\xaeabc");  // text from right to left
  const std::string cut = one_line("first" + std::string(100000, '\n') + "last");
  EXPECT_LT(cut.size(), 9000u);  // four characters for each line end
  EXPECT_EQ(cut.substr(0, 9) + cut.substr(cut.size() - 4), "first\\x0alast");
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");  // not UTF-8
  EXPECT_TRUE(is_printable("V100 x 2"));
  EXPECT_FALSE(is_printable("a\tb"));
}

TEST(Deadline, CountsWork) {
  const Deadline never;
  never.check(1 << 20);
  EXPECT_EQ(never.work(), 0);
  EXPECT_FALSE(never.near());
  const Deadline whole(Deadline::Limits{.work = 1000});
  const Deadline half = whole.part(0.5);
  half.check(300);
  EXPECT_FALSE(half.near());  // 300 of 500
  half.spend(1);
  EXPECT_TRUE(half.near());
  EXPECT_FALSE(whole.near());
  half.check(199);
  EXPECT_FALSE(half.over());
  EXPECT_THROW(half.check(1), TimeIsUp);
  EXPECT_EQ(half.work(), 501);
  EXPECT_EQ(whole.work(), 501);
  // What follows has half of the rest, and counts from there.
  const Deadline next = whole.part(0.5);
  EXPECT_EQ(next.work(), 0);
  next.spend(249);
  EXPECT_FALSE(next.over());
  next.spend(1);
  EXPECT_TRUE(next.over());
  EXPECT_FALSE(whole.over());
  // A count of its own under the same limits.
  const Deadline counting = whole.counting();
  counting.spend(249);
  EXPECT_EQ(counting.work(), 249);
  EXPECT_FALSE(counting.over());
  counting.spend(1);
  EXPECT_TRUE(counting.over());
  EXPECT_TRUE(whole.over());
}

TEST(Deadline, IsInterrupted) {
  std::atomic<bool> interrupted = false;
  const Deadline whole(Deadline::Limits{.interrupted = &interrupted});
  const Deadline part = whole.part(0.5).counting();
  part.check(1 << 30);
  interrupted = true;
  EXPECT_TRUE(part.near());
  EXPECT_THROW(part.check(), TimeIsUp);
  EXPECT_THROW(whole.check(), TimeIsUp);
}

TEST(Units, Limits) {
  EXPECT_THROW(parse_quantity("1e308 Gbps", "bandwidth", "f"), UserError);
  EXPECT_NO_THROW(check_range(0, "time", "f"));
  EXPECT_NO_THROW(check_range(1e12, "flops", "f"));
  EXPECT_THROW(check_range(1e4, "time", "f"), UserError);
  EXPECT_THROW(check_range(0.1, "bandwidth", "f"), UserError);
  EXPECT_NO_THROW(check_range(1e300, "number", "f"));
}

}  // namespace
}  // namespace motley
