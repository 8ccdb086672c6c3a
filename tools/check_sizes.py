#!/usr/bin/env python3
"""Checks that no file has more than 600 lines and no function more than 100, but for flat tables."""
import ast
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_FILE, MAX_FUNCTION = 600, 100

# Flat tables: a line an entry, no decisions.
TABLES = {"src/graph/ops/elementwise.cc elementwise_ops", "src/python/graph.cc bind_graph"}


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
    problems = []
    for path in sorted(listing.stdout.split()):
        if not (ROOT / path).exists():
            continue
        text = (ROOT / path).read_text()
        if (size := len(text.splitlines())) > MAX_FILE:
            problems.append(f"{path}: a file of {size} lines, at most {MAX_FILE}")
        problems += [f"{path} {name}: a function of {size} lines, at most {MAX_FUNCTION}" for name, size in functions(path, text)
                     if size > MAX_FUNCTION and f"{path} {name}" not in TABLES]
    print("\n".join(problems), end="\n" if problems else "")
    return bool(problems)


sys.exit(main())
