#!/usr/bin/env python3
"""Plans that a change must not change: what `motley plan` and `motley simulate` say of a table of questions, timings left out.

    goldens.py make FOLDER [BUILD]      plans of all questions by the program of a build folder (default: build), into FOLDER;
                                        those that are there stay
    goldens.py compare FOLDER [BUILD]   the same, compared with what FOLDER holds; exit code 1 where something differs
    goldens.py questions                lists them
"""

import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GPT = "gpt:layers=4,hidden=256,heads=8,seq=128,vocab=1000"
MODELS = {"mlp": "mlp:layers=4,hidden=512", "gpt": GPT, "llama": "llama:layers=2,hidden=256,heads=8,kv_heads=4,ffn=512,seq=128,vocab=1000",
          "moe": "bert-moe:layers=4,hidden=256,heads=8,seq=64,vocab=1000,experts=4", "vgg": "vgg19:width=16,image=32",
          "vit": "vit:layers=4,hidden=256,heads=8,image=64,patch=8", "resnet": "resnet50:width=16,image=64"}  # fmt: skip
CLUSTERS = ["hap-64", "hap-a100-p100", "hapt-64", "amp-mixed", "local-mixed-4"]
OPTIONS = ["--engine spmd", "--engine pipeline", "--engine grid", ""]
MORE = [
    ("gpt", "local-mixed-4", 32, "--virtual-devices 2"),
    ("gpt", "hapt-64", 64, "--virtual-devices machine"),
    ("vgg", "hap-a100-p100", 64, "--segments 2"),
    ("vgg", "hap-64", 256, "--segments auto"),
    ("gpt", "amp-mixed", 64, "--fix pp=4,dp=2,tp=2,mbs=2"),
    ("gpt", "local-mixed-4", 32, "--fix pp=2,zero=2"),
    ("gpt", "hap-64", 64, "--precision bf16 --optimizer sgd"),
    ("moe", "hap-a100-p100", 64, "--strategy expert-parallel"),
    ("gpt", "local-mixed-4", 32, "--strategy tensor-parallel"),
    ("gpt", "hapt-case", 32, "--layers 8 --micro-batch 2"),
    ("gpt", "hapt-case", 32, "--layers auto"),
    ("gpt:layers=8,hidden=1024,heads=16,seq=512", "hapt-case", 256, "--engine pipeline --layers 12"),
    ("gpt:layers=12,hidden=1024,heads=16", "hap-64", 512, "--engine spmd"),
    ("gpt:layers=12,hidden=1024,heads=16", "hap-a100-p100", 128, "--engine spmd"),
    ("gpt:layers=12,hidden=1024,heads=16", "hap-a100-p100", 128, "--engine spmd --memory-limit off --recompute off"),
    ("gpt:layers=8,hidden=1024,heads=16", "hap-a100-p100", 64, "--engine grid"),
    ("vgg19", "p2-a100-2", 64, ""),
]  # fmt: skip
TIMINGS = {"search_s", "capture_s", "planning_s", "first_plan_s"}


def questions():
    for model in MODELS:
        for cluster in CLUSTERS:
            for options in OPTIONS:
                yield MODELS[model], cluster, 64, options
    for model, cluster, batch, options in MORE:
        yield MODELS.get(model, model), cluster, batch, options


def stripped(value):
    if isinstance(value, dict):
        return {k: stripped(v) for k, v in value.items() if k not in TIMINGS}
    return [stripped(v) for v in value] if isinstance(value, list) else value


def ask(program, *words):
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=600)
    text = done.stdout
    if text.startswith("{"):
        text = json.dumps(stripped(json.loads(text)), indent=1, sort_keys=True)
    errors = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("["))
    return f"exit {done.returncode}\n{text}\n{errors}\n"


def answer(program, model, cluster, batch, options):
    with tempfile.TemporaryDirectory() as folder:
        plan = pathlib.Path(folder, "plan.json")
        words = ["plan", model, "--cluster", cluster, "--batch", str(batch), "--time-limit", "600", *shlex.split(options)]
        words += ["--json", "-o", str(plan)]
        text = ask(program, *words).replace(folder, "")
        if plan.exists():
            text += "== plan\n" + plan.read_text() + "\n== simulate\n" + ask(program, "simulate", str(plan), "--json").replace(folder, "")
        return text


def main(action, folder=None, build=ROOT / "build"):
    wrong, count = [], 0
    program = str(pathlib.Path(build, "motley").resolve())
    for count, question in enumerate(questions(), 1):
        name = " ".join(map(str, question)).strip()
        if action == "questions":
            print(name)
            continue
        file = pathlib.Path(folder, name.replace("/", "_").replace(" ", "_") + ".txt")
        if action == "make" and file.exists():
            continue
        text = answer(program, *question)
        if action == "make":
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        elif file.read_text() != text:
            wrong.append(name)
            file.with_suffix(".now").write_text(text)
            print(f"differs: {name}", flush=True)
    if action == "compare":
        print(f"{count - len(wrong)} of {count} as before; {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] not in (["make"], ["compare"], ["questions"]) or (sys.argv[1] != "questions") != (len(sys.argv) > 2):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
