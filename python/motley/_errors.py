"""Mistakes of the user. A message is one line: where, what, and how to fix it."""

import os
import sys
import warnings

from ._motley import PeerLost, UserError  # noqa: F401

_HERE = os.path.dirname(os.path.abspath(__file__))


class CaptureError(UserError):
    """The step cannot be captured; the message names the line of the user's code."""


class NoPlanError(UserError):
    """No plan fits the cluster; the message says what is short."""


class MismatchError(UserError):
    """A step of the plan is not that of the plain model; the message names the first tensor that differs."""


def whole_number(where, name, value, least=0):
    """UserError unless it is a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
        raise UserError(f"[{where}] {name} is {value!r}; give a whole number from {least} on")


def flag(where, name, value):
    if not isinstance(value, bool):
        raise UserError(f"[{where}] {name} is {value!r}; give True or False")


def warn(text):
    """A warning at the line of the user's code that called the package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(os.path.abspath(frame.f_code.co_filename)) == _HERE:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
