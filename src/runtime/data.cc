#include "runtime/data.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/file.h"
#include "core/rng.h"
#include "core/units.h"
#include "interpret/dispatch.h"

namespace motley {

namespace {

constexpr size_t kMaxText = size_t{64} << 20;

// Regular files of a folder in the order of their names; links would repeat them.
std::string read_text(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::exists(path, error))
    throw user_error("run", "--data {} does not exist; give a file or folder of text", path);
  if (!fs::is_directory(path, error)) return read_file(path, kMaxText);
  std::vector<std::string> files;
  for (auto it = fs::recursive_directory_iterator(path, error); !error && it != fs::end(it);
       it.increment(error))
    if (!it->is_symlink() && it->is_regular_file()) files.push_back(it->path().string());
  if (error) throw user_error("run", "--data {} cannot be read: {}", path, error.message());
  std::sort(files.begin(), files.end());
  std::string text;
  for (const std::string& file : files) {
    if (text.size() >= kMaxText) break;
    text += read_file(file, kMaxText);
  }
  return text.substr(0, kMaxText);
}

// [batch, seq] of tokens and of targets, over at least all bytes.
bool reads_text(const std::vector<InputSpec>& inputs) {
  return inputs.size() == 2 && inputs[0].name == "tokens" && inputs[1].name == "targets" &&
         inputs[0].spec == inputs[1].spec && inputs[0].spec.shape.size() == 2;
}

}  // namespace

Dataset::Dataset(std::vector<InputSpec> inputs, const std::string& path, uint64_t seed)
    : inputs_(std::move(inputs)), seed_(seed), description_("random inputs") {
  const bool text = reads_text(inputs_), bytes_fit = text && inputs_[0].below >= 256;
  if (!path.empty()) {
    if (!text)
      throw user_error("run", "--data {}: this model does not read text; leave --data out", path);
    if (!bytes_fit)
      throw user_error("run", "--data {}: the model's vocab is {}; bytes need at least 256", path,
                       inputs_[0].below);
  } else if (!bytes_fit || !std::filesystem::is_directory(kDefaultText)) {
    return;
  }
  const std::string from = path.empty() ? kDefaultText : path;
  text_ = read_text(from);
  const size_t needed = static_cast<size_t>(inputs_[0].spec.shape[1]) + 1;
  if (text_.size() < needed)
    throw user_error("run", "--data {} holds {} bytes; a sample of this model needs {}", from,
                     text_.size(), needed);
  description_ =
      fmt::format("{} of text from {}", format_bytes(static_cast<Bytes>(text_.size())), from);
}

TensorMap Dataset::batch(int64_t step) const {
  const uint64_t stream = mix64(mix64(seed_) ^ static_cast<uint64_t>(step));
  TensorMap batch;
  if (text_.empty()) {
    at::Generator generator = at::detail::createCPUGenerator(stream);
    for (const InputSpec& input : inputs_) {
      const auto options = at::TensorOptions().dtype(to_torch(input.spec.dtype));
      batch[input.name] = is_float(input.spec.dtype)
                              ? at::randn(input.spec.shape, generator, options)
                              : at::randint(input.below, input.spec.shape, generator, options);
    }
    return batch;
  }
  const int64_t samples = inputs_[0].spec.shape[0], seq = inputs_[0].spec.shape[1];
  at::Tensor tokens = at::empty({samples, seq}, at::kLong), targets = at::empty_like(tokens);
  int64_t *in = tokens.data_ptr<int64_t>(), *out = targets.data_ptr<int64_t>();
  Rng rng(stream);
  for (int64_t i = 0; i < samples; ++i) {
    const int64_t begin = rng.below(static_cast<int64_t>(text_.size()) - seq);
    for (int64_t j = 0; j < seq; ++j) {
      in[i * seq + j] = static_cast<unsigned char>(text_[begin + j]);
      out[i * seq + j] = static_cast<unsigned char>(text_[begin + j + 1]);
    }
  }
  batch[inputs_[0].name] = tokens;
  batch[inputs_[1].name] = targets;
  return batch;
}

}  // namespace motley
