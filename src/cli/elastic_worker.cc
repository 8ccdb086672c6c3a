#include "cli/elastic_worker.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include "comm/texts.h"
#include "core/error.h"
#include "core/fault.h"
#include "core/file.h"
#include "core/process.h"
#include "core/units.h"
#include "runtime/plan_model.h"
#include "runtime/recent.h"

namespace motley {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMostOfPieces = size_t{1} << 36;  // bytes of a file
constexpr size_t kStepsKept = 8;                   // of all attempts

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

// When a process began, in ticks of the system; empty: there is none.
std::string began(pid_t process) { return process_field(process, 22); }

// The folder of this machine's workers, which stays while their launcher lives; Python's runs name theirs alike
// (_elastic.py). Those of launchers that have ended are removed.
std::string folder_of_launcher() {
  const std::string parent =
      access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : fs::temp_directory_path().string();
  const std::string prefix = fmt::format("motley-elastic-{}-", getuid());
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(parent, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix)) continue;
    const std::string rest = name.substr(prefix.size());
    const size_t dash = rest.find('-');
    if (dash == std::string::npos || began(std::atoi(rest.c_str())) != rest.substr(dash + 1))
      fs::remove_all(entry.path(), error);
  }
  const std::string path = fmt::format("{}/{}{}-{}", parent, prefix, getppid(), began(getppid()));
  mkdir(path.c_str(), 0700);
  struct stat own {};
  if (lstat(path.c_str(), &own) != 0 || !S_ISDIR(own.st_mode) || own.st_uid != getuid())
    throw user_error("run", "--elastic: {} cannot be made, or is another's; remove it", path);
  return path;
}

// Whole or not at all.
void put(const std::string& path, const std::string& bytes) {
  fs::create_directories(fs::path(path).parent_path());
  write_file(path + ".part", bytes);
  fs::rename(path + ".part", path);
}

}  // namespace

struct ElasticWorker::Row {
  int device = -1, attempt = -1;  // of the attempt before; -1: none
  std::string machine;            // its name and folder
  std::string files;              // JSON of {file: bytes} there; of the first worker of a machine
};

ElasticWorker::ElasticWorker(const Plan& plan, const Rendezvous& where) : whole_(plan) {
  if (std::getenv("TORCHELASTIC_RUN_ID") == nullptr)
    throw user_error("run",
                     "--elastic: this launcher starts no worker again; use torchrun, or leave "
                     "launching to motley run");
  folder_ = folder_of_launcher();
  const std::string note = folder_ + "/worker-" + variable("LOCAL_RANK", "0");
  Row mine;
  std::ifstream(note) >> mine.device >> mine.attempt;
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  mine.machine = fmt::format("{} {}", host, folder_);
  set_fault_rank(where.rank, mine.attempt + 1);
  fault_point("rendezvous");
  all_ = join_group(where);
  std::vector<Row> rows;
  for (const std::string& text :
       gather_texts(*all_, Json({mine.device, mine.attempt, mine.machine}).dump())) {
    const Json said = Json::parse(text);
    rows.push_back({said[0], said[1], said[2], ""});
  }
  take_devices(rows);
  put(note, fmt::format("{} {}\n", device_of_[static_cast<size_t>(where.rank)], attempt_));
  share_pieces(rows);
  find_plan(rows, where);
}

ElasticWorker::~ElasticWorker() = default;

void ElasticWorker::take_devices(const std::vector<Row>& rows) {
  const auto count = static_cast<size_t>(whole_.cluster.size());
  if (rows.size() > count)
    throw user_error("run",
                     "--elastic: the plan has {} devices, but {} workers were started; start {} at "
                     "most",
                     count, rows.size(), count);
  std::set<int> taken;
  for (const Row& row : rows) {
    attempt_ = std::max(attempt_, row.attempt + 1);
    machines_.push_back(row.machine);
    if (row.device < 0) continue;
    if (row.device >= static_cast<int>(count) || !taken.insert(row.device).second)
      throw user_error("run",
                       "--elastic: two workers say that they are device {}; start the launchers "
                       "again",
                       row.device);
  }
  int free = 0;
  for (const Row& row : rows) {
    while (row.device < 0 && taken.count(free) > 0) ++free;
    device_of_.push_back(row.device >= 0 ? row.device : free++);
  }
  devices_ = device_of_;
  std::sort(devices_.begin(), devices_.end());
}

// Gives what a machine's memory has to the others, whose workers read folders of their own.
void ElasticWorker::share_pieces(const std::vector<Row>& rows) {
  std::map<std::string, int> first;  // rank of each machine
  for (size_t r = 0; r < rows.size(); ++r) first.emplace(rows[r].machine, static_cast<int>(r));
  const bool speaks = first.at(machines_[static_cast<size_t>(all_->rank())]) == all_->rank();
  Json own = Json::array();
  if (speaks) own = recent_files(folder_, attempt_);
  std::map<std::string, std::set<int>> holders;  // of a file: ranks that speak for their machine
  const std::vector<std::string> texts = gather_texts(*all_, own.dump());
  for (size_t r = 0; r < texts.size(); ++r)
    for (const std::string& name : Json::parse(texts[r]).get<std::vector<std::string>>())
      holders[name].insert(static_cast<int>(r));
  for (const auto& [name, ranks] : holders) {
    if (ranks.size() == first.size()) continue;
    const bool mine = *ranks.begin() == all_->rank();
    const std::vector<std::string> sent =
        gather_texts(*all_, mine ? read_file(folder_ + "/" + name, kMostOfPieces) : "");
    if (speaks && ranks.count(all_->rank()) == 0)
      put(folder_ + "/" + name, sent[static_cast<size_t>(*ranks.begin())]);
  }
  if (speaks) {  // all machines have the same now, and keep the same
    const std::vector<RecentStep> steps = recent_steps(folder_, attempt_);
    std::error_code error;
    for (size_t i = kStepsKept; i < steps.size(); ++i)
      fs::remove_all(fmt::format("{}/attempt-{}/step-{}", folder_, steps[i].attempt, steps[i].step),
                     error);
  }
  all_->barrier();
}

void ElasticWorker::find_plan(const std::vector<Row>& rows, const Rendezvous& where) {
  const auto begun = std::chrono::steady_clock::now();
  const bool all = devices_.size() == static_cast<size_t>(whole_.cluster.size());
  planner_ = std::make_unique<PartPlanner>(whole_, whole_.cluster, folder_ + "/plans");
  Json found;
  std::string problem;
  if (all_->rank() == 0) try {
      if (all) {
        found = {{"plan", to_json(whole_)}, {"devices", devices_}};
      } else {
        const PartPlanner::Found part = planner_->get(devices_);
        found = {{"plan", parse_json(read_file(part.file, kMostOfPieces), part.file)},
                 {"devices", part.devices}};
      }
    } catch (const std::exception& e) {
      problem = e.what();
    }
  const std::string text = gather_texts(*all_, problem.empty() ? found.dump() : "")[0];
  if (text.empty())
    throw std::runtime_error(problem.empty() ? "[run] rank 0 has no plan" : problem);
  found = Json::parse(text);
  used_ = found.at("devices").get<std::vector<int>>();
  const std::string file = fmt::format("{}/plan-{}-{}.json", folder_, attempt_, all_->rank());
  put(file, found.at("plan").dump());
  plan_ = plan_to_run(file, static_cast<int>(used_.size()));
  fs::remove(file);
  std::vector<int> ranks;
  for (int device : used_)
    ranks.push_back(static_cast<int>(std::find(device_of_.begin(), device_of_.end(), device) -
                                     device_of_.begin()));
  works_ = std::find(ranks.begin(), ranks.end(), all_->rank()) != ranks.end();
  if (works_) place_ = part_of(where, ranks, fmt::format("plan-{}/", attempt_));
  set_fault_rank(works_ ? place_.rank : -1, attempt_);
  const bool before =
      std::any_of(rows.begin(), rows.end(), [](const Row& r) { return r.attempt >= 0; });
  if (all_->rank() == 0 && before)
    std::fprintf(
        stderr, "[run] going on with %zu of %d devices: planned for %zu of them in %s\n",
        devices_.size(), whole_.cluster.size(), used_.size(),
        format_seconds(
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count())
            .c_str());
}

void ElasticWorker::prepare() {
  if (all_->rank() != 0) return;
  std::map<std::string, std::vector<int>> left;  // by the machine that is lost
  for (const std::string& machine : machines_)
    for (size_t r = 0; r < device_of_.size(); ++r)
      if (machines_[r] != machine) left[machine].push_back(device_of_[r]);
  std::vector<std::vector<int>> sets;
  for (auto& [_, devices] : left) {
    std::sort(devices.begin(), devices.end());
    devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
    sets.push_back(devices);
  }
  planner_->prepare(sets);
}

void ElasticWorker::finish() {
  planner_->stop();
  all_->barrier();
  const auto first =
      std::find(machines_.begin(), machines_.end(), machines_[static_cast<size_t>(all_->rank())]);
  std::error_code error;
  if (first - machines_.begin() == all_->rank()) fs::remove_all(folder_, error);
}

}  // namespace motley
