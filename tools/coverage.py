#!/usr/bin/env python3
"""Writes docs/coverage.md: which ATen operators motley knows, as the op table and the test architectures have it.

    PYTHONPATH=build/python /usr/bin/python3 tools/coverage.py            # writes it
    PYTHONPATH=build/python /usr/bin/python3 tools/coverage.py --check    # exit code 1 if it is out of date
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))

import torch  # noqa: E402

import motley  # noqa: E402
import support  # noqa: E402
from motley import _motley  # noqa: E402

PAGE = ROOT / "docs" / "coverage.md"


def used():
    """[op] -> names of the architectures whose step has it."""
    users = {}
    for name, build in support.architectures():
        torch.manual_seed(0)
        model, loss_fn, batch = build()
        graph = motley.capture(model, support.batches_of(batch, 1)[0], loss_fn)
        for op in set(graph.ops):
            users.setdefault(op, []).append(name)
    return users


def how(op):
    parts = []
    if op["cut"]:
        parts.append("cut")
    if op["rules"]:
        parts.append("named rules")
    if op["alias"]:
        parts.append("moves nothing")
    if op["random"]:
        parts.append("drawn by element")
    return ", ".join(parts) or "whole"


def page():
    users, table = used(), _motley.op_table()
    known = {op["name"] for op in table}
    others = sorted(set(users) - known)
    refused = _motley.refused_ops()
    architectures = support.architectures()
    lines = [
        "# Which operators motley knows",
        "",
        f"Written by `tools/coverage.py` from the op table and the {len(architectures)} architectures of "
        "`tests/python/models`; do not edit. Backward",
        "passes count: a model's step has the operators of its gradients too.",
        "",
        f"- **{len(known)} known**: the table below. *Cut* operators run on pieces of their tensors; *named rules* add ways to cut",
        "  them that need communication or a kernel inside.",
        "- **Replicated**: every other operator whose shape libtorch or a probe on small sizes tells. It runs whole on every",
        f"  device, with a warning. Of the {len(users)} operators that the architectures use, these are "
        f"{len(others)}: {', '.join(f'`{op}`' for op in others) or 'none'}.",
        f"- **{len(refused)} refused**, since they read numbers, make shapes of them, or change how memory is read: "
        f"{', '.join(f'`{op}`' for op in refused)}.",
        "",
        "| operator | on pieces | architectures that use it |",
        "| --- | --- | --- |",
    ]
    for op in table:
        n = len(users.get(op["name"], []))
        lines.append(f"| `{op['name']}` | {how(op)} | {n or ''} |")
    lines += ["", "| architecture | operators | replicated |", "| --- | --- | --- |"]
    for name, _ in architectures:
        mine = sorted(op for op, names in users.items() if name in names)
        lines.append(f"| {name} | {len(mine)} | {', '.join(f'`{op}`' for op in mine if op in others)} |")
    return "\n".join(lines) + "\n"


def main():
    text = page()
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text() != text:
            sys.exit(f"{PAGE} is out of date; run PYTHONPATH=build/python {sys.executable} tools/coverage.py")
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
