#!/usr/bin/env python3
"""Checks that a room includes only itself and the rooms its CMakeLists.txt links it with, that those are above it, and
that libtorch is included in torch/ and the Python door alone."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = [["core"], ["graph", "cluster"], ["shard", "net", "testbed"], ["cost"], ["plan"],
        ["spmd", "reduce", "pipeline", "grid"], ["sim", "torch"], ["auto"], ["report", "export"], ["cli", "python"]]
LEVEL = {room: i for i, row in enumerate(ROWS) for room in row}

problems = []
for folder in sorted((ROOT / "src").iterdir()):
    cmake = folder / "CMakeLists.txt"
    if not cmake.exists():
        continue
    room = folder.name
    if room not in LEVEL:
        problems.append(f"{folder}: not a room of ARCHITECTURE.md")
        continue
    text = cmake.read_text()
    text = text.replace("motley_zoo", "motley_torch")
    match = re.search(r"motley_room\(\s*" + room + r"\s+ROOMS ([^)]*?)(?:LIBS|TEST_LIBS|\))", text)
    linked = set(match.group(1).split()) if match else set()
    linked |= set(re.findall(r"motley_(\w+)", text)) & set(LEVEL)
    for other in linked - {room}:
        if LEVEL[other] >= LEVEL[room]:
            problems.append(f"{cmake.relative_to(ROOT)}: {room} links {other}, which is not above it")
    for file in sorted(folder.rglob("*")):
        if file.suffix not in (".h", ".cc", ".inc"):
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            include = re.match(r'\s*#include [<"]([^>"]+)[>"]', line)
            if not include:
                continue
            path = include.group(1)
            where = f"{file.relative_to(ROOT)}:{number}"
            if '"' in line:
                other = path.split("/")[0]
                test = file.name.endswith("_test.cc") and not (ROOT / "src" / path).exists()
                if other != room and other not in linked and not test:
                    problems.append(f"{where}: {room} includes {path} but is not linked with {other}")
            if room not in ("torch", "python") and re.match(r"(torch/|ATen/|c10/|gloo/)", path) and "<" in line:
                problems.append(f"{where}: libtorch is included in torch/ and python/ alone")

for p in problems:
    print(p)
sys.exit(bool(problems))
