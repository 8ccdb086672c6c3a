#!/usr/bin/env python3
"""The picture of the README: a plan's simulated step, and what the usual strategies would take.

  motley plan gpt --cluster hapt-case --batch 64 -o plan.json
  motley simulate plan.json --trace trace.json
  tools/picture.py plan.json trace.json > docs/plan.svg
"""
import json
import sys

COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "optimizer": "#54a24b", "wait": "#e4e4e4", "communication": "#b279a2"}
LEFT, WIDTH, ROW, GAP = 190, 640, 24, 6


def spans_of(trace):
    """{device: [(name, begin, length)]}, and {device: its name}; microseconds."""
    names, spans = {}, {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            names[event["pid"]] = event["args"]["name"]
            continue
        kind = "communication" if event["cat"] == "comm" else event["name"].split(" ")[0]
        spans.setdefault(event["pid"], []).append((kind if kind in COLOURS else "forward", event["ts"], event["dur"]))
    return spans, names


def main(plan_path, trace_path):
    plan, trace = json.load(open(plan_path)), json.load(open(trace_path))
    spans, names = spans_of(trace)
    rows = {}
    for device, own in sorted(spans.items()):
        rows.setdefault(json.dumps(own), []).append(device)
    end = max(begin + length for own in spans.values() for _, begin, length in own)
    y, body, paths = 28, [], {kind: "" for kind in COLOURS}

    def text(x, y, words, anchor="start", weight="normal"):
        body.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>')

    cluster = next(line.split(":", 1)[1].strip() for line in plan["cluster"] if line.startswith("name:"))
    text(8, 16, f'{plan["model"]} on {cluster}, global batch {plan["batch"]}: one simulated step of motley\'s plan', weight="bold")
    for key, devices in rows.items():
        kind = names[devices[0]].split("(")[1].rstrip(")")
        text(LEFT - 8, y + ROW - 7, f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}: {kind}", "end")
        for name, begin, length in json.loads(key):
            a, b = LEFT + WIDTH * begin / end, WIDTH * length / end
            paths[name] += f"M{a:.1f} {y}h{max(0.3, b - 0.3):.1f}v{ROW}h{-max(0.3, b - 0.3):.1f}z"
        y += ROW + GAP
    for kind, path in paths.items():
        if path:
            body.append(f'<path fill="{COLOURS[kind]}" d="{path}"/>')
    x = LEFT
    for kind in (k for k, path in paths.items() if path):
        body.append(f'<rect x="{x}" y="{y + 2}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        text(x + 17, y + 13, kind)
        x += 100
    y += 44
    text(8, y, "seconds a step, predicted", weight="bold")
    steps = [("motley", plan["predicted"]["step_s"])]
    steps += [(a["name"], a["step_s"]) for a in plan["predicted"]["alternatives"] if a["baseline"] and "step_s" in a]
    steps = [s for s in steps if s[0] != "expert-parallel" or s[1] != dict(steps)["dp-ev"]]  # a model without experts
    y += 8
    for name, seconds in dict(steps).items():
        width = (WIDTH - 60) * seconds / max(s for _, s in steps)
        text(LEFT - 8, y + 14, LABELS.get(name, name), "end")
        body.append(f'<rect x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="16" fill="{"#4c78a8" if name == "motley" else "#bbbbbb"}"/>')
        text(LEFT + width + 6, y + 14, f"{seconds:.2f}")
        y += 22
    height, total = y + 8, LEFT + WIDTH + 20
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" width="{total}" height="{height}" '
          f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>')
    print("\n".join(body) + "\n</svg>")


LABELS = {"motley": "motley's plan", "dp-ev": "data parallel, even", "dp-cp": "data parallel, by speed", "zero": "ZeRO",
          "expert-parallel": "expert parallel", "tensor-parallel": "tensor parallel"}

if __name__ == "__main__":
    main(*sys.argv[1:3])
