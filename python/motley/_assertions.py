"""Checks of numbers, which a capture does not have: left out of the graph, as `python -O` leaves out assertions, with a warning.

The plain steps that the first steps of a plan are compared with make them.
"""

import __future__
import ast
import linecache
import os
import types

import torch

from ._errors import UserError, warn
from ._watch import functions_of

OWN = tuple(os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in (__file__, torch.__file__))


def users_frame(traceback):
    """(code, line) of the innermost frame of a traceback that is neither torch's nor motley's; None if there is none."""
    found = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not os.path.abspath(code.co_filename).startswith(OWN) and not code.co_filename.startswith("<frozen"):
            found = code, traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def _compiled(code, source):
    """The code of the same function in a source or its tree, compiled anew; None: there is none."""
    flags = code.co_flags & __future__.annotations.compiler_flag
    left = [compile(source, code.co_filename, "exec", flags=flags, dont_inherit=True)]
    while left:
        one = left.pop()
        if (one.co_name, one.co_firstlineno) == (code.co_name, code.co_firstlineno):
            return one
        left += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    return None


def _is_check(statement):
    """Whether it is `assert ...`, `torch._assert(...)`, or `if ...: raise ...`, which do nothing where all is well."""
    if isinstance(statement, ast.If):
        return len(statement.body) == 1 and isinstance(statement.body[0], ast.Raise)
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Assert) or (isinstance(call, ast.Call) and ast.unparse(call.func).startswith("torch._assert"))


class _Left(ast.NodeTransformer):
    """A tree without the checks that begin at, or ask on, one of some lines."""

    def __init__(self, lines):
        self.lines, self.count = lines, 0

    def visit(self, node):
        self.generic_visit(node)
        if not isinstance(node, ast.stmt) or not _is_check(node):
            return node
        end = node.test.end_lineno if isinstance(node, ast.If) else node.end_lineno
        if not any(node.lineno <= line <= end for line in self.lines):
            return node
        self.count += 1
        return getattr(node, "orelse", None) or ast.copy_location(ast.Pass(), node)


def _without_checks(code, lines):
    """The code without those, if all lines are in one and the source is still that of the code; else None."""
    source = "".join(linecache.getlines(code.co_filename))
    try:
        if not source or _compiled(code, source) != code:
            return None
        left = _Left(lines)
        tree = left.visit(ast.parse(source))
        new = _compiled(code, tree) if left.count >= len(lines) else None
    except (SyntaxError, ValueError):
        return None
    return new if new is not None and new.co_freevars == code.co_freevars else None


class Assertions:
    """Those of one step. `reads`: a Reads, which is to know code as it is outside of a capture, or None."""

    def __init__(self, reads):
        self.reads = reads
        self.left = {}  # code: (its functions, lines, the code without the checks on these lines)
        self.whole = {}  # code without checks: the code

    def left_out(self, captured):
        """What captured() returns where no check reads a number."""
        try:
            for functions, _, without in self.left.values():
                for function in functions:
                    function.__code__ = without
            while True:
                try:
                    return captured()
                except (RuntimeError, UserError) as error:
                    if not self._leave_out(error):
                        raise
        finally:
            for code, (functions, _, without) in self.left.items():
                for function in functions:
                    function.__code__ = code
                if self.reads is not None and without in self.reads.codes:
                    self.reads.codes[code] = self.reads.codes.pop(without)

    def _leave_out(self, error):
        place = users_frame(error.__traceback__)
        if "reads a number" not in str(error) or place is None:
            return False
        code, line = self.whole.get(place[0], place[0]), place[1]
        functions, lines, _ = self.left.get(code, (None, (), None))
        without = _without_checks(code, {*lines, line}) if line not in lines else None
        functions = functions_of([code]) if functions is None and without is not None else functions
        if without is None or not functions:
            return False
        self.left[code], self.whole[without] = (functions, {*lines, line}, without), code
        for function in functions:
            function.__code__ = without
        warn(
            f"[capture] {code.co_filename}:{line}: {linecache.getline(code.co_filename, line).strip()}: this check of numbers is left out of "
            "the graph, as python -O leaves out assertions; the plain steps that the first steps are compared with make it"
        )
        return True
