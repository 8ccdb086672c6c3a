"""Random emulated clusters, and how far what `motley.discover` found is from what their files set."""

import json
import os
import random
import subprocess
import sys


def random_cluster(seed):
    """(the file's text, what it sets). Two levels with latencies that are emulated, unequal ports, unequal devices."""
    rng = random.Random(seed)
    names = {"fast": 0.3, "middle": 0.2, "slow": 0.1}
    root, far = rng.uniform(15e6, 50e6), rng.uniform(0.8e-3, 3e-3)
    groups, text, left = [], "", 1.1
    count = rng.choice([1, 2, 2, 3])
    for number in range(count):
        inside, near = root * rng.uniform(2, 4), rng.uniform(0.41e-3, 0.7e-3)
        port = root * rng.choice([1, 1, 0.5]) if number > 1 else root  # two ports can be seen to be equal
        types = []
        for _ in range(rng.randint(2 if count == 1 else 1, 3)):
            fitting = [name for name in names if names[name] <= left - 0.1 * (4 - len(groups))]
            if fitting:
                types.append(rng.choice(fitting))
                left -= names[types[-1]]
        types = types or ["slow"]
        groups.append({"types": types, "bandwidth": inside, "latency": near, "port": port})
        text += f"  - name: g{number}\n    link: {{bandwidth: {inside:.0f}, latency: {near:.6f}}}\n"
        text += f"    uplink: {port:.0f}\n    devices: [{', '.join('{type: ' + t + '}' for t in types)}]\n"
    types = "".join(
        f"  - {{name: {name}, like: cpu-core, flops: {60 * speed} GFLOPS, memory: 1 GiB, speed: {speed}}}\n" for name, speed in names.items()
    )
    text = f"name: random-{seed}\nlink: {{bandwidth: {root:.0f}, latency: {far:.6f}}}\ngroups:\n{text}device_types:\n{types}"
    return text, {"bandwidth": root, "latency": far, "groups": groups, "speeds": names}


def expected_levels(truth):
    """[(what, ranks, field, value)] of what can be seen: a link that joins one thing is none."""
    found, first, below = [], 0, {}
    for number, group in enumerate(truth["groups"]):
        ranks = tuple(range(first, first + len(group["types"])))
        first += len(ranks)
        below[number] = ranks
        if len(ranks) > 1:
            found += [(f"g{number}", ranks, "bandwidth", group["bandwidth"]), (f"g{number}", ranks, "latency_s", group["latency"])]
    if len(truth["groups"]) > 1:
        every = tuple(range(first))
        # The fastest port that another one of its speed shows.
        ports = sorted((g["port"] for g in truth["groups"]), reverse=True)
        found += [("root", every, "bandwidth", ports[1]), ("root", every, "latency_s", truth["latency"])]
        found += [(f"port of g{n}", below[n], "port", min(g["port"], ports[1])) for n, g in enumerate(truth["groups"]) if len(below[n]) > 1]
    return found


def discovered(program, python, text, folder, *options):
    """What motley.discover prints with --json on an emulated cluster."""
    cluster, output = os.path.join(folder, "set.yaml"), os.path.join(folder, "found.yaml")
    with open(cluster, "w") as file:
        file.write(text)
    command = [program, "emulate", "--cluster", cluster, "--", python, "-m", "motley.discover", "-o", output, "--json", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
    return json.loads(run.stdout), output


def errors(truth, report, flops):
    """[(what, relative error)]; an error of 1 for a level that was not found. `flops` of every rank."""
    levels = {tuple(sorted(level["ranks"])): level for level in report["levels"]}
    result = []
    for what, ranks, field, value in expected_levels(truth):
        found = levels.get(ranks, {}).get(field)
        result.append((f"{what} {field}", 1.0 if found is None else found / value - 1))
    types = [t for group in truth["groups"] for t in group["types"]]
    shares = [truth["speeds"][t] for t in types]
    scale = sum(flops) / sum(shares)
    return result + [(f"flops of rank {r}", f / (s * scale) - 1) for r, (f, s) in enumerate(zip(flops, shares))]
