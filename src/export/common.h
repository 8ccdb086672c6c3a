// What exporters share.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "export/export.h"

namespace motley::exports {

// A script that starts the ranks of one host, or of all by ssh: `program` is what Python is given,
// such as "pretrain_gpt.py"; `arguments` a file of words, one a line, or empty. It takes all numbers
// from hostfile and ranks.txt.
ExportedFile launch_script(const ExportJob& job, const std::string& program,
                           const std::string& arguments, const std::string& environment = "",
                           const std::string& name = "launch.sh");

// One of the files that all directories have.
ExportedFile host_file(const ExportJob& job, bool with_types);

// Degrees of a framework in which all stages are alike.
struct Degrees {
  int tp = 1, ep = 1, dp = 1, pp = 1;
  int interleave = 1;
  int64_t micro_batch = 1;  // samples of a rank
  int micro_batches = 1;    // of a replica
  std::vector<int> blocks;  // [stage]
  bool recompute = false, pieces = false;
  int zero = 0;
  bool replicas_outside = false;
};
// The arrangement that has them. Throws UserError that starts with `where` if they do not fit the
// ranks, the batch or the model.
planner::Arrangement rectangle(const ImportJob& job, const Degrees& degrees,
                               const std::string& where);

// Whole numbers of at least `least`; throws UserError that names file and field.
int64_t number_in(const std::string& text, const std::string& where, int64_t least,
                  int64_t most = int64_t{1} << 40);

// Throws UserError unless a field has the number that it must have, which `what` says.
void same(const std::string& where, int64_t value, int64_t wanted, const std::string& what);
void same_word(const std::string& where, const std::string& value, const std::string& wanted,
               const std::string& what);
// The same of a number with a fraction, as text.
void same_rate(const std::string& where, const std::string& text, double wanted, const char* what);
// "fp32", "bf16" or "fp16".
const char* precision_name(DType precision);

// Text with `{name}` replaced.
std::string filled(std::string text, const std::map<std::string, std::string>& values);

// Python on stock PyTorch: a transformer of given sizes (model.py, model.json).
void add_model(const ExportJob& job, Exported* out);
// model.json, if there is one, has the model's sizes.
constexpr const char* kModelSizes = "model.json";
void check_model(const ImportJob& job);

}  // namespace motley::exports
