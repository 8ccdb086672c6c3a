#!/usr/bin/env python3
"""Checks that a module includes only itself and the modules its CMakeLists.txt links it with, that those are above it, and
that libtorch is included in the modules that run programs alone."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = [["core"], ["graph", "cluster"], ["shard", "net", "readers", "testbed"], ["cost", "solver"], ["plan", "spmd"],
        ["bounds", "reduce", "pipeline", "grid", "interpret"], ["sim", "zoo", "comm"], ["planner", "capture"], ["runtime", "advise", "explain"],
        ["measure"], ["discover", "report", "export"], ["cli", "python"]]
LIBTORCH = {"interpret", "zoo", "comm", "capture", "runtime", "measure", "discover", "python"}
LEVEL = {module: i for i, row in enumerate(ROWS) for module in row}

problems = []
for folder in sorted((ROOT / "src").iterdir()):
    cmake = folder / "CMakeLists.txt"
    if not cmake.exists():
        continue
    module = folder.name
    if module not in LEVEL:
        problems.append(f"{folder}: not a module of ARCHITECTURE.md")
        continue
    text = cmake.read_text()
    text = text.replace("motley_models", "motley_zoo")
    match = re.search(r"motley_module\(\s*" + module + r"\s+(?:SERIAL\s+)?MODULES ([^)]*?)(?:LIBS|TEST_LIBS|\))", text)
    linked = set(match.group(1).split()) if match else set()
    libraries = re.sub(r"TEST_LIBS[^)]*", "", text)
    linked |= set(re.findall(r"motley_(\w+)", libraries)) & set(LEVEL)
    of_tests = set(re.findall(r"motley_(\w+)", text)) | {"reference"}  # tests may use modules below
    for other in linked - {module}:
        if LEVEL[other] >= LEVEL[module]:
            problems.append(f"{cmake.relative_to(ROOT)}: {module} links {other}, which is not above it")
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
                test = file.name.endswith("_test.cc")
                if other != module and "/" in path and other not in (linked | of_tests if test else linked):
                    problems.append(f"{where}: {module} includes {path} but is not linked with {other}")
            if module not in LIBTORCH and re.match(r"(torch/|ATen/|c10/|gloo/)", path) and "<" in line:
                problems.append(f"{where}: libtorch is included in {', '.join(sorted(LIBTORCH))} alone")

for p in problems:
    print(p)
sys.exit(bool(problems))
