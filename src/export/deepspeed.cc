// DeepSpeed: its JSON, and with stages a PipelineModule whose cuts are the plan's (partition_method has
// no word for them). Layers are those of model.py: embedding, blocks, head.
#include <algorithm>

#include "core/error.h"
#include "export/common.h"

namespace motley::exports {

using planner::ArrangedStage;
using planner::Arrangement;
using planner::Inside;

namespace {

constexpr const char* kFile = "ds_config.json";
constexpr const char* kStages = "stages.json";

const char* kPipeline =
    R"py("""The plan's stages for DeepSpeed: stage s has the layers [parts[s], parts[s + 1]) of model.layers()."""
import json
import pathlib

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

import model

STAGES = json.loads((pathlib.Path(__file__).resolve().parent / "stages.json").read_text())


class CutPipeline(PipelineModule):
    def _partition_layers(self, method=None):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = STAGES["parts"]
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def build(topology):
    """topology: deepspeed.runtime.pipe.topology.PipeDataParallelTopology."""
    specs = []
    for cls, args, tied in model.layers():
        specs.append(TiedLayerSpec(tied, cls, *args, tied_weight_attr="table", forward_fn=model.head if specs else None)
                     if tied else LayerSpec(cls, *args))
    return CutPipeline(layers=specs, topology=topology, loss_fn=model.loss,
                       activation_checkpoint_interval=STAGES["activation_checkpoint_interval"])
)py";

const char* kTrain = R"py("""Trains the plan's model with DeepSpeed: bash launch.sh."""
import json
import os
import pathlib

import deepspeed
import torch

import model

HERE = pathlib.Path(__file__).resolve().parent
CONFIG = json.loads((HERE / "ds_config.json").read_text())
STAGES = json.loads((HERE / "stages.json").read_text())
STEPS = int(os.environ.get("STEPS", 10))


def batches(device):
    """Random tokens; put your data in their place."""
    sizes, rows = model.SIZES, CONFIG["train_micro_batch_size_per_gpu"]
    random = torch.Generator().manual_seed(int(os.environ["RANK"]))
    while True:
        tokens = torch.randint(sizes["vocab"], (rows, sizes["seq"] + 1), generator=random)
        yield tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def main():
    deepspeed.init_distributed()
    device = torch.device(deepspeed.get_accelerator().device_name(), int(os.environ.get("LOCAL_RANK", 0)))
    if len(STAGES["parts"]) > 2:
        import pipeline_module
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
        net = pipeline_module.build(PipeDataParallelTopology(num_pp=len(STAGES["parts"]) - 1, num_dp=STAGES["replicas"]))
    else:
        net = model.build(recompute=STAGES["activation_checkpoint_interval"] > 0)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=[p for p in net.parameters() if p.requires_grad],
                                      config=CONFIG)
    data = batches(device)
    for step in range(STEPS):
        if len(STAGES["parts"]) > 2:
            value = engine.train_batch(data_iter=data)
        else:
            for _ in range(CONFIG["gradient_accumulation_steps"]):
                tokens, targets = next(data)
                value = model.loss(engine(tokens), targets)
                engine.backward(value)
                engine.step()
        if engine.global_rank == 0:
            print(json.dumps({"step": step, "loss": float(value)}), flush=True)


if __name__ == "__main__":
    main()
)py";

}  // namespace

void write_deepspeed(const ExportJob& job, Exported* out) {
  const Arrangement& a = job.arrangement;
  const bool pieces = a.stages[0].inside == Inside::pieces && job.dp() > 1;
  Json config = {{"train_batch_size", a.batch()},
                 {"train_micro_batch_size_per_gpu", job.samples()},
                 {"gradient_accumulation_steps", job.micro_batches()},
                 {"bf16", {{"enabled", job.plan.precision == DType::bf16}}},
                 {"fp16", {{"enabled", job.plan.precision == DType::f16}}},
                 {"optimizer",
                  {{"type", job.plan.optimizer.kind == Optimizer::sgd ? "SGD" : "AdamW"},
                   {"params", {{"lr", 1e-4}}}}},
                 {"steps_per_print", 10},
                 {"zero_optimization", {{"stage", pieces ? 3 : a.zero}}}};
  if (job.tp() > 1) config["tensor_parallel"] = {{"autotp_size", job.tp()}};
  out->files.push_back({kFile, config.dump(2) + "\n"});
  std::vector<int> parts = {0}, blocks;
  int next = 1;
  for (size_t s = 0; s < a.stages.size(); ++s) {
    next += a.stages[s].blocks;
    parts.push_back(s + 1 == a.stages.size() ? next + 1 : next);
  }
  const Json stages = {{"parts", parts},
                       {"replicas", job.dp()},
                       {"tensors", job.tp()},
                       {"activation_checkpoint_interval", a.stages[0].recompute ? 1 : 0}};
  out->files.push_back({kStages, stages.dump(2) + "\n"});
  add_model(job, out);
  if (a.pipelined()) out->files.push_back({"pipeline_module.py", kPipeline});
  out->files.push_back({"train.py", kTrain});
  out->files.push_back(launch_script(job, "train.py", ""));
  if (job.sizes && job.sizes->experts > 0)
    out->differences.push_back("model.py has no experts: put the model's own layers in its place");
  if (job.tp() > 1)
    out->differences.push_back(
        "AutoTP cuts the matrices of modules that it knows, by name; model.py's "
        "have such names");
  if (job.plan.optimizer.kind == Optimizer::amsgrad)
    out->differences.push_back("DeepSpeed's AdamW has no amsgrad");
}

namespace {

// DeepSpeed passes over names that it does not know, so that a wrong one would be another precision.
void check_precision(const Json& config, DType precision, const std::string& file) {
  if (!config.is_object()) throw user_error("import", "{}: is no object", file);
  const std::pair<const char*, DType> kinds[] = {{"bf16", DType::bf16}, {"fp16", DType::f16}};
  for (const auto& [name, kind] : kinds) {
    const auto it = config.find(name);
    if (it == config.end() || !it->is_object() || !it->contains("enabled"))
      throw user_error("import", "{}: {}.enabled is missing; give true or false", file, name);
    if ((*it)["enabled"] != Json(precision == kind))
      throw user_error("import", "{}: {}.enabled is {}; the plan's precision is {}", file, name,
                       (*it)["enabled"].dump().substr(0, 40), precision_name(precision));
  }
}

}  // namespace

Arrangement read_deepspeed(const ImportJob& job) {
  const std::string file = job.directory.name(kFile), cuts = job.directory.name(kStages);
  const Json config = parse_json(job.directory.text(kFile), file),
             stages = parse_json(job.directory.text(kStages), cuts);
  const auto number = [](const Json& object, const char* key, const std::string& name,
                         int64_t least) {
    const auto it = object.is_object() ? object.find(key) : object.end();
    if (it == object.end()) throw user_error("import", "{}: {} is missing", name, key);
    return number_in(it->dump(), name + ": " + key, least, int64_t{1} << 31);
  };
  Degrees d;
  d.micro_batch = number(config, "train_micro_batch_size_per_gpu", file, 1);
  d.micro_batches = static_cast<int>(number(config, "gradient_accumulation_steps", file, 1));
  same(file + ": train_batch_size", number(config, "train_batch_size", file, 1), job.batch,
       "the batch");
  d.dp = static_cast<int>(number(stages, "replicas", cuts, 1));
  d.tp = static_cast<int>(number(stages, "tensors", cuts, 1));
  const int64_t interval = number(stages, "activation_checkpoint_interval", cuts, 0);
  if (interval > 1)
    throw user_error(
        "import", "{}: activation_checkpoint_interval is {}; give 1, every layer by itself, or 0",
        cuts, interval);
  d.recompute = interval == 1;
  check_precision(config, job.precision, file);
  check_model(job);
  if (const auto tensor = config.find("tensor_parallel"); tensor != config.end())
    same(file + ": autotp_size", number(*tensor, "autotp_size", file, 1), d.tp,
         "tensors of stages.json");
  else
    same(cuts + ": tensors", d.tp, 1, "without tensor_parallel");
  if (!config.contains("zero_optimization"))
    throw user_error("import", "{}: zero_optimization is missing", file);
  const int64_t level = number(config["zero_optimization"], "stage", file, 0);
  if (level > 3)
    throw user_error("import", "{}: zero_optimization.stage is {}; give 0 to 3", file, level);
  const auto parts = stages.find("parts");
  if (parts == stages.end() || !parts->is_array() || parts->size() < 2 || parts->size() > 4096)
    throw user_error("import", "{}: parts is no list of cuts", cuts);
  int64_t before = 0;
  for (size_t i = 0; i < parts->size(); ++i) {
    const int64_t at =
        number_in((*parts)[i].dump(), cuts + ": parts", i == 0 ? 0 : before, 1 << 20);
    if (i > 0) d.blocks.push_back(static_cast<int>(at - before));
    before = at;
  }
  same(cuts + ": parts[0]", number_in((*parts)[0].dump(), cuts + ": parts[0]", 0), 0,
       "the first layer");
  d.blocks.front() -= 1;  // the embedding
  d.blocks.back() -= 1;   // the head
  for (const int b : d.blocks)
    if (b < 0) throw user_error("import", "{}: a part has no block", cuts);
  d.pp = static_cast<int>(d.blocks.size());
  if (d.pp > 1 && level > 1)
    throw user_error("import", "{}: zero_optimization.stage {} is not beside stages; give 0 or 1",
                     file, level);
  d.pieces = level == 3 && d.dp > 1;
  d.zero = level == 3 ? 0 : static_cast<int>(level);
  return rectangle(job, d, file);
}

}  // namespace motley::exports
