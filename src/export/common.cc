#include "export/common.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <set>

#include "core/error.h"

namespace motley::exports {

using planner::ArrangedStage;
using planner::Arrangement;
using planner::Inside;

namespace {

constexpr const char* kLaunch = R"sh(#!/usr/bin/env bash
# Starts the ranks of this host, `bash {name} HOST`, or of all hosts by ssh, `bash {name}`.
# What comes behind HOST is handed to the program. HOST is a name in ranks.txt (rank, host, device).
set -euo pipefail
cd "$(dirname "$0")"
export MASTER_ADDR="${MASTER_ADDR:-{master}}" MASTER_PORT="${MASTER_PORT:-29500}"
{environment}if [ $# = 0 ]; then
  while read -r host _; do
    ssh -n "$host" "cd '$PWD' && MASTER_ADDR='$MASTER_ADDR' MASTER_PORT='$MASTER_PORT' bash {name} '$host'" &
  done <hostfile
  wait
  exit
fi
host=$1
shift
{words}{start}
)sh";

constexpr const char* kTorchrun =
    R"sh(node=$(awk -v h="$host" '$1 == h {print NR - 1}' hostfile)
export CUDA_VISIBLE_DEVICES=$(awk -v h="$host" '$2 == h {printf "%s%s", s, $3; s = ","}' ranks.txt)
exec torchrun --nnodes "$(grep -c . hostfile)" --node-rank "$node" --nproc-per-node "$(awk -v h="$host" '$2 == h' ranks.txt | wc -l)" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" {program}{arguments} "$@")sh";

// Ranks that do not follow one another on their hosts are started one by one.
constexpr const char* kOneByOne = R"sh(while read -r rank of device; do
  [ "$of" = "$host" ] || continue
  RANK=$rank LOCAL_RANK=$device WORLD_SIZE=$(grep -c . ranks.txt) LOCAL_WORLD_SIZE=$(awk -v h="$host" '$2 == h' ranks.txt | wc -l) \
    python {program}{arguments} "$@" &
done <ranks.txt
wait)sh";

}  // namespace

std::string filled(std::string text, const std::map<std::string, std::string>& values) {
  for (const auto& [name, value] : values) {
    const std::string mark = "{" + name + "}";
    for (size_t at = 0; (at = text.find(mark, at)) != std::string::npos; at += value.size())
      text.replace(at, mark.size(), value);
  }
  return text;
}

ExportedFile launch_script(const ExportJob& job, const std::string& program,
                           const std::string& arguments, const std::string& environment,
                           const std::string& name) {
  const bool together = planner::contiguous(job.hosts, job.ranks);
  const std::string more = arguments.empty() ? "" : " \"${words[@]}\"";
  const std::map<std::string, std::string> values = {
      {"master", job.hosts[0].name},
      {"environment", environment},
      {"words", arguments.empty() ? "" : "mapfile -t words <" + arguments + "\n"},
      {"name", name},
      {"program", program},
      {"arguments", more}};
  std::string text = filled(kLaunch, {{"start", together ? kTorchrun : kOneByOne}});
  return {name, filled(text, values), true};
}

ExportedFile host_file(const ExportJob& job, bool with_types) {
  std::string text;
  for (const planner::Host& host : job.hosts) {
    int slots = 0;
    for (int d : host.devices)
      slots += static_cast<int>(std::count(job.ranks.begin(), job.ranks.end(), d));
    text += fmt::format("{} slots={}", host.name, slots);
    if (with_types) text += " type=" + job.plan.cluster.type_of(host.devices[0]).name;
    text += "\n";
  }
  return {"hostfile", text};
}

int64_t number_in(const std::string& text, const std::string& where, int64_t least, int64_t most) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most)
    throw user_error("import", "{} is '{}'; give a whole number from {} to {}", where,
                     text.substr(0, 40), least, most);
  return value;
}

void same(const std::string& where, int64_t value, int64_t wanted, const std::string& what) {
  if (value != wanted)
    throw user_error("import", "{} is {}; give {}, {}", where, value, wanted, what);
}

void same_word(const std::string& where, const std::string& value, const std::string& wanted,
               const std::string& what) {
  if (value != wanted)
    throw user_error("import", "{} is '{}'; give {}, {}", where, value.substr(0, 40), wanted, what);
}

void same_rate(const std::string& where, const std::string& text, double wanted, const char* what) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() ||
      !(std::abs(value - wanted) <= 1e-9))
    throw user_error("import", "{} is '{}'; give {}, {}", where, text.substr(0, 40), wanted, what);
}

const char* precision_name(DType precision) {
  return precision == DType::bf16 ? "bf16" : precision == DType::f16 ? "fp16" : "fp32";
}

void check_model(const ImportJob& job) {
  if (!job.sizes || !job.directory.has(kModelSizes)) return;
  const std::string file = job.directory.name(kModelSizes);
  const Json json = parse_json(job.directory.text(kModelSizes), file);
  if (!json.is_object()) throw user_error("import", "{}: is no object", file);
  const Json sizes = to_json(*job.sizes);
  for (const auto& [key, wanted] : sizes.items()) {
    const auto it = json.find(key);
    if (it == json.end()) throw user_error("import", "{}: {} is missing", file, key);
    if (*it != wanted)
      throw user_error("import", "{}: {} is {}; give {}, the model's, or leave the file out", file,
                       key, it->dump().substr(0, 40), wanted.dump());
  }
}

Arrangement rectangle(const ImportJob& job, const Degrees& d, const std::string& where) {
  const auto world = static_cast<int64_t>(job.ranks.size());
  const auto wrong = [&](const std::string& what) {
    return user_error("import", "{}: {}", where, what);
  };
  if (int64_t{d.tp} * d.dp * d.pp != world)
    throw wrong(fmt::format("tensors {} x replicas {} x stages {} is not the {} ranks of ranks.txt",
                            d.tp, d.dp, d.pp, world));
  if (d.micro_batch * d.dp * d.micro_batches != job.batch)
    throw wrong(fmt::format("{} replicas x {} micro-batches of {} are not the batch of {}", d.dp,
                            d.micro_batches, d.micro_batch, job.batch));
  if (d.ep < 1 || d.dp % d.ep != 0)
    throw wrong(
        fmt::format("experts are divided over {} of {} replicas; give a divisor", d.ep, d.dp));
  const int layers = planner::count_blocks(job.graph);
  const auto stages = static_cast<size_t>(d.pp) * d.interleave;
  if (d.pp == 1 && d.interleave > 1)
    throw wrong(fmt::format("{} stages on every device and 1 device of a pipeline; give 2 or more",
                            d.interleave));
  if (d.blocks.size() != stages)
    throw wrong(fmt::format("{} lists of layers for {} stages", d.blocks.size(), stages));
  if (const int sum = std::accumulate(d.blocks.begin(), d.blocks.end(), 0); sum != layers)
    throw wrong(fmt::format("the stages have {} layers, the model has {}", sum, layers));
  if (d.tp > 1 && d.ep > 1)
    throw wrong("experts and matrices are both divided, which no plan of motley does");
  if (job.sizes)
    if (const std::string why = planner::cannot_divide(job.target, d.tp, d.ep, *job.sizes);
        !why.empty())
      throw wrong(why + "; give a divisor");
  Arrangement a;
  // One pass of all devices is one program, whose gradients travel during its backward pass.
  const bool together = d.pp == 1 && d.tp == 1 && d.ep == 1 && d.zero == 0 && !d.recompute &&
                        d.micro_batches == 1 && world == job.cluster.size() &&
                        std::is_sorted(job.ranks.begin(), job.ranks.end());
  // Replicas that are one stage together.
  const int inner = d.pieces || together ? d.dp : d.ep;
  a.micro_batch = d.micro_batch * inner;
  a.micro_batches.assign(d.dp / inner, d.micro_batches);
  a.zero = a.replicas() > 1 ? d.zero : 0;
  a.interleave = d.interleave;
  a.schedule = d.interleave > 1 ? "interleaved" : "1f1b";
  for (size_t s = 0; s < stages; ++s) {
    ArrangedStage stage;
    stage.blocks = d.blocks[s];
    stage.recompute = d.recompute;
    stage.warm_up = std::min(static_cast<int>(stages - s), d.micro_batches);
    stage.inside = d.tp > 1   ? Inside::tensors
                   : d.pieces ? Inside::pieces
                   : d.ep > 1 ? Inside::experts
                              : Inside::batch;
    stage.devices.resize(a.replicas());
    const int p = static_cast<int>(s) % d.pp;
    for (int r = 0; r < d.dp; ++r)
      for (int t = 0; t < d.tp; ++t) {
        const int rank = d.replicas_outside ? (r * d.pp + p) * d.tp + t : (p * d.dp + r) * d.tp + t;
        stage.devices[r / inner].push_back(job.ranks[rank]);
      }
    for (std::vector<int>& devices : stage.devices) std::sort(devices.begin(), devices.end());
    a.stages.push_back(std::move(stage));
  }
  return a;
}

}  // namespace motley::exports
