#include "fuzz.h"

#include <ATen/ops/randn.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "cluster/profile.h"
#include "core/error.h"
#include "core/file.h"
#include "formats.h"
#include "mutate_text.h"

namespace motley {

namespace {

constexpr int kReaderSeconds = 10, kProgramSeconds = 30;
constexpr rlim_t kReaderBytes = rlim_t{2} << 30, kProgramBytes = rlim_t{3} << 30;  // more than now
#ifdef __SANITIZE_ADDRESS__
constexpr bool kLimited = false;  // it takes all addresses for itself
#else
constexpr bool kLimited = true;
#endif
using Clock = std::chrono::steady_clock;

size_t any(size_t count, Rng* rng) {
  return static_cast<size_t>(rng->below(static_cast<int64_t>(count)));
}

// ---- judged in children

struct Verdict {
  char what = 'w';  // taken, refused, wrong
  std::string why;
  double seconds = 0;
};

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

Verdict read_one(const std::function<void(const std::string&)>& read, const std::string& text) {
  try {
    read(text);
    return {'t', "", 0};
  } catch (const UserError& e) {
    const std::string why = e.what();
    if (why.find('\n') != std::string::npos)
      return {'w', "a refusal of several lines: " + first_line(why), 0};
    return {'r', "", 0};
  } catch (const std::bad_alloc&) {
    return {'w', "out of memory", 0};
  } catch (const std::exception& e) {
    return {'w', first_line(e.what()), 0};
  }
}

// In a process of its own: cases from `first` on, each announced and then judged, in lines.
[[noreturn]] void judge_from(int first, int count, int out,
                             const std::function<Verdict(int)>& judge) {
  rlimit limit{};
  long pages = 0;
  if (FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%ld", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  limit.rlim_cur = limit.rlim_max =
      static_cast<rlim_t>(pages) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + kReaderBytes;
  if (kLimited) setrlimit(RLIMIT_AS, &limit);
  const auto say = [&](const std::string& line) {
    if (write(out, line.data(), line.size()) != static_cast<ssize_t>(line.size())) _exit(1);
  };
  for (int i = first; i < count; ++i) {
    say(fmt::format("b {}\n", i));
    alarm(kReaderSeconds);
    const auto start = Clock::now();
    Verdict v = judge(i);
    v.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    std::replace(v.why.begin(), v.why.end(), '\n', ' ');
    say(fmt::format("{} {} {}\n", v.what, v.seconds, v.why));
  }
  _exit(0);
}

void count(const Verdict& v, const std::string& what, FuzzReport* report) {
  ++report->cases;
  report->taken += v.what == 't';
  report->refused += v.what == 'r';
  report->slowest_s = std::max(report->slowest_s, v.seconds);
  if (v.what == 'w') report->wrong.push_back(fmt::format("{}: {}", what, v.why));
}

std::string cause(int status) {
  if (!WIFSIGNALED(status)) return fmt::format("ends with {}", WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  return signal == SIGALRM ? fmt::format("takes more than {} s", kReaderSeconds)
                           : fmt::format("signal {}", signal);
}

void judge_all(int cases, const std::function<Verdict(int)>& judge, FuzzReport* report) {
  for (int next = 0; next < cases;) {
    int ends[2];
    MOTLEY_CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    MOTLEY_CHECK(child >= 0);
    if (child == 0) {
      close(ends[0]);
      judge_from(next, cases, ends[1], judge);
    }
    close(ends[1]);
    int begun = -1;
    FILE* lines = fdopen(ends[0], "r");
    char* line = nullptr;
    size_t room = 0;
    for (ssize_t n; (n = getline(&line, &room, lines)) > 0;) {
      const std::string text(line, static_cast<size_t>(n) - 1);
      if (text[0] == 'b') {
        begun = std::atoi(text.c_str() + 2);
        continue;
      }
      char* why = nullptr;
      Verdict v{text[0], "", std::strtod(text.c_str() + 2, &why)};
      v.why = why;
      count(v, fmt::format("case {}", begun), report);
      next = begun + 1;
    }
    std::free(line);
    std::fclose(lines);
    int status = 0;
    waitpid(child, &status, 0);
    if (next >= cases) break;
    MOTLEY_CHECK(begun == next, "a child judged nothing: {}", cause(status));
    count({'w', cause(status), 0}, fmt::format("case {}", begun), report);
    next = begun + 1;
  }
}

// The program: ends with 0, 2 or 3, and says one line where it refuses.
Verdict run_program(const std::string& motley, const std::vector<std::string>& arguments,
                    const std::string& folder) {
  const std::string err = folder + "/err";
  const auto start = Clock::now();
  const pid_t child = fork();
  MOTLEY_CHECK(child >= 0);
  if (child == 0) {
    rlimit limit{kProgramBytes, kProgramBytes};
    if (kLimited) setrlimit(RLIMIT_DATA, &limit);
    rlimit seconds{kProgramSeconds, kProgramSeconds};
    setrlimit(RLIMIT_CPU, &seconds);
    const int nothing = open("/dev/null", O_RDWR),
              said = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (chdir(folder.c_str()) != 0 || dup2(nothing, 0) < 0 || dup2(nothing, 1) < 0 ||
        dup2(said, 2) < 0)
      _exit(127);
    std::vector<char*> words = {const_cast<char*>(motley.c_str())};
    for (const std::string& word : arguments) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    execv(motley.c_str(), words.data());
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  Verdict v;
  v.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const std::string said = read_file(err);
  const auto lines = std::count(said.begin(), said.end(), '\n');
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (WIFSIGNALED(status))
    v.why = WTERMSIG(status) == SIGXCPU || WTERMSIG(status) == SIGKILL
                ? fmt::format("takes more than {} s", kProgramSeconds)
                : fmt::format("signal {}", WTERMSIG(status));
  else if (said.find("internal error") != std::string::npos ||
           (code != 0 && code != 2 && code != 3))
    v.why = fmt::format("exit code {}: {}", code, first_line(said));
  else if (code != 0 && lines != 1)
    v.why = fmt::format("exit code {} and {} lines: {}", code, lines, first_line(said));
  else
    v.what = code == 0 ? 't' : 'r';
  if (v.what == 'w') v.why += fmt::format(" (motley {})", fmt::join(arguments, " "));
  return v;
}

// ---- what is mutated

struct Kind {
  std::vector<std::string> originals;
  std::function<void(const std::string&)> read;    // empty: the program reads all
  std::vector<std::vector<std::string>> commands;  // "FILE" stands for the mutant
  std::string suffix;
};

std::vector<std::string> files(const FuzzOptions& options, const std::vector<std::string>& paths) {
  std::vector<std::string> texts;
  for (const std::string& path : paths) texts.push_back(read_file(options.source + "/" + path));
  return texts;
}

std::string made_by(const FuzzOptions& options, const std::string& arguments,
                    const std::string& name) {
  const std::string path = options.folder + "/" + name;
  const std::string command = fmt::format("cd {} && {} {} -o {} >/dev/null", options.source,
                                          options.motley, arguments, path);
  MOTLEY_CHECK(std::system(command.c_str()) == 0, "{}", command);
  return read_file(path);
}

Kind clusters(const FuzzOptions& options) {
  return {files(options, {"clusters/local-mixed-4.yaml", "clusters/hap-64.yaml",
                          "clusters/hap-a100-p100.yaml", "clusters/dgx-1-v100.yaml",
                          "clusters/p2-v100-2.yaml"}),
          reader_of("cluster"),
          {{"plan", "mlp:layers=2,hidden=16,in=8,classes=4", "--batch", "16", "--time-limit", "2",
            "--cluster", "FILE"}},
          ".yaml"};
}

Kind plans(const FuzzOptions& options) {
  const char* mlp = "plan mlp:layers=2,hidden=16,in=8,classes=4 --cluster local-mixed-4 --batch 16";
  return {{made_by(options, mlp, "plan.json"),
           made_by(options, std::string(mlp) + " --engine pipeline --micro-batch 4", "pipe.json")},
          reader_of("plan"),
          {{"check", "FILE"}, {"simulate", "FILE"}, {"report", "FILE", "-o", "report.html"}},
          ".json"};
}

Kind graphs(const FuzzOptions& options) {
  return {{made_by(options, "capture mlp:layers=2,hidden=16,in=8,classes=4 --batch 16", "g.json"),
           made_by(options, "capture gpt:layers=1,hidden=16,heads=2,seq=8,vocab=16 --batch 4",
                   "h.json")},
          reader_of("graph"),
          {{"plan", "./FILE", "--batch", "16", "--cluster", "local-mixed-4", "--time-limit", "2"}},
          ".json"};
}

Kind stages(const FuzzOptions& options) {
  return {files(options, {"tests/data/stages.json"}),
          nullptr,
          {{"schedule", "--stages", "FILE", "--micro-batches", "16"}},
          ".json"};
}

// A profile as calibrate writes it.
Profile measured(const Cluster& cluster) {
  Profile profile;
  profile.cluster = cluster.name;
  profile.seconds = 3;
  const FitQuality fit{0.99, 0.02, {{1, 2}, {3, 4}}};
  for (const DeviceType& type : cluster.types) {
    ProfiledDevice device;
    device.type = type.name;
    device.flops = 2e9, device.half_flops = 3e9, device.memory_bandwidth = 4e9;
    device.overhead = 5e-6;
    device.classes = {{"matmul", "f32", 1e-6, 2e9, fit}};
    device.ops = {{{"aten::mm", 1e-6, 2e9, 0}, fit},
                  {{"motley::sgd", 1e-6, 0, 1e9, 2e6, 5e8}, fit}};
    profile.devices.push_back(device);
    profile.stages.push_back({"0123", "mlp", type.name, 4, 1e-3, 2e-3, 1e4});
  }
  profile.groups = {{{}, {"fast", "slow"}, {{Collective::all_gather, 1e-3, 5e6}}, {fit}}};
  return profile;
}

Kind profiles(const FuzzOptions&) {
  return {{to_json(measured(load_cluster("local-mixed-4"))).dump(1)},
          reader_of("profile"),
          {{"plan", "mlp:layers=2,hidden=16,in=8,classes=4", "--batch", "16", "--time-limit", "2",
            "--cluster", "local-mixed-4", "--profile", "FILE"}},
          ".profile"};
}

std::string checkpoint() {
  c10::Dict<std::string, at::Tensor> tensors;
  for (const char* name : {"a.weight", "a.bias", "b.weight"})
    tensors.insert(name, at::randn({7, 5}));
  c10::impl::GenericDict file(c10::StringType::get(), c10::AnyType::get());
  file.insert("model", "mlp");
  file.insert("step", int64_t{3});
  file.insert("parameters", tensors);
  const std::vector<char> bytes = torch::pickle_save(c10::IValue(file));
  return {bytes.begin(), bytes.end()};
}

Kind checkpoints(const FuzzOptions&) { return {{checkpoint()}, reader_of("archive"), {}, ".pt"}; }

std::vector<std::string> mutated_command(uint64_t seed, Rng* rng) {
  static const std::vector<std::vector<std::string>> commands = {
      {"plan", "mlp:layers=2,hidden=16,in=8,classes=4", "--cluster", "local-mixed-4", "--batch",
       "16", "--time-limit", "1", "--engine", "spmd", "--precision", "fp32", "--recompute", "auto"},
      {"plan", "gpt:layers=1,hidden=16,heads=2,seq=8,vocab=16", "--cluster", "local-mixed-4",
       "--batch", "8", "--time-limit", "1", "--engine", "pipeline", "--micro-batch", "2"},
      {"schedule", "--stages", "stages.json", "--micro-batches", "8", "--kind", "1f1b"},
      {"reduce", "--hierarchy", "node:4,gpu:4", "--axes", "4,4", "--reduce", "0"},
      {"capture", "mlp:layers=2,hidden=16", "--batch", "4", "-o", "x.json"},
      {"models", "--json"},
      {"check", "plan.json", "--memory-limit", "off"},
      {"simulate", "plan.json", "--json"},
  };
  std::vector<std::string> words = commands[any(commands.size(), rng)];
  for (int64_t i = rng->between(1, 2); i > 0; --i) {
    size_t at = any(words.size(), rng);  // of a value, most of the time
    while ((at == 0 || words[at].starts_with("--")) && rng->chance(0.9))
      at = any(words.size(), rng);
    const auto position = words.begin() + static_cast<std::ptrdiff_t>(at);
    switch (rng->below(8)) {
      case 0:
        words.erase(position);
        break;
      case 1: {
        const std::string copy = words[any(words.size(), rng)];
        words.insert(position, copy);
        break;
      }
      case 2:
      case 3:
        words[at] = extreme_number(rng);
        break;
      case 4:
        words[at] = mutated_text(words[at] + " ", seed + static_cast<uint64_t>(i));
        break;
      default:
        words[at] = change_number(words[at] + " ", rng);
        if (!words[at].empty()) words[at].pop_back();
    }
    if (words.empty()) words = {"plan"};
  }
  for (std::string& word : words) {
    word.erase(std::remove(word.begin(), word.end(), '\0'), word.end());
    if (word.size() > 100000) word.resize(100000);  // of a command line
  }
  // A process for every device is no matter of options; neither are other folders.
  if (words[0] == "run" || words[0] == "verify" || words[0] == "demo" || words[0] == "calibrate")
    words[0] = "models";
  for (size_t i = 0; i < words.size(); ++i)
    if (words[i].find('/') != std::string::npos) words[i] = "x";
  return words;
}

Kind of_corpus(const std::string& format, const FuzzOptions& options) {
  std::vector<std::string> paths;
  for (const auto& entry :
       std::filesystem::directory_iterator(options.source + "/tests/corpus/" + format))
    paths.push_back("tests/corpus/" + format + "/" + entry.path().filename().string());
  std::sort(paths.begin(), paths.end());
  const auto of = std::find_if(formats().begin(), formats().end(),
                               [&](const Format& f) { return f.name == format; });
  return {files(options, paths), of->read, {}, of->text ? ".txt" : ".pt"};
}

const std::map<std::string, Kind (*)(const FuzzOptions&)>& makers() {
  static const std::map<std::string, Kind (*)(const FuzzOptions&)> table = {
      {"clusters", clusters}, {"plans", plans},       {"graphs", graphs},
      {"stages", stages},     {"profiles", profiles}, {"checkpoints", checkpoints}};
  return table;
}

}  // namespace

const std::vector<std::string>& fuzz_kinds() {
  static const std::vector<std::string> kinds = [] {
    std::vector<std::string> list = {"clusters", "plans",       "graphs", "stages",
                                     "profiles", "checkpoints", "options"};
    const std::set<std::string> known = {"cluster", "plan", "graph", "profile", "archive"};
    for (const Format& format : formats())
      if (known.count(format.name) == 0) list.push_back(format.name);
    return list;
  }();
  return kinds;
}

FuzzReport fuzz(const std::string& kind, const FuzzOptions& options) {
  FuzzReport report;
  report.kind = kind;
  const auto seed_of = [&](int i) { return mix64(options.seed) + static_cast<uint64_t>(i); };
  if (kind == "options") {
    plans(options);  // plan.json, which commands name
    write_file(options.folder + "/stages.json", files(options, {"tests/data/stages.json"})[0]);
    for (int i = 0; i < options.cases; ++i) {
      Rng rng(seed_of(i));
      const std::vector<std::string> words = mutated_command(seed_of(i), &rng);
      count(run_program(options.motley, words, options.folder), fmt::format("case {}", i), &report);
    }
    return report;
  }
  const auto maker = makers().find(kind);
  const Kind what = maker == makers().end() ? of_corpus(kind, options) : maker->second(options);
  const auto mutant = [&](int i) {
    const std::string& original = what.originals[static_cast<size_t>(i) % what.originals.size()];
    if (what.suffix != ".pt") return mutated_text(original, seed_of(i));
    Rng rng(seed_of(i));
    return change_bytes(original, &rng);
  };
  if (what.read != nullptr)
    judge_all(
        options.cases, [&](int i) { return read_one(what.read, mutant(i)); }, &report);
  for (const std::string& wrong : report.wrong)
    if (int i = 0; !options.keep.empty() && std::sscanf(wrong.c_str(), "case %d:", &i) == 1)
      write_file(fmt::format("{}/{}-{}{}", options.keep, kind, i, what.suffix), mutant(i));
  const int programs = what.read == nullptr    ? options.cases
                       : what.commands.empty() ? 0
                                               : std::min(options.programs, options.cases);
  for (int p = 0; p < programs; ++p) {
    const int i = static_cast<int>(int64_t{p} * options.cases / programs);
    const std::string name = "mutant" + what.suffix;
    write_file(options.folder + "/" + name, mutant(i));
    std::vector<std::string> words = what.commands[static_cast<size_t>(p) % what.commands.size()];
    for (std::string& word : words)
      if (const size_t at = word.find("FILE"); at != std::string::npos) word.replace(at, 4, name);
    count(run_program(options.motley, words, options.folder), fmt::format("case {}", i), &report);
  }
  return report;
}

}  // namespace motley
