// Plans in the words of training frameworks, and back.
//
//   motley export plan.json --to megatron -o run     ->  run/arguments.txt, hostfile, launch.sh, ...
//   motley import run -o again.json                  ->  the same plan
//
// An exporter is one file and one line of the table in export.cc: it writes an arrangement
// (planner/arrangement.h) as files, and reads the arrangement back from them. Besides its own every
// directory has `motley.json` (model, cluster, captured step), `hostfile`, `ranks.txt` (which device
// of which host is which rank) and, unless the framework starts itself, `launch.sh`. A plan that a
// framework cannot say is refused; what it does in another way is told in `differences`.
//
// What is read is checked by the framework's own rules before it is believed: degrees that divide
// the ranks, sizes that are the model's, layers that add up.
#pragma once

#include <string>
#include <vector>

#include "planner/arrangement.h"
#include "planner/options.h"
#include "planner/sizes.h"
#include "planner/targets.h"

namespace motley {

struct ExportedFile {
  std::string path;  // in the directory
  std::string text;
  bool executable = false;
};

struct Exported {
  std::vector<ExportedFile> files;
  std::vector<std::string> differences;  // from the plan, sentences; empty: exact
};

// What exporters write.
struct ExportJob {
  const Plan& plan;
  planner::Arrangement arrangement;
  std::optional<Sizes> sizes;
  std::string no_sizes;              // why there are none
  std::vector<planner::Host> hosts;  // those with ranks, in the order of ranks where it is one
  std::vector<int> ranks;            // [rank] device of the cluster
  bool replicas_outside = false;     // ranks are ordered by replica, stage, tensors
  int dp() const { return arrangement.stages[0].dp(); }
  int tp() const { return arrangement.stages[0].tp(); }
  // Samples that one rank of the first stage takes at a time.
  int64_t samples() const { return arrangement.micro_batch * arrangement.replicas() / dp(); }
  int micro_batches() const { return arrangement.micro_batches[0]; }
  // Throws UserError where the sizes are not known.
  const Sizes& need_sizes(const char* target) const;
};

// A directory that was exported, or written like one.
class ExportDirectory {
 public:
  explicit ExportDirectory(std::string path) : path_(std::move(path)) {}
  bool has(const std::string& file) const;
  std::string text(const std::string& file) const;  // throws UserError if there is none
  std::string name(const std::string& file) const { return path_ + "/" + file; }

 private:
  std::string path_;
};

// What an importer is told besides the files: the model and the cluster they are of.
struct ImportJob {
  const ExportDirectory& directory;
  const Cluster& cluster;
  const Graph& graph;  // of `batch` samples
  const planner::Target& target;
  int64_t batch = 0;
  Optimizer optimizer = Optimizer::adamw;
  DType precision = DType::f32;
  std::optional<Sizes> sizes;        // of the graph
  std::vector<planner::Host> hosts;  // with ranks, in their order
  std::vector<int> ranks;            // [rank] device
};

struct Exporter {
  const char* target;  // a name of planner/targets.h
  const char* file;    // by which a directory is known
  void (*write)(const ExportJob& job, Exported* out);
  // Throws UserError that names file, field and value.
  planner::Arrangement (*read)(const ImportJob& job);
};
const std::vector<Exporter>& exporters();
const Exporter* find_exporter(const std::string& target);  // null: there is none

// The files of a plan. `reason`, a sentence, is set and nothing written where the target cannot say
// it. Throws UserError where the plan file does not know what the target has to be told.
Exported export_plan(const Plan& plan, const Exporter& exporter, std::string* reason);

// The files of an arrangement of a plan's model and devices; they tell nothing of its programs.
Exported export_arrangement(const Plan& plan, const planner::Arrangement& arrangement,
                            const Exporter& exporter, std::string* reason);

// Writes all files or none: into a directory beside `path` that then takes its name. Throws UserError
// where `path` exists and is not an empty directory, unless `force`.
void write_directory(const Exported& exported, const std::string& path, bool force);

// What a directory says of its origin (motley.json).
struct Origin {
  std::string target, model;
  int64_t batch = 0;
  Optimizer optimizer = Optimizer::adamw;
  DType precision = DType::f32;
  Cluster cluster;
  Graph graph;
};
Origin read_origin(const ExportDirectory& directory);

// What a directory says, by the target's own rules. `step`: its batch, optimizer and precision.
// Throws UserError.
planner::Arrangement import_arrangement(const ExportDirectory& directory, const Exporter& exporter,
                                        const Cluster& cluster, const Graph& graph,
                                        const planner::PlanOptions& step);

// The plan that a directory says. `cluster` and `graph`: null: those of its origin. Throws UserError.
std::unique_ptr<Plan> import_plan(const std::string& path, const Cluster* cluster,
                                  const Graph* graph);

}  // namespace motley
