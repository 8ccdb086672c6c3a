#!/usr/bin/env python3
"""Checks that no file has more than 600 lines and no function more than 100. What is longer today is listed with its
size, and may only become shorter; flat tables have no limit. `--list` prints what is longer, as data for the lists."""
import ast
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_FILE, MAX_FUNCTION = 600, 100

# Flat tables: a line an entry, no decisions.
TABLES = {"src/graph/ops/elementwise.cc elementwise_ops", "src/python/graph.cc bind_graph"}

FILES = {
    "bench/hap_bench.cc": 873,
    "bench/hapt_bench.cc": 718,
    "src/grid/grid_test.cc": 758,
    "src/net/net_test.cc": 625,
    "tests/pipeline_test.cc": 995,
    "tests/python/cases/blocks.py": 685,
    "tests/python/functions.py": 848,
    "tests/runtime_test.cc": 866,
}
FUNCTIONS = {
    "src/shard/theory.cc Theory::refine": 123,
    "src/shard/theory.cc Theory::derive": 162,
    "src/solver/balance.cc balance": 151,
    "src/solver/dual_bounds.cc DualBounds::DualBounds": 126,
    "src/spmd/build.cc ProblemBuilder::contract": 123,
    "src/spmd/build.cc ProblemBuilder::add_nodes": 255,
    "src/spmd/build_program.cc ProblemBuilder::program": 153,
    "tests/random_pipeline.cc random_pipeline": 126,
    "tests/reference/brute_force.cc integer_program": 119,
    "tests/reference/brute_force.cc integer_program_by_sets": 104,
    "tests/reference/spmd_gpt.cc gpt_problem": 155,
}


def cpp_functions(lines):
    """(name, lines) of each function. clang-format puts the bracket that ends one in the column of its first line."""
    for first, line in enumerate(lines):
        indent = re.match(r"( {0,4})[\w~][^;=]*\(", line)  # of a namespace, of a class, of a class in it
        if not indent or re.match(r"\s*(if|for|while|switch|return|else|do|namespace|case|TEST\w*|BENCHMARK)\b", line):
            continue
        head = first
        while head < len(lines) and not re.search(r"[{};]\s*(//.*)?$", lines[head]):
            head += 1
        if head == len(lines) or not re.search(r"\{\s*(//.*)?$", lines[head]):
            continue
        end = next((i for i in range(head + 1, len(lines)) if re.match(indent[1] + r"\}", lines[i])), None)
        if end is not None:
            name = re.search(r"([\w:~]+|operator\S+)\s*\(", line)
            yield name[1] if name else line.strip(), end - first + 1


def functions(path, text):
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node.name, node.end_lineno - node.lineno + 1
    else:
        yield from cpp_functions(text.splitlines())


def main():
    listing = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.cc", "*.h", "*.py"],
                             cwd=ROOT, capture_output=True, text=True, check=True)
    long_files, long_functions, problems = {}, {}, []
    for path in sorted(listing.stdout.split()):
        if not (ROOT / path).exists():
            continue
        text = (ROOT / path).read_text()
        if (size := len(text.splitlines())) > MAX_FILE:
            long_files[path] = size
        for name, size in functions(path, text):
            if size > MAX_FUNCTION and f"{path} {name}" not in TABLES:
                long_functions[f"{path} {name}"] = max(size, long_functions.get(f"{path} {name}", 0))
    if sys.argv[1:] == ["--list"]:
        for what in long_files, long_functions:
            print("".join(f'    "{name}": {size},\n' for name, size in what.items()))
        return 0
    for what, found, known, limit in (("file", long_files, FILES, MAX_FILE),
                                      ("function", long_functions, FUNCTIONS, MAX_FUNCTION)):
        for name, size in found.items():
            if size > known.get(name, limit):
                problems.append(f"{name}: a {what} of {size} lines, at most {known.get(name, limit)}")
        problems += [f"{name}: within {limit} lines now: take it from the list in tools/check_sizes.py"
                     for name in known if name not in found]
    print("\n".join(problems), end="\n" if problems else "")
    return bool(problems)


sys.exit(main())
