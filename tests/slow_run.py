"""`motley run --elastic --replan auto`: a worker becomes half as fast; training goes on by a plan for that, with the same losses.

    python3 tests/slow_run.py BUILD
"""

import json
import os
import re
import subprocess
import sys
import tempfile

MODEL, BATCH, STEPS, SLOW_FROM = "mlp:layers=4,in=256,hidden=1024,classes=16", "1024", 90, 20
CLUSTER = "name: two\nlink: {bandwidth: 10 Gbps, latency: 20 us}\ndevices: [{type: cpu-core, count: 2}]\n"


def main():
    program = os.path.join(os.path.abspath(sys.argv[1]), "motley")

    def motley(*words, faults=""):
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=250, env={**os.environ, "MOTLEY_FAULTS": faults})
        assert done.returncode == 0, done.stderr
        return done

    with tempfile.TemporaryDirectory() as folder:
        cluster, plan = os.path.join(folder, "two.yaml"), os.path.join(folder, "plan.json")
        with open(cluster, "w") as file:
            file.write(CLUSTER)
        motley("plan", MODEL, "--cluster", cluster, "--batch", BATCH, "--optimizer", "sgd", "--engine", "spmd", "-o", plan)
        run = ["run", plan, "--steps", str(STEPS), "--json"]
        wanted = json.loads(motley(*run).stdout)["steps"]
        done = motley(*run, "--elastic", "--replan", "auto", faults=f"slow:step:1:{SLOW_FROM}")
        steps = json.loads(done.stdout)["steps"]

    assert re.search(r"device 1 \(cpu-core\) computes [0-9.]+ times as long", done.stderr), done.stderr
    assert re.search(r"goes on by a plan for the speed that device 1 has now, \S+ \S+ a step in the place of", done.stderr), done.stderr
    assert [step["step"] for step in steps] == [step["step"] for step in wanted]
    worst = max(abs(step["loss"] - right["loss"]) / abs(right["loss"]) for step, right in zip(steps, wanted))
    print(f"losses differ by {worst:.1e} at most")
    assert worst < 1e-5, f"losses are off by {worst}"


main()
