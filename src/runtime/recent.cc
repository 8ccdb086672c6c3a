#include "runtime/recent.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <utility>

#include "core/error.h"
#include "core/fault.h"

namespace motley {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t kReserved = 1 << 16;  // bytes, of some 60 a step

// The number behind `prefix` in a name; -1: it is none.
int64_t number_of(const std::string& name, const std::string& prefix) {
  if (!name.starts_with(prefix) || name.size() == prefix.size() || name.size() > prefix.size() + 15)
    return -1;
  if (name.find_first_not_of("0123456789", prefix.size()) != std::string::npos) return -1;
  return std::atoll(name.c_str() + prefix.size());
}

std::vector<int64_t> numbers_in(const std::string& folder, const std::string& prefix) {
  std::vector<int64_t> numbers;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (const int64_t n = number_of(entry.path().filename().string(), prefix); n >= 0)
      numbers.push_back(n);
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

std::string of_attempt(const std::string& folder, int64_t attempt) {
  return fmt::format("{}/attempt-{}", folder, attempt);
}
std::string of_step(const std::string& folder, int64_t attempt, int64_t step) {
  return fmt::format("{}/step-{}", of_attempt(folder, attempt), step);
}

// Names of the files of pieces that are whole, in order.
std::vector<std::string> pieces_in(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (entry.path().extension() == ".pt") files.push_back(entry.path().filename().string());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

Recent::Recent(std::string folder, int attempt, int rank)
    : folder_(std::move(folder)), attempt_(attempt), rank_(rank) {
  fs::create_directories(of_attempt(folder_, attempt_));
  reserve();
}

std::string Recent::losses() const {
  return fmt::format("{}/losses-{}", of_attempt(folder_, attempt_), rank_);
}

// Room for losses to come: memory may be full by then. Where there is none, it is tried again later.
void Recent::reserve() {
  const int fd = open(losses().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  const uint64_t wanted = noted_ + kReserved;
  if (fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(wanted)) == 0) reserved_ = wanted;
  close(fd);
}

Recent::~Recent() {
  if (writing_.valid()) writing_.wait();
}

// Where memory is full training goes on: who is lost then takes back to the step before, or to a checkpoint.
void Recent::settle() {
  if (!writing_.valid()) return;
  try {
    writing_.get();
  } catch (const std::exception& e) {
    if (!std::exchange(told_, true))
      std::fprintf(
          stderr,
          "motley: [run] rank %d cannot leave its pieces for others, training goes on: %s\n", rank_,
          e.what());
  }
}

// Appends the losses that are not written yet, all or none of them.
void Recent::note(const StepLoss& loss) {
  unwritten_ += fmt::format("{} {:.17g} {:.9g} {:.17g}\n", loss.step, loss.loss, loss.seconds,
                            loss.gradient_norm);
  const std::string path = losses();
  std::ofstream file(path, std::ios::app);
  if (file << unwritten_ << std::flush) {
    noted_ += unwritten_.size();
    unwritten_.clear();
    if (noted_ + kReserved / 2 > reserved_) reserve();
    return;
  }
  file.close();
  std::error_code error;
  fs::resize_file(path, noted_, error);
}

void Recent::leave(CheckpointOf of, std::vector<HeldPiece> pieces, const StepLoss& loss) {
  settle();
  of.run = attempt_;
  note(loss);
  fault_point("boundary");
  steps_.push_back(of.step);
  // Everybody has left a step of this attempt when this worker is two steps further.
  const bool others = ++left_ == 4;
  writing_ = std::async(std::launch::async, [this, of, others, list = std::move(pieces)] {
    write_pieces(of_step(folder_, attempt_, of.step), rank_, of, list);
    std::error_code error;
    while (steps_.size() > 2) {
      const std::string old = of_step(folder_, attempt_, steps_.front());
      fs::remove(fmt::format("{}/rank-{}.pt", old, rank_), error);
      fs::remove(old, error);  // by the last one
      steps_.erase(steps_.begin());
    }
    if (!others || rank_ != 0) return;
    for (int64_t attempt : numbers_in(folder_, "attempt-"))
      if (attempt < attempt_)
        for (int64_t step : numbers_in(of_attempt(folder_, attempt), "step-"))
          fs::remove_all(of_step(folder_, attempt, step), error);
  });
}

std::string begin_file(const std::string& folder) { return folder + "/begin"; }

std::vector<RecentStep> recent_steps(const std::string& folder, int attempt) {
  std::vector<RecentStep> steps;
  for (int64_t a : numbers_in(folder, "attempt-"))
    if (a < attempt)
      for (int64_t step : numbers_in(of_attempt(folder, a), "step-"))
        if (!pieces_in(of_step(folder, a, step)).empty())
          steps.push_back({static_cast<int>(a), step});
  std::sort(steps.begin(), steps.end(), [](const RecentStep& a, const RecentStep& b) {
    return std::pair{a.step, a.attempt} > std::pair{b.step, b.attempt};
  });
  return steps;
}

void read_recent(const std::string& folder, const RecentStep& from, Assembly* assembly) {
  const std::string path = of_step(folder, from.attempt, from.step);
  CheckpointOf of;
  of.step = from.step;
  of.run = from.attempt;
  for (const std::string& file : pieces_in(path)) {
    try {
      read_pieces(path + "/" + file, of, assembly);
    } catch (const std::exception&) {
      continue;  // half of it may be there: it is as good as the rest
    }
  }
}

std::vector<StepLoss> recent_losses(const std::string& folder, int attempt, int64_t step) {
  std::map<int64_t, StepLoss> all;
  std::error_code error;
  for (int64_t a : numbers_in(folder, "attempt-")) {
    if (a >= attempt) continue;
    for (const int64_t rank : numbers_in(of_attempt(folder, a), "losses-")) {
      std::ifstream file(fmt::format("{}/losses-{}", of_attempt(folder, a), rank));
      for (StepLoss loss; file >> loss.step >> loss.loss >> loss.seconds >> loss.gradient_norm;)
        if (loss.step < step) all[loss.step] = loss;  // a later attempt's counts
    }
  }
  std::vector<StepLoss> list;
  for (const auto& [_, loss] : all) list.push_back(loss);
  return list;
}

std::vector<std::string> recent_files(const std::string& folder, int attempt) {
  std::vector<std::string> names;
  std::error_code error;
  if (attempt > 0 && fs::exists(begin_file(folder), error)) names.emplace_back("begin");
  for (int64_t a : numbers_in(folder, "attempt-")) {
    if (a >= attempt) continue;
    for (int64_t rank : numbers_in(of_attempt(folder, a), "losses-"))
      names.push_back(fmt::format("attempt-{}/losses-{}", a, rank));
    for (int64_t step : numbers_in(of_attempt(folder, a), "step-"))
      for (const std::string& file : pieces_in(of_step(folder, a, step)))
        names.push_back(fmt::format("attempt-{}/step-{}/{}", a, step, file));
  }
  return names;
}

void remove_recent(const std::string& folder, int attempt, int rank) {
  std::error_code error;
  for (int64_t step : numbers_in(of_attempt(folder, attempt), "step-"))
    fs::remove(fmt::format("{}/rank-{}.pt", of_step(folder, attempt, step), rank), error);
}

}  // namespace motley
