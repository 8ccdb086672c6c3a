// What goes wrong around a run: workers that hang, strangers at its sockets, damaged checkpoints,
// two runs in one folder, signals, full disks, hostile names and numbers. Each ends with one line.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <thread>

#include "comm/store.h"
#include "core/file.h"
#include "core/rng.h"
#include "runtime/checkpoint.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
void pause(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

struct Outcome {
  int code = -1;
  std::string out, err;  // err: without the lines of steps
  int64_t steps = 0;
};

std::string without_steps(const std::string& text, int64_t* steps) {
  std::istringstream lines(text);
  std::string rest;
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("step "))
      ++*steps;
    else
      rest += line + "\n";
  return rest;
}

class Hostile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / fmt::format("motley_hostile_{}", getpid());
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return folder_ / name; }

  // The shell's: `arguments` may redirect.
  Outcome motley(const std::string& arguments) const {
    const std::string command =
        fmt::format("cd {} && (timeout 120 {}/motley {}) >{} 2>{} </dev/null", MOTLEY_SOURCE_DIR,
                    MOTLEY_BINARY_DIR, arguments, path("out"), path("err"));
    const int status = std::system(command.c_str());
    Outcome o;
    o.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    o.out = read_file(path("out"));
    o.err = without_steps(read_file(path("err")), &o.steps);
    return o;
  }
  void expect_mistake(const std::string& arguments, const std::string& message) const {
    const Outcome o = motley(arguments);
    EXPECT_EQ(o.code, 2) << arguments << "\n" << o.err;
    EXPECT_THAT(o.err, HasSubstr(message)) << arguments;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << arguments << "\n" << o.err;
  }

  std::string plan() {
    const std::string file = path("plan.json");
    if (!fs::exists(file)) {
      const Outcome made = motley(
          "plan mlp:layers=3,hidden=32,in=16,classes=8 --cluster local-mixed-4 --batch 32 "
          "--strategy dp-cp -o " +
          file);
      EXPECT_EQ(made.code, 0) << made.err;
    }
    return file;
  }

  // A run in the background.
  struct Run {
    pid_t pid;
    std::string err;
    Clock::time_point start = Clock::now();
  };
  Run start(const std::string& arguments) {
    Run run{0, path(fmt::format("err{}", ++runs_))};
    const std::string program = std::string(MOTLEY_BINARY_DIR) + "/motley";
    const std::string command =
        fmt::format("exec {} {} >/dev/null 2>{} </dev/null", program, arguments, run.err);
    run.pid = fork();
    if (run.pid == 0) {
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
    return run;
  }
  // Waits for a step; false if there is none within a minute.
  bool runs(const Run& run) {
    for (int i = 0; i < 600; ++i) {
      if (fs::exists(run.err) && read_file(run.err).find("step ") != std::string::npos) return true;
      pause(100);
    }
    return false;
  }
  Outcome end_of(const Run& run) {
    int status = 0;
    waitpid(run.pid, &status, 0);
    Outcome o;
    o.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    o.err = without_steps(read_file(run.err), &o.steps);
    return o;
  }
  // Children of a process that are named as workers, ascending.
  static std::vector<pid_t> workers_of(pid_t pid) {
    std::ifstream file(fmt::format("/proc/{}/task/{}/children", pid, pid));
    std::vector<pid_t> list;
    for (pid_t child; file >> child;) {
      std::string name;
      std::ifstream(fmt::format("/proc/{}/comm", child)) >> name;
      if (name.starts_with("motley-rank-")) list.push_back(child);
    }
    std::sort(list.begin(), list.end());
    return list;
  }

  fs::path folder_;
  int runs_ = 0;
};

TEST_F(Hostile, AStoppedWorkerIsNamedAndAllEnd) {
  setenv("MOTLEY_HANG_SECONDS", "1.5", 1);
  for (int stopped : {2, 0}) {
    const Run run = start("run " + plan() + " --steps 1000000");
    ASSERT_TRUE(runs(run));
    const std::vector<pid_t> workers = workers_of(run.pid);
    ASSERT_EQ(workers.size(), 4u);
    const auto stop = Clock::now();
    kill(workers[static_cast<size_t>(stopped)], SIGSTOP);
    const Outcome o = end_of(run);
    EXPECT_LT(since(stop), 15);
    EXPECT_EQ(o.code, 1);
    EXPECT_THAT(o.err, HasSubstr(fmt::format("lost rank {} during", stopped)));
    EXPECT_THAT(o.err, HasSubstr("it has said nothing for 1.5 s"));
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    for (pid_t worker : workers) EXPECT_FALSE(fs::exists(fmt::format("/proc/{}", worker)));
  }
  unsetenv("MOTLEY_HANG_SECONDS");
  setenv("MOTLEY_HANG_SECONDS", "soon", 1);
  expect_mistake("run " + plan(), "MOTLEY_HANG_SECONDS is 'soon'");
  unsetenv("MOTLEY_HANG_SECONDS");
}

// Its thread of the watch goes on.
TEST_F(Hostile, AWorkerThatDoesNothingIsNamedAndAllEnd) {
  setenv("MOTLEY_HANG_SECONDS", "1.5", 1);
  for (int hangs : {2, 0}) {
    setenv("MOTLEY_FAULTS", fmt::format("hang:step:{}:3", hangs).c_str(), 1);
    const Run run = start("run " + plan() + " --steps 1000000");
    const auto begun = Clock::now();
    const Outcome o = end_of(run);
    EXPECT_LT(since(begun), 30);
    EXPECT_EQ(o.code, 1);
    EXPECT_THAT(o.err, HasSubstr(fmt::format("lost rank {} during", hangs)));
    EXPECT_THAT(o.err, HasSubstr("it has neither computed nor waited for others for 1.5 s"));
  }
  unsetenv("MOTLEY_FAULTS");
  unsetenv("MOTLEY_HANG_SECONDS");
}

// A rank that dies between the store and the connections, without our launcher.
TEST_F(Hostile, WhoDiesWhileTheOthersConnectIsNamed) {
  const int port = [] {
    StoreServer any("127.0.0.1", 0, "t", true);
    return any.port();
  }();
  setenv("WORLD_SIZE", "4", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  setenv("MOTLEY_TOKEN", "secret", 1);
  setenv("RANK", "0", 1);
  const auto begin = Clock::now();
  const Run run = start("run " + plan() + " --steps 3");
  // Rank 1 comes to the store as a worker does, says it is there, and is gone.
  auto store = connect_store("127.0.0.1", port, "secret", std::chrono::seconds(30));
  for (int r : {1, 2, 3}) {
    const std::vector<uint8_t> gloo = {'g', 'l', 'o', 'o'};
    store->set(fmt::format("motley//here/{}", r), gloo);
  }
  const pid_t rank1 = fork();
  if (rank1 == 0) {
    Watch::start(1, "127.0.0.1", port, "secret");
    pause(1500);
    _exit(0);
  }
  waitpid(rank1, nullptr, 0);
  const Outcome o = end_of(run);
  for (const char* name : {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MOTLEY_TOKEN", "RANK"})
    unsetenv(name);
  EXPECT_EQ(o.code, 1);
  EXPECT_THAT(o.err, HasSubstr("lost rank 1 while connecting: it ended or was killed"));
  EXPECT_LT(since(begin), 40);
}

// A connection of a stranger that says nothing, half a message, nonsense, or the wrong token.
TEST_F(Hostile, StrangersHoldNobodyUp) {
  StoreServer server("127.0.0.1", 0, "secret", true);
  std::vector<int> strangers;
  const std::vector<std::string> words = {"",
                                          std::string("\0\0\0", 3),
                                          std::string("\0\0\0\x20mot", 7),
                                          std::string("\xff\xff\xff\xffx", 5),
                                          "GET / HTTP/1.1\r\n\r\n",
                                          std::string(100000, 'a')};
  for (const std::string& text : words) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(server.port()));
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    if (!text.empty()) {
      EXPECT_GT(send(fd, text.data(), text.size(), MSG_NOSIGNAL), 0);
    }
    strangers.push_back(fd);
  }
  const auto start = Clock::now();
  auto store = connect_store("127.0.0.1", server.port(), "secret", std::chrono::seconds(5));
  store->set("key", std::vector<uint8_t>{1, 2, 3});
  EXPECT_EQ(store->get("key"), (std::vector<uint8_t>{1, 2, 3}));
  EXPECT_EQ(store->add("n", 5) + store->add("n", -2), 8);
  EXPECT_TRUE(store->check({"key", "n"}));
  EXPECT_FALSE(store->check({"key", "other"}));
  EXPECT_TRUE(store->deleteKey("key"));
  EXPECT_EQ(store->getNumKeys(), 1);
  EXPECT_THROW(store->wait({"never"}, std::chrono::milliseconds(100)), std::runtime_error);
  EXPECT_LT(since(start), 3);
  EXPECT_THROW(connect_store("127.0.0.1", server.port(), "secre", std::chrono::seconds(5)),
               std::runtime_error);
  EXPECT_THROW(connect_store("127.0.0.1", server.port(), "secret1", std::chrono::seconds(5)),
               std::runtime_error);
  // Who gives no token is shown out.
  pause(5500);
  for (int fd : strangers) {
    char byte;
    EXPECT_LE(recv(fd, &byte, 1, MSG_DONTWAIT), 0);
    EXPECT_NE(errno, EAGAIN);
    close(fd);
  }
  EXPECT_EQ(store->add("n", 1), 4);
}

// Addresses of a process's listening sockets, in the hexadecimal of /proc.
TEST_F(Hostile, LocalRunsListenOnLoopbackAlone) {
  const Run run = start("run " + plan() + " --steps 1000000");
  ASSERT_TRUE(runs(run));
  std::vector<pid_t> all = workers_of(run.pid);
  all.push_back(run.pid);
  int listening = 0;
  for (pid_t pid : all)
    for (const char* table : {"tcp", "tcp6"}) {
      std::vector<std::string> inodes;
      for (const auto& entry : fs::directory_iterator(fmt::format("/proc/{}/fd", pid))) {
        std::error_code gone;
        const std::string target = fs::read_symlink(entry, gone);
        if (target.starts_with("socket:[")) inodes.push_back(target.substr(8, target.size() - 9));
      }
      std::ifstream file(fmt::format("/proc/{}/net/{}", pid, table));
      for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string number, local, remote, state, word, inode;
        words >> number >> local >> remote >> state;
        for (int i = 0; i < 6; ++i) words >> inode;
        if (state != "0A" || std::find(inodes.begin(), inodes.end(), inode) == inodes.end())
          continue;
        ++listening;
        EXPECT_TRUE(local.starts_with("0100007F:")) << table << " " << local;
      }
    }
  EXPECT_GE(listening, 1);
  kill(run.pid, SIGTERM);
  EXPECT_EQ(end_of(run).code, 143);
}

TEST_F(Hostile, DamagedCheckpointsAreRefused) {
  const std::string folder = path("saved"), file = folder + "/step-0000000000001/rank-0.pt";
  const std::string run = "run " + plan() + " --steps 1 --checkpoint " + folder;
  ASSERT_EQ(motley(run).code, 0);
  const std::string good = read_file(file);
  EXPECT_NO_THROW(read_archive(good));
  // Any byte of any record, and any shorter file.
  Rng rng(1);
  int refused = 0;
  const size_t directory = good.rfind(std::string("PK\x01\x02", 4));
  for (int i = 0; i < 300; ++i) {
    std::string bad = good;
    if (i % 3 == 0)
      bad.resize(static_cast<size_t>(rng.below(static_cast<int64_t>(good.size()))));
    else
      bad[static_cast<size_t>(rng.below(static_cast<int64_t>(directory)))] ^=
          static_cast<char>(1 << rng.below(8));
    try {
      read_archive(bad);
    } catch (const std::exception&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 200);  // the others are padding between records
  const auto expect_refused = [&](const std::string& command) {
    const Outcome o = motley(command);
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_THAT(o.err, AllOf(HasSubstr("that of step 1 is damaged ("),
                             HasSubstr("no checkpoint in it can be read; remove it")));
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 2) << o.err;
  };
  for (const std::string& bad : {good.substr(0, good.size() / 2), good.substr(1), std::string()}) {
    write_file(file, bad);
    expect_refused(run);
  }
  // Records that are too short for their tensors, or missing, in an archive that is sound.
  for (const char* change : {"d[:-8]", "b''", "None"}) {
    write_file(file, good);
    const std::string script = fmt::format(
        "import zipfile,shutil; z=zipfile.ZipFile('{0}'); names=z.namelist(); "
        "n0=max((n for n in names if '/data/' in n), key=lambda n: z.getinfo(n).file_size); "
        "w=zipfile.ZipFile('{0}.new','w'); "
        "[w.writestr(n,x) for n,d in [(n,z.read(n)) for n in names] "
        "for x in [{1} if n==n0 else d] if x is not None]; w.close(); "
        "shutil.move('{0}.new','{0}')",
        file, change);
    ASSERT_EQ(std::system(("/usr/bin/python3 -c \"" + script + "\"").c_str()), 0);
    expect_refused(run);
  }
  write_file(file, good);
  EXPECT_EQ(motley(run).code, 0);
}

TEST_F(Hostile, TheNewestCheckpointThatCanBeReadIsUsed) {
  const std::string folder = path("saved"), saving = " --json --checkpoint " + folder;
  const auto of = [&](int step, const char* file) {
    return fmt::format("{}/step-{:013}/{}", folder, step, file);
  };
  ASSERT_EQ(motley("run " + plan() + " --steps 5 --checkpoint-every 1" + saving).code, 0);
  for (int step : {1, 2}) EXPECT_FALSE(fs::exists(of(step, ""))) << step;
  for (int step : {3, 4, 5}) EXPECT_TRUE(fs::exists(of(step, "rank-1.pt"))) << step;
  // Goes on for a step behind the newest one but so many, each refused by a line.
  const auto expect_step = [&](int step, int refused) {
    const Outcome o = motley("run " + plan() + " --steps 1" + saving);
    ASSERT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(parse_json(o.out, "out")["steps"][0]["step"], step);
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), refused) << o.err;
  };
  // One whose worker's part is missing, one with the part of another run, and torn ones.
  const std::string five = read_file(of(5, "rank-1.pt"));
  fs::remove(of(5, "rank-1.pt"));
  expect_step(4, 1);  // and writes that of step 5 again
  write_file(of(5, "rank-1.pt"), five);
  expect_step(4, 1);
  fs::resize_file(of(5, "rank-0.pt"), 1000);
  fs::resize_file(of(4, "manifest.json"), 10);
  expect_step(3, 2);
  write_file(folder + "/checkpoint.pt", "of an older version");
  expect_mistake("run " + plan() + " --steps 1" + saving, "is of an older version");
}

// Runs that are killed at any moment while they write a checkpoint after every step.
TEST_F(Hostile, KilledRunsLeaveTheNewestWholeCheckpoint) {
  const char* many = std::getenv("MOTLEY_KILLS");
  const int kills = many != nullptr ? std::atoi(many) : 3;
  const std::string folder = path("saved");
  const std::string run =
      "run " + plan() + " --steps 1000000 --checkpoint-every 1 --checkpoint " + folder;
  const char* seed = std::getenv("MOTLEY_KILLS_SEED");
  Rng rng(seed != nullptr ? std::strtoull(seed, nullptr, 10) : 7);
  int64_t before = 0;
  for (int i = 0; i < kills; ++i) {
    const Run killed = start(run);
    ASSERT_TRUE(runs(killed));
    pause(static_cast<int>(rng.below(300)));
    kill(killed.pid, SIGKILL);  // the workers end with it
    EXPECT_EQ(end_of(killed).code, 128 + SIGKILL);
    const Outcome next = motley("run " + plan() + " --steps 1 --json --checkpoint " + folder);
    ASSERT_EQ(next.code, 0) << next.err;
    EXPECT_EQ(next.err, "");
    const int64_t step = parse_json(next.out, "out")["steps"][0]["step"];
    EXPECT_GE(step, before) << "an older checkpoint was used";
    before = step + 1;
  }
  EXPECT_GT(before, kills);
}

// Files may be no larger than a few blocks, as on a disk that is full.
TEST_F(Hostile, AFullDiskLeavesTheCheckpointBefore) {
  const std::string folder = path("saved"), saving = " --checkpoint " + folder;
  ASSERT_EQ(motley("run " + plan() + " --steps 2" + saving).code, 0);
  // Its messages go through a pipe, which has no such limit.
  const std::string full = fmt::format(
      "cd {} && {{ (ulimit -f 2; trap '' XFSZ; timeout 60 {}/motley run {} --steps 2 "
      "--checkpoint-every 1{}) 2>&1 >/dev/null; echo code $?; }} | cat >{}",
      MOTLEY_SOURCE_DIR, MOTLEY_BINARY_DIR, plan(), saving, path("err"));
  EXPECT_EQ(std::system(full.c_str()), 0);
  const std::string err = read_file(path("err"));
  EXPECT_THAT(
      err, AllOf(HasSubstr("was not written, training goes on: "), HasSubstr("was not written: "),
                 HasSubstr("File too large"), HasSubstr("code 2\n")));
  const Outcome next = motley("run " + plan() + " --steps 1 --json" + saving);
  ASSERT_EQ(next.code, 0) << next.err;
  EXPECT_EQ(next.err, "");
  EXPECT_EQ(parse_json(next.out, "out")["steps"][0]["step"], 2);
  for (const auto& entry : fs::directory_iterator(folder))
    EXPECT_FALSE(entry.path().string().ends_with(".tmp")) << entry.path();
}

TEST_F(Hostile, AFolderIsOfOneRunAndSignalsSave) {
  const std::string folder = path("saved");
  const std::string command = "run " + plan() + " --steps 1000000 --checkpoint " + folder;
  for (const int signal : {SIGINT, SIGTERM}) {
    const Run run = start(command);
    ASSERT_TRUE(runs(run));
    if (signal == SIGINT) {
      expect_mistake("run " + plan() + " --steps 1 --checkpoint " + folder, "is another run's");
      fs::create_directories(folder + "/step-0000000000001-77.tmp");
    }
    kill(run.pid, signal);
    const Outcome o = end_of(run);
    EXPECT_EQ(o.code, 128 + signal);
    EXPECT_THAT(o.err, HasSubstr(fmt::format("stopped by SIG{} after step", sigabbrev_np(signal))));
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    EXPECT_FALSE(fs::is_empty(folder));
    // It goes on behind that step.
    const Outcome next = motley("run " + plan() + " --steps 1 --json --checkpoint " + folder);
    ASSERT_EQ(next.code, 0) << next.err;
    EXPECT_GE(parse_json(next.out, "out")["steps"][0]["step"].get<int64_t>(), o.steps - 1);
  }
  EXPECT_FALSE(fs::exists(folder + "/step-0000000000001-77.tmp"));
  const Run run = start("run " + plan() + " --steps 1000000");
  ASSERT_TRUE(runs(run));
  kill(run.pid, SIGINT);
  const Outcome o = end_of(run);
  EXPECT_EQ(o.code, 130);
  EXPECT_EQ(o.err, "motley: [run] stopped by SIGINT\n");
}

TEST_F(Hostile, FullDevicesAndHostileNames) {
  for (const char* command : {"models", "models --json", "models --help", "--help"})
    EXPECT_NE(motley(std::string(command) + " >/dev/full").code, 0) << command;
  EXPECT_NE(motley("check " + plan() + " >/dev/full").code, 0);
  for (const char* name : {"\\033[31mred", "a\\033]0;title\\007", "\\233m", "bell\\a"}) {
    const std::string argument = fmt::format("\"$(printf '{}')\"", name);
    for (const std::string& command :
         {"plan " + argument + " --cluster local-mixed-4 --batch 8",
          "plan mlp --batch 8 --cluster " + argument, "check " + argument, argument}) {
      const Outcome o = motley(command);
      EXPECT_EQ(o.code, 2) << command;
      for (char c : o.out + o.err)
        EXPECT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= 0x20) << command << o.err;
      EXPECT_EQ(o.err.find('\x9b'), std::string::npos);
    }
  }
}

TEST_F(Hostile, NumbersAreRefusedInOneLine) {
  const std::string plan_mlp = "plan mlp --cluster local-mixed-4 --batch 8 ";
  for (const char* limit : {"nan", "-1", "0", "inf", "-0.0", "1e400"})
    expect_mistake(plan_mlp + "--time-limit " + limit, "give a number greater than 0");
  for (const char* rate : {"nan", "inf", "0", "-1e-3"}) {
    expect_mistake("run x.json --lr " + std::string(rate), "give a number greater than 0");
    expect_mistake("run x.json --clip " + std::string(rate), "give a number greater than 0");
  }
  for (const char* file : {"/nowhere/x.json", "/proc/self/x.json", "/dev/null/x"})
    expect_mistake(plan_mlp + "-o " + file, "cannot write");
  for (const char* model : {"gpt:seq=1000000000", "mlp:layers=99999999", "llama:layers=5000",
                            "bert:vocab=99999999999", "vit:image=16384,patch=1,hidden=16777212"})
    expect_mistake(
        fmt::format("plan {} --cluster local-mixed-4 --batch 64 --memory-limit off", model), "[");
  // Parameters that fit nowhere are seen before the step, which could not be captured.
  const Outcome huge =
      motley("plan vit:image=16384,patch=1,hidden=16777212 --cluster local-mixed-4 --batch 64");
  EXPECT_EQ(huge.code, 3) << huge.err;
  EXPECT_THAT(huge.err, HasSubstr("the cluster lacks 448 PiB"));
  EXPECT_EQ(std::count(huge.err.begin(), huge.err.end(), '\n'), 1) << huge.err;
  // One value a channel; of 64 samples it would be 64.
  for (const char* model : {"convnet:image=1", "resnet50:image=3"})
    expect_mistake(fmt::format("plan {} --cluster local-mixed-4 --batch 1", model), "[");
  // 2^20 micro-batches are simulated; their timeline would not fit.
  const std::string piped = path("piped.json");
  ASSERT_EQ(motley("plan mlp:layers=2,hidden=8,in=8,classes=4 --cluster local-mixed-4 --batch 16 "
                   "--fix pp=2,dp=1,tp=1,mbs=4 -o " +
                   piped)
                .code,
            0);
  Json json = parse_json(read_file(piped), piped);
  const int64_t batch = json["pipeline"]["micro_batch"].get<int64_t>() << 20;
  json["batch"] = batch;
  json["pipeline"]["replicas"][0]["micro_batches"] = 1 << 20;
  for (Json& line : json["graph"])
    line = std::regex_replace(line.get<std::string>(), std::regex("([\\[, ])16([,\\]])"),
                              "$01" + std::to_string(batch) + "$02");
  write_file(piped, json.dump());
  EXPECT_EQ(motley("simulate " + piped).code, 0);
  expect_mistake("simulate " + piped + " --trace " + path("t.json"), "timeline");
}

// A plan of another planner beside ours.
TEST_F(Hostile, ReadsPlansOfAutoparallel) {
  const std::string file = "import tests/corpus/autoparallel/tensors-4.json ";
  const std::string of =
      "--model mlp:layers=2,in=64,hidden=128,classes=16 --cluster local-mixed-4 ";
  const Outcome read = motley(
      fmt::format("{}{}--batch 32 --time-limit 2 --json -o {}", file, of, path("their.json")));
  ASSERT_EQ(read.code, 0) << read.err;
  const Json json = parse_json(read.out, "out");
  EXPECT_EQ(json["target"], "autoparallel");
  EXPECT_LE(json["best_step_s"].get<double>(), json["predicted_step_s"].get<double>());
  EXPECT_EQ(motley("check " + path("their.json")).code, 0);
  const Outcome simulated = motley(fmt::format("simulate {} --json", path("their.json")));
  EXPECT_NEAR(parse_json(simulated.out, "out")["step_s"].get<double>(),
              json["predicted_step_s"].get<double>(), 1e-9);
  expect_mistake(file + of, "give --batch");
  expect_mistake(file + of + "--batch 64", "no placeholder behind the parameters is [64, 64]");
  expect_mistake("import tests/data/stages.json " + of + "--batch 32",
                 "is no plan of another planner");
}

}  // namespace
}  // namespace motley
