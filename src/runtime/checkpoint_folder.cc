#include "runtime/checkpoint_folder.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/file.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <stdexcept>

#include "core/error.h"
#include "core/fault.h"
#include "core/file.h"
#include "runtime/checkpoint.h"

namespace motley {

namespace fs = std::filesystem;

namespace {

constexpr const char* kFormat = "motley checkpoint 2";
// Before the name of what is in a file twice: the piece of another worker (second_copies.h).
constexpr std::string_view kSecond = "second:";
constexpr int kMaxFiles = 1 << 17;

std::string name_of(int64_t step) { return fmt::format("step-{:013}", step); }
std::string file_of(int rank) { return fmt::format("rank-{}.pt", rank); }

// The step of a folder that name_of() names; -1: it is none.
int64_t step_of(const std::string& name) {
  constexpr size_t kDigits = 13;
  if (!name.starts_with("step-") || name.size() != 5 + kDigits) return -1;
  if (name.find_first_not_of("0123456789", 5) != std::string::npos) return -1;
  return std::atoll(name.c_str() + 5);
}

void sync_folder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);
  close(fd);
}

// Away at once, so that nobody takes half of it for a checkpoint.
void remove_checkpoint(const std::string& folder, const std::string& name) {
  std::error_code error;
  const std::string away = folder + "/" + name + ".old.tmp";
  fs::remove_all(away, error);
  fs::rename(folder + "/" + name, away, error);
  fs::remove_all(away, error);
}

// "Part" as a tensor of a file.
at::Tensor numbers_of(const Part& p) {
  return at::tensor(
      std::vector<int64_t>{p.outer, p.size, p.inner, p.begin, p.length, p.first, p.count},
      at::kLong);
}

Part part_of_numbers(const at::Tensor& t) {
  if (t.scalar_type() != at::kLong || t.numel() != 7 || !t.is_contiguous())
    throw std::runtime_error("a part is not seven whole numbers");
  const auto* n = t.data_ptr<int64_t>();
  Part part{n[0], n[1], n[2], n[3], n[4], 0, n[5], n[6]};
  return part;
}

// Into memory of its own, of the size of the piece: files hold whole storages.
at::Tensor compact(const at::Tensor& t) {
  const at::Tensor flat = t.to(at::kCPU).contiguous();
  return flat.storage().nbytes() == flat.nbytes() ? flat : flat.clone();
}

}  // namespace

void write_pieces(const std::string& beside, int rank, const CheckpointOf& of,
                  const std::vector<HeldPiece>& pieces) {
  std::error_code error;
  fs::create_directories(beside, error);
  if (error) throw std::runtime_error(error.message());
  c10::Dict<std::string, at::Tensor> tensors, parts;
  for (const HeldPiece& piece : pieces) {
    const std::string name =
        (tensors.contains(piece.name) ? std::string(kSecond) : "") + piece.name;
    tensors.insert(name, compact(piece.tensor));
    parts.insert(name, numbers_of(piece.part));
  }
  c10::impl::GenericDict file(c10::StringType::get(), c10::AnyType::get());
  file.insert("format", std::string(kFormat));
  file.insert("run", of.run);
  file.insert("step", of.step);
  file.insert("tensors", tensors);
  file.insert("parts", parts);
  const std::vector<char> bytes = torch::pickle_save(file);
  fault_point("checkpoint");
  write_file(beside + "/" + file_of(rank), std::string(bytes.begin(), bytes.end()));
}

void parse_pieces(const std::string& bytes, const CheckpointOf& of, Assembly* assembly) {
  const auto file = read_archive(bytes).toGenericDict();
  if (file.at("format").toStringRef() != kFormat)
    throw std::runtime_error("it is of another format");
  if (file.at("run").toInt() != of.run || file.at("step").toInt() != of.step)
    throw std::runtime_error("it is of another checkpoint");
  const auto parts = file.at("parts").toGenericDict();
  for (const auto& item : file.at("tensors").toGenericDict()) {
    const std::string key = item.key().toStringRef(),
                      name = key.starts_with(kSecond) ? key.substr(kSecond.size()) : key;
    assembly->add({name, part_of_numbers(parts.at(key).toTensor()), item.value().toTensor()});
  }
}

void read_pieces(const std::string& path, const CheckpointOf& of, Assembly* assembly) {
  parse_pieces(read_file(path, size_t{1} << 40), of, assembly);
}

CheckpointFolder::CheckpointFolder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error)
    throw user_error("run", "--checkpoint {} cannot be made: {}; give a folder", path,
                     error.message());
  lock_ = open((path + "/checkpoint.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0)
    throw user_error("run", "--checkpoint {} cannot be written: {}; give a folder of yours", path,
                     std::strerror(errno));
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    char owner[32] = "";
    const ssize_t n = pread(lock_, owner, sizeof owner - 1, 0);
    const std::string text(owner, static_cast<size_t>(std::max<ssize_t>(n, 0)));
    close(lock_);
    throw user_error("run",
                     "--checkpoint {} is another run's ({}); give each run a folder of its own",
                     path, text.empty() ? "unknown process" : "process " + text);
  }
  const std::string own = std::to_string(getpid());
  if (ftruncate(lock_, 0) == 0 && pwrite(lock_, own.data(), own.size(), 0) < 0) errno = 0;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("step-") && name.ends_with(".tmp")) fs::remove_all(entry.path(), error);
  }
}

CheckpointFolder::~CheckpointFolder() { close(lock_); }

std::vector<int64_t> checkpoints_in(const std::string& folder) {
  if (fs::exists(folder + "/checkpoint.pt"))
    throw user_error("run",
                     "--checkpoint {} has a checkpoint.pt, which is of an older version; give "
                     "another folder, or remove the file to start anew",
                     folder);
  std::vector<int64_t> steps;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (const int64_t step = step_of(entry.path().filename().string()); step >= 0)
      steps.push_back(step);
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

CheckpointOf read_checkpoint(const std::string& folder, int64_t step, const CheckpointOf& of,
                             Assembly* assembly) {
  const std::string path = folder + "/" + name_of(step);
  CheckpointOf found;
  int64_t files = 0;
  try {
    const Json json =
        parse_json(read_file(path + "/manifest.json", size_t{1} << 20), "manifest.json");
    const Fields fields(json, "run", "manifest.json");
    if (fields.text("format") != kFormat) throw std::runtime_error("it is of another format");
    found.model = fields.text("model");
    found.optimizer = fields.text("optimizer");
    found.seed = std::strtoull(fields.text("seed").c_str(), nullptr, 10);
    found.run = fields.integer("run");
    found.step = fields.integer("step");
    files = fields.integer("files");
  } catch (const UserError& e) {
    throw std::runtime_error(e.what());
  }
  if (found.step != step || files < 1 || files > kMaxFiles)
    throw std::runtime_error("its manifest is of another checkpoint");
  if (found.model != of.model)
    throw user_error("run", "--checkpoint {} is of model {}; the plan's is {}", folder, found.model,
                     of.model);
  if (found.optimizer != of.optimizer)
    throw user_error("run", "--checkpoint {} is of optimizer {}; the plan's is {}", folder,
                     found.optimizer, of.optimizer);
  try {
    // What several hold is that of the lowest rank.
    for (int64_t rank = files; rank-- > 0;)
      read_pieces(path + "/" + file_of(static_cast<int>(rank)), found, assembly);
  } catch (const UserError& e) {
    throw std::runtime_error(e.what());
  }
  return found;
}

CheckpointWriter::CheckpointWriter(std::string folder, int rank, int ranks, int keep)
    : folder_(std::move(folder)), rank_(rank), ranks_(ranks), keep_(keep) {}

CheckpointWriter::~CheckpointWriter() {
  if (!under_way()) return;
  written_.wait();
  std::error_code error;
  fs::remove(beside() + "/" + file_of(rank_), error);
  fs::remove(beside(), error);  // the last one
}

std::string CheckpointWriter::beside() const {
  return fmt::format("{}/{}-{:x}.tmp", folder_, name_of(of_.step), of_.run);
}

void CheckpointWriter::begin(const CheckpointOf& of, std::vector<HeldPiece> pieces) {
  MOTLEY_CHECK(!under_way(), "a checkpoint is under way");
  of_ = of;
  const auto write = [this, list = std::move(pieces)]() -> std::string {
    try {
      write_pieces(beside(), rank_, of_, list);
      return "";
    } catch (const std::exception& e) {
      const std::string why = e.what();
      return why.empty() ? "it failed" : why.substr(0, why.find('\n'));
    }
  };
  written_ = std::async(std::launch::async, write).share();
}

bool CheckpointWriter::finished() const {
  return written_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

std::string CheckpointWriter::failure() const { return written_.get(); }

std::string CheckpointWriter::conclude(bool all_written) {
  written_.wait();
  written_ = {};
  std::error_code error;
  if (!all_written) {
    fs::remove(beside() + "/" + file_of(rank_), error);
    fs::remove(beside(), error);
    return "";
  }
  if (rank_ != 0) return "";
  try {
    const Json manifest = {{"format", kFormat},
                           {"run", of_.run},
                           {"step", of_.step},
                           {"model", of_.model},
                           {"optimizer", of_.optimizer},
                           {"seed", std::to_string(of_.seed)},
                           {"files", ranks_}};
    write_file(beside() + "/manifest.json", manifest.dump(1) + "\n");
    sync_folder(beside());
    const std::string target = folder_ + "/" + name_of(of_.step);
    const bool again = fs::exists(target);  // of a run that went back
    if (again
            ? renameat2(AT_FDCWD, beside().c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0
            : std::rename(beside().c_str(), target.c_str()) != 0)
      throw std::runtime_error(std::strerror(errno));
    sync_folder(folder_);
    if (again) fs::remove_all(beside(), error);
    std::vector<int64_t> steps = checkpoints_in(folder_);
    // Those of later steps are of a run before that went further, and failed to be read.
    std::erase_if(steps, [&](int64_t s) { return s > of_.step; });
    for (size_t i = static_cast<size_t>(keep_); i < steps.size(); ++i)
      remove_checkpoint(folder_, name_of(steps[i]));
    return "";
  } catch (const std::exception& e) {
    fs::remove_all(beside(), error);
    return e.what();
  }
}

}  // namespace motley
