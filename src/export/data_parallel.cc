// Stock PyTorch: DDP, and FSDP2, with rows by device. Rank r takes rows[r] rows of every micro-batch
// (a sampler), and weighs its mean loss by its rows, since both average gradients over ranks:
//
//   gradient = 1/n sum_r (n rows_r / batch) mean_r = sum of all rows / batch, that of one device
#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "export/common.h"
#include "shard/shares.h"

namespace motley::exports {

using planner::ArrangedStage;
using planner::Arrangement;
using planner::Inside;

namespace {

constexpr const char* kFile = "rows.json";

extern const char* const kModel;
extern const char* const kTrain;

}  // namespace

void add_model(const ExportJob& job, Exported* out) {
  if (!job.sizes) {
    out->differences.push_back("the plan does not say how to build its model (" + job.no_sizes +
                               "): give model.py with build(), loss() and, of stages, layers()");
    return;
  }
  out->files.push_back({kModelSizes, to_json(*job.sizes).dump(2) + "\n"});
  out->files.push_back({"model.py", kModel});
}

void write_rows(const ExportJob& job, Exported* out) {
  const Arrangement& a = job.arrangement;
  const ArrangedStage& stage = a.stages[0];
  const int n = job.dp();
  std::vector<int64_t> rows(n, job.samples());
  if (!a.shares.empty()) rows = divide(a.micro_batch, a.shares);
  if (*std::min_element(rows.begin(), rows.end()) == 0)
    throw user_error("export",
                     "a device has no row of a micro-batch of {}; plan with a larger --batch "
                     "or fewer devices",
                     a.micro_batch);
  const Json json = {{"rows", rows},
                     {"micro_batches", job.micro_batches()},
                     {"parameters", stage.inside == Inside::pieces ? "pieces" : "whole"},
                     {"recompute", stage.recompute},
                     {"optimizer", to_string(job.plan.optimizer.kind)},
                     {"precision", precision_name(job.plan.precision)}};
  out->files.push_back({kFile, json.dump(2) + "\n"});
  add_model(job, out);
  if (job.sizes && job.sizes->experts > 0)
    out->differences.push_back("model.py has no experts: put the model itself in its place");
  out->files.push_back({"train.py", kTrain});
  out->files.push_back(launch_script(job, "train.py", ""));
  if (job.plan.precision == DType::f16)
    out->differences.push_back("train.py scales no losses, which fp16 mostly needs");
}

Arrangement read_rows(const ImportJob& job) {
  const std::string file = job.directory.name(kFile);
  const Json json = parse_json(job.directory.text(kFile), file);
  const Fields fields(json, "import", file);
  std::vector<int64_t> rows;
  int64_t sum = 0;
  for (const Json& row : fields.array("rows")) {
    rows.push_back(number_in(row.dump(), file + ": rows", 1, int64_t{1} << 24));
    sum += rows.back();
  }
  same(file + ": rows: numbers", static_cast<int64_t>(rows.size()),
       static_cast<int64_t>(job.ranks.size()), "ranks.txt: ranks");
  const int64_t count = fields.integer("micro_batches");
  if (count < 1 || count > kMaxMicroBatches)
    throw fields.bad("micro_batches", fmt::format("is {}; give a number from 1 on", count));
  same(file + ": rows x micro_batches", sum * count, job.batch, "the batch");
  const std::string parameters = fields.text("parameters");
  if (parameters != "pieces" && parameters != "whole")
    throw fields.bad("parameters", "is '" + parameters.substr(0, 40) + "'; give whole or pieces");
  const Json& again = fields.at("recompute");
  if (!again.is_boolean()) throw fields.bad("recompute", "is no boolean");
  same_word(file + ": optimizer", fields.text("optimizer"), to_string(job.optimizer.kind),
            "the plan's");
  same_word(file + ": precision", fields.text("precision"), precision_name(job.precision),
            "the plan's");
  check_model(job);
  Arrangement a;
  a.micro_batch = sum;
  a.micro_batches = {static_cast<int>(count)};
  ArrangedStage stage;
  stage.inside = parameters == "pieces" && rows.size() > 1 ? Inside::pieces : Inside::batch;
  stage.blocks = std::max(1, planner::count_blocks(job.graph));
  stage.recompute = again.get<bool>();
  stage.devices = {job.ranks};
  if (!std::is_sorted(job.ranks.begin(), job.ranks.end()))
    throw user_error("import", "{}: ranks are not in the order of the cluster's devices",
                     job.directory.name("ranks.txt"));
  if (std::any_of(rows.begin(), rows.end(), [&](int64_t r) { return r != rows[0]; }))
    for (const int64_t r : rows)
      a.shares.push_back(static_cast<double>(r) / static_cast<double>(sum));
  a.stages = {std::move(stage)};
  return a;
}

namespace {

const char* const kModel =
    R"py("""The plan's transformer on plain PyTorch, in the sizes of model.json. Put your own in its place: build() gives the
module, loss() what it is trained by, layers() its parts in order for pipelines."""
import json
import math
import pathlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SIZES = json.loads((pathlib.Path(__file__).resolve().parent / "model.json").read_text())


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def norm():
    return (RMSNorm if SIZES["rms_norm"] else nn.LayerNorm)(SIZES["hidden"])


def rotate(x):
    half = x.shape[-1] // 2
    frequency = torch.exp(torch.arange(half, device=x.device, dtype=x.dtype) * (-math.log(1e4) / half))
    angle = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None] * frequency
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(SIZES["vocab"], SIZES["hidden"]) * 0.02)
        if SIZES["positions"]:
            self.positions = nn.Parameter(torch.randn(SIZES["positions"], SIZES["hidden"]) * 0.02)

    def forward(self, tokens):
        x = F.embedding(tokens, self.table)
        return x + self.positions[:tokens.shape[1]] if SIZES["positions"] else x


class Block(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        hidden, ffn, bias = SIZES["hidden"], SIZES["ffn"], SIZES["bias"]
        self.recompute = recompute
        self.norm1, self.norm2 = norm(), norm()
        kv = hidden // SIZES["heads"] * SIZES["kv_heads"]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, n, bias) for n in (hidden, kv, kv))
        self.o_proj = nn.Linear(hidden, hidden, bias)
        if SIZES["gated"]:
            self.gate_proj = nn.Linear(hidden, ffn, bias)
        self.up_proj, self.down_proj = nn.Linear(hidden, ffn, bias), nn.Linear(ffn, hidden, bias)

    def attention(self, x):
        batch, seq, hidden = x.shape
        heads, kv_heads = SIZES["heads"], SIZES["kv_heads"]
        q, k, v = (layer(x).view(batch, seq, n, -1).transpose(1, 2) for layer, n in
                   ((self.q_proj, heads), (self.k_proj, kv_heads), (self.v_proj, kv_heads)))
        if not SIZES["positions"]:
            q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        if SIZES["causal"]:
            scores = scores + torch.full((seq, seq), -math.inf, device=x.device, dtype=x.dtype).triu(1)
        y = F.dropout(scores.softmax(-1), SIZES["dropout"], self.training) @ v
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, hidden))

    def whole(self, x):
        x = x + F.dropout(self.attention(self.norm1(x)), SIZES["dropout"], self.training)
        y, act = self.norm2(x), getattr(F, SIZES["activation"] or "gelu")
        y = act(self.gate_proj(y)) * self.up_proj(y) if SIZES["gated"] else act(self.up_proj(y))
        return x + F.dropout(self.down_proj(y), SIZES["dropout"], self.training)

    def forward(self, x):
        if self.recompute and self.training:
            return checkpoint(self.whole, x, use_reentrant=False)
        return self.whole(x)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = norm()

    def forward(self, x):
        return self.norm(x)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = norm()
        self.output = nn.Linear(SIZES["hidden"], SIZES["vocab"], bias=False)

    def forward(self, x):
        return self.output(self.norm(x))


class TiedHead(Embedding):
    """The embedding once more, as a head: of pipelines, whose first and last stage hold the table."""
    def __init__(self):
        super().__init__()
        self.norm = norm()


def head(module, x):
    return F.linear(module.norm(x) if hasattr(module, "norm") else x, module.table)


def layers():
    """(class, arguments, name of what is shared or None): embedding, blocks, head."""
    if SIZES["tied"]:
        return [(TiedHead, (), "table")] + [(Block, (), None)] * SIZES["layers"] + [(TiedHead, (), "table")]
    return [(Embedding, (), None)] + [(Block, (), None)] * SIZES["layers"] + [(Head, (), None)]


class Transformer(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(SIZES["layers"]))
        self.head = Norm() if SIZES["tied"] else Head()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return F.linear(x, self.embedding.table) if SIZES["tied"] else x


def build(recompute=False):
    return Transformer(recompute)


def loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
)py";

const char* const kTrain =
    R"py("""Trains model.py on all ranks, each with its own number of rows (rows.json), and computes what one device computes at
the whole batch. `bash launch.sh`, or torchrun train.py, or for comparison `python train.py --one-device`."""
import argparse
import contextlib
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

import model

PLAN = json.loads((pathlib.Path(__file__).resolve().parent / "rows.json").read_text())


class RowsByRank(torch.utils.data.Sampler):
    """Batches of indices of a data set: rank r takes rows[r] of every micro-batch. All ranks draw the same order."""
    def __init__(self, length, rows, rank, seed=0, shuffle=True):
        self.length, self.rows, self.rank, self.seed, self.shuffle = length, rows, rank, seed, shuffle
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.length // sum(self.rows)

    def __iter__(self):
        random = torch.Generator().manual_seed(self.seed + self.epoch)
        order = (torch.randperm(self.length, generator=random) if self.shuffle else torch.arange(self.length)).tolist()
        first, size = sum(self.rows[:self.rank]), sum(self.rows)
        for i in range(len(self)):
            yield order[i * size + first:i * size + first + self.rows[self.rank]]


def data_set(args, rows):
    """[sample, seq + 1] tokens: those of --data, a tensor that torch.save wrote, or random ones."""
    if args.data:
        return torch.load(args.data)
    random = torch.Generator().manual_seed(1)
    return torch.randint(model.SIZES["vocab"], (rows, model.SIZES["seq"] + 1), generator=random)


def wrapped(net, device):
    """The module that reduces gradients, and what keeps it from that until the last micro-batch."""
    if PLAN["parameters"] == "pieces":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(PLAN["precision"])
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32) if kind else MixedPrecisionPolicy()
        for block in getattr(net, "blocks", []):
            fully_shard(block, reshard_after_forward=True, mp_policy=policy)
        return fully_shard(net, mp_policy=policy), contextlib.nullcontext
    net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    return net, net.no_sync


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--data", help="file of a tensor [sample, seq + 1] of tokens")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--save", help="file for the parameters after the last step (rank 0)")
    parser.add_argument("--even", action="store_true", help="equal rows, for comparison")
    parser.add_argument("--one-device", action="store_true", help="one process, the whole batch")
    return parser.parse_args()


def train(args):
    rows = PLAN["rows"]
    if args.even:
        base, more = divmod(sum(rows), len(rows))
        rows = [base + (r < more) for r in range(len(rows))]
    rank, world = 0, 1
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.one_device:
        rows = [sum(rows)]
    else:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        if world != len(rows):
            raise SystemExit(f"rows.json is for {len(rows)} ranks, there are {world}")
    torch.manual_seed(args.seed)
    net = model.build(PLAN["recompute"]).to(device, getattr(torch, args.dtype))
    quiet = contextlib.nullcontext
    if not args.one_device:
        net, quiet = wrapped(net, device)
    kinds = {"sgd": lambda p: torch.optim.SGD(p, lr=args.lr), "adamw": lambda p: torch.optim.AdamW(p, lr=args.lr),
             "amsgrad": lambda p: torch.optim.AdamW(p, lr=args.lr, amsgrad=True)}
    optimizer = kinds[PLAN["optimizer"]](net.parameters())
    cast = contextlib.nullcontext
    if PLAN["precision"] != "fp32" and PLAN["parameters"] != "pieces":
        kind = torch.bfloat16 if PLAN["precision"] == "bf16" else torch.float16
        cast = lambda: torch.autocast(device.type, kind)
    micro_batches = PLAN["micro_batches"]
    data = data_set(args, 4 * sum(rows) * micro_batches)
    sampler = RowsByRank(len(data), rows, rank, args.seed)
    if len(sampler) < micro_batches:
        raise SystemExit(f"{len(data)} samples are less than a batch of {sum(rows) * micro_batches}")
    # DDP and FSDP2 average over ranks; weighed so, that is the mean over all rows.
    weight = rows[rank] * world / (sum(rows) * micro_batches)
    epoch, order = 0, iter(sampler)
    for step in range(args.steps):
        start, total = time.perf_counter(), torch.zeros((), dtype=torch.float64, device=device)
        for m in range(micro_batches):
            chosen = next(order, None)
            if chosen is None:
                epoch += 1
                sampler.set_epoch(epoch)
                order = iter(sampler)
                chosen = next(order)
            tokens = data[chosen].to(device)
            with quiet() if m + 1 < micro_batches else contextlib.nullcontext():
                with cast():
                    value = model.loss(net(tokens[:, :-1]), tokens[:, 1:]) * weight
                value.backward()
            total += value.detach() / world
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not args.one_device:
            dist.all_reduce(total)
        if rank == 0:
            print(json.dumps({"step": step, "loss": float(total), "seconds": time.perf_counter() - start}), flush=True)
    if args.save:
        state = {}
        for name, value in (net.module if hasattr(net, "module") else net).state_dict().items():
            state[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
        if rank == 0:
            torch.save(state, args.save)


def main():
    args = arguments()
    train(args)
    if not args.one_device:
        dist.destroy_process_group()
        # Python, when it ends, kills a thread of gloo that only now lets go of a tensor, and that the whole process.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
)py";

}  // namespace

}  // namespace motley::exports
