// Graphs that were captured before and are read again: the same plan, whoever captured.
#include <cstdlib>
#include <set>

#include "cli.h"
#include "core/file.h"

namespace motley {
namespace {

namespace fs = std::filesystem;

class Kept : public Cli {
 protected:
  void SetUp() override {
    Cli::SetUp();
    const char* cache = std::getenv("XDG_CACHE_HOME");
    before_ = cache ? cache : "";
    setenv("XDG_CACHE_HOME", path("cache").c_str(), 1);
  }
  void TearDown() override {
    if (before_.empty())
      unsetenv("XDG_CACHE_HOME");
    else
      setenv("XDG_CACHE_HOME", before_.c_str(), 1);
    Cli::TearDown();
  }

  // The plan file for so many samples.
  std::string planned(int samples, const std::string& way = "") const {
    const Outcome o = motley(fmt::format(
        "plan {} --cluster local-mixed-4 --batch {} --engine spmd --time-limit 120 --json -o {}",
        kModel, samples, path("p.json")));
    EXPECT_EQ(o.code, 0) << way << o.err;
    if (o.code != 0) return {};
    captured_ = o.json()["capture_s"].get<double>() > 0;
    return read_file(path("p.json"));
  }
  std::set<std::string> files() const {
    std::set<std::string> names;
    if (fs::exists(path("cache")))
      for (const auto& entry : fs::recursive_directory_iterator(path("cache")))
        if (entry.is_regular_file()) names.insert(entry.path().filename());
    return names;
  }
  fs::path folder() const { return fs::directory_iterator(path("cache/motley"))->path(); }

  static constexpr const char* kModel = "gpt:layers=2,hidden=32,heads=4,vocab=64,seq=16";
  mutable bool captured_ = false;
  std::string before_;
};

TEST_F(Kept, TheSamePlan) {
  setenv("MOTLEY_CACHE", "off", 1);
  const std::string wanted = planned(8, "off: ");
  unsetenv("MOTLEY_CACHE");
  EXPECT_TRUE(captured_);
  EXPECT_TRUE(files().empty());
  EXPECT_EQ(planned(8, "first: "), wanted);
  EXPECT_TRUE(captured_);
  EXPECT_TRUE(files().contains(std::string(kModel) + "@8.txt"));
  EXPECT_EQ(planned(8, "again: "), wanted);
  EXPECT_FALSE(captured_);
  planned(16);
  EXPECT_TRUE(captured_);
}

// What is in a file that is not as it was written, or that is of another libtorch, is not used; nor
// is anything in a folder where others may write.
TEST_F(Kept, NotWhatOthersWrote) {
  const std::string wanted = planned(8), other = planned(16);
  EXPECT_NE(wanted, other);
  const fs::path eight = folder() / (std::string(kModel) + "@8.txt"),
                 sixteen = folder() / (std::string(kModel) + "@16.txt");
  const std::string kept = read_file(eight);
  for (const std::string& text :
       {std::string("{}"), kept.substr(0, kept.size() / 2), std::string(), read_file(sixteen)}) {
    write_file(eight, text);
    EXPECT_EQ(planned(8), wanted);
    EXPECT_TRUE(captured_);
  }
  planned(8);
  EXPECT_FALSE(captured_);
  fs::permissions(folder(), fs::perms::others_write, fs::perm_options::add);
  EXPECT_EQ(planned(8), wanted);
  EXPECT_TRUE(captured_);
  fs::permissions(folder(), fs::perms::others_write, fs::perm_options::remove);
  write_file(folder() / "libtorch", "/usr/lib/libtorch_cpu.so 1-2-3\n");
  EXPECT_EQ(planned(8), wanted);
  EXPECT_TRUE(captured_);
  planned(8);
  EXPECT_FALSE(captured_);
}

// A folder that cannot be made, and names that are no files of their own.
TEST_F(Kept, Nowhere) {
  write_file(path("cache"), "a file");
  EXPECT_FALSE(planned(8).empty());
  fs::remove(path("cache"));
  expect_mistake("plan gpt:../../x=1 --cluster local-mixed-4 --batch 8", "gpt:../../x=1");
  EXPECT_TRUE(files().empty());
}

}  // namespace
}  // namespace motley
