#include "cli/replanning.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <fstream>
#include <sstream>
#include <utility>

#include "cluster/part.h"
#include "sim/simulate.h"

namespace motley {

namespace {

constexpr double kLeast = 0.03;  // of a step that has to be saved

std::string note_file(const std::string& folder, int attempt) {
  return fmt::format("{}/slow-{}", folder, attempt);
}

}  // namespace

void leave_note(const std::string& folder, int attempt, const SlowNote& note) {
  std::ofstream file(note_file(folder, attempt), std::ios::app);
  file << fmt::format("{} {} {} {} {} {}\n", note.step, note.made, note.worker, note.factor,
                      note.startup_s, note.step_s)
       << std::flush;
}

std::vector<SlowNote> notes_of(const std::string& folder, int attempt) {
  std::vector<SlowNote> notes;
  std::ifstream file(note_file(folder, attempt));
  for (std::string line; std::getline(file, line) && !file.eof();) {
    std::istringstream words(line);
    SlowNote note;
    if (words >> note.step >> note.made >> note.worker >> note.factor >> note.startup_s >>
        note.step_s)
      notes.push_back(note);
  }
  return notes;
}

Replanning::Replanning(const Plan& plan, std::string plans)
    : plan_(plan), plans_(std::move(plans)), cluster_(plan.cluster) {}

void Replanning::follow(Attempt attempt) {
  stop();
  attempt_ = std::move(attempt);
  seen_ = 0;
  result_.reset();
}

void Replanning::stop() {
  if (planner_) planner_->stop();
  if (running_.valid()) running_.wait();
  running_ = {};
  planner_.reset();
}

bool Replanning::worth_it() {
  using namespace std::chrono_literals;
  if (running_.valid()) {
    if (running_.wait_for(0s) != std::future_status::ready) return false;
    try {
      result_ = running_.get();
    } catch (const std::exception&) {
      result_.reset();  // no plan: it goes on by the one it has
    }
  }
  if (pays()) return true;
  const std::vector<SlowNote> notes = notes_of(attempt_.notes, attempt_.number);
  if (notes.size() <= seen_) return false;
  for (; seen_ < notes.size(); ++seen_)
    cluster_ = with_slower(cluster_, attempt_.used.at(static_cast<size_t>(notes[seen_].worker)),
                           notes[seen_].factor);
  noted_ = std::chrono::steady_clock::now();
  result_.reset();
  planner_ = std::make_unique<PartPlanner>(plan_, cluster_,
                                           fmt::format("{}/slow-{}", plans_, searches_++));
  running_ = std::async(std::launch::async, [this, note = notes.back(), cluster = cluster_] {
    return search(note, cluster);
  });
  return false;
}

bool Replanning::pays() const {
  if (!result_) return false;
  const SlowNote& note = result_->note;
  const Seconds since =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - noted_).count();
  const Seconds so_far = static_cast<double>(note.made) * note.step_s + since;
  const Seconds left = static_cast<double>(attempt_.steps - note.made) * note.step_s - since;
  const double saved = 1 - result_->plan.step_s / result_->before;
  return saved > kLeast && saved * std::min(so_far, left) > result_->planning_s + note.startup_s;
}

Replanning::Result Replanning::search(const SlowNote& note, const Cluster& cluster) const {
  const auto began = std::chrono::steady_clock::now();
  Result result;
  result.note = note;
  Plan now = load_plan(attempt_.file);
  now.cluster = part_of(cluster, attempt_.used);
  result.before = simulate(now).step;
  result.plan = planner_->search(attempt_.devices);
  result.planning_s =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return result;
}

}  // namespace motley
