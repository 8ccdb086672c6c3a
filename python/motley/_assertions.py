"""Assertions about numbers, which a capture does not have: left out of the graph, as `python -O` leaves them out, with a warning.

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

_OWN = tuple(os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in (__file__, torch.__file__))


def users_frame(traceback):
    """(code, line) of the innermost frame of a traceback that is neither torch's nor motley's; None if there is none."""
    found = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not os.path.abspath(code.co_filename).startswith(_OWN) and not code.co_filename.startswith("<frozen"):
            found = code, traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def _compiled(code, source, **how):
    """The code of the same function in a source, compiled anew; None: there is none."""
    flags = code.co_flags & __future__.annotations.compiler_flag
    left = [compile(source, code.co_filename, "exec", flags=flags, dont_inherit=True, **how)]
    while left:
        one = left.pop()
        if (one.co_name, one.co_firstlineno) == (code.co_name, code.co_firstlineno):
            return one
        left += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    return None


def _without_assertions(code, line):
    """The code without them, if the line is in one and the source is still that of the code; else None."""
    source = "".join(linecache.getlines(code.co_filename))
    try:
        asserted = any(isinstance(node, ast.Assert) and node.lineno <= line <= node.end_lineno for node in ast.walk(ast.parse(source)))
        if not asserted or _compiled(code, source) != code:
            return None
        new = _compiled(code, source, optimize=1)
    except (SyntaxError, ValueError):
        return None
    return new if new is not None and new.co_freevars == code.co_freevars else None


class Assertions:
    """Those of one step. `reads`: a Reads that knows code by what it is outside of a capture, or None."""

    def __init__(self, reads):
        self.reads, self.functions = reads, []  # [(function, its code, its code without them)]

    def left_out(self, captured):
        """What captured() returns where none is made that reads a number."""
        try:
            for function, _, without in self.functions:
                function.__code__ = without
            while True:
                try:
                    return captured()
                except (RuntimeError, UserError) as error:
                    if not self._leave_out(error):
                        raise
        finally:
            for function, code, without in self.functions:
                function.__code__ = code
                if self.reads is not None and without in self.reads.codes:
                    self.reads.codes[code] = self.reads.codes.pop(without)

    def _leave_out(self, error):
        place = users_frame(error.__traceback__)
        if "reads a number" not in str(error) or place is None:
            return False
        code, line = place
        without = _without_assertions(code, line)
        functions = functions_of([code]) if without is not None else []
        for function in functions:
            function.__code__ = without
            self.functions.append((function, code, without))
        if functions:
            warn(
                f"[capture] {code.co_filename}:{line}: {linecache.getline(code.co_filename, line).strip()}: what reads numbers to assert "
                "something is left out of the graph, as by python -O; the plain steps that the first steps are compared with make it"
            )
        return bool(functions)
