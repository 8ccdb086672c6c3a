#!/usr/bin/env python3
"""Unequal rows on stock DDP and FSDP2: the exported directory trains GPT-2 (tiny) on three unequal workers equal to one
device, and, emulated, faster than even rows.

    test_rows.py BUILD [--python PROGRAM] [--target ddp|fsdp2] [--speed]      PROGRAM: a Python with torch; FSDP2 needs 2.4"""
import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "gpt:layers=2,hidden=64,heads=2,seq=32,vocab=256"
# Whose step is long beside what Python and FSDP2 take for every call.
TIMED, TIMED_BATCH = "gpt:layers=2,hidden=128,heads=2,seq=64,vocab=256", 84


def run(*command, **more):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **more)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def train(python, folder, world, *arguments):
    """`world` processes of train.py on this machine; what rank 0 printed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    workers = []
    for rank in range(world):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
        workers.append(subprocess.Popen([python, folder / "train.py", *arguments], env=env, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    outputs = [w.communicate(timeout=300) for w in workers]
    for worker, (out, err) in zip(workers, outputs):
        assert worker.returncode == 0, err[-3000:]
    return lines(outputs[0][0])


def largest(python, a, b):
    """The largest difference between the parameters in two files, and the largest parameter."""
    code = ("import sys, torch; a, b = (torch.load(p) for p in sys.argv[1:]); assert a.keys() == b.keys(); "
            "print(max((a[k] - b[k]).abs().max().item() for k in a), max(v.abs().max().item() for v in a.values()))")
    return map(float, run(python, "-c", code, a, b).split())


def exported(args, temporary, model, batch):
    """The directory of a plan for the target, with more rows on the faster devices."""
    plan, folder = temporary / "plan.json", temporary / f"run{batch}"
    run(args.build / "motley", "plan", model, "--cluster", HERE / "unequal-3.yaml", "--batch", batch, "--optimizer", "sgd", "--for",
        args.target, "--time-limit", "6", "-o", plan)
    run(args.build / "motley", "export", plan, "--to", args.target, "-o", folder)
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    assert len(rows) == 3 and sorted(rows, reverse=True) == rows and rows[0] > rows[2], rows
    return folder


def check_equal(args, folder):
    """Three steps in double precision, on three workers and on one device: losses and parameters."""
    many = train(args.python, folder, 3, "--steps", "3", "--dtype", "float64", "--save", str(folder / "many.pt"))
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    one = lines(run(args.python, folder / "train.py", "--one-device", "--steps", "3", "--dtype", "float64", "--save",
                    folder / "one.pt", env=env))
    assert len(many) == len(one) == 3
    for a, b in zip(many, one):
        assert abs(a["loss"] - b["loss"]) < 1e-10 * abs(b["loss"]), (a, b)
    difference, size = largest(args.python, folder / "many.pt", folder / "one.pt")
    assert difference < 1e-9 * size, (difference, size)
    print(f"{args.target}: three workers equal one device to {difference:.1e}")


def check_speed(args, folder):
    """Emulated: the median step of even rows over that of the plan's."""
    seconds = {}
    for rows in ("even", "plan"):
        out = run(args.build / "motley", "emulate", "--cluster", HERE / "unequal-3.yaml", "--", args.python,
                  HERE / "emulated.py", folder, "--steps", "8", *(["--even"] if rows == "even" else []),
                  env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        seconds[rows] = statistics.median(line["seconds"] for line in lines(out)[2:])
    ratio = seconds["even"] / seconds["plan"]
    print(f"{args.target}: even rows {seconds['even']:.3f} s, the plan's {seconds['plan']:.3f} s: {ratio:.2f} times faster")
    assert ratio >= 1.5


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=lambda p: pathlib.Path(p).resolve())
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--target", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for batch in (28, 56):
            folder = exported(args, pathlib.Path(temporary), MODEL, batch)
            if batch == 56:  # in two micro-batches
                rows = json.loads((folder / "rows.json").read_text())
                rows["rows"], rows["micro_batches"] = [16, 8, 4], 2
                (folder / "rows.json").write_text(json.dumps(rows))
            check_equal(args, folder)
        if args.speed:
            check_speed(args, exported(args, pathlib.Path(temporary), TIMED, TIMED_BATCH))


if __name__ == "__main__":
    main()
