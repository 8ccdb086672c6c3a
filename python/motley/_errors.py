"""Mistakes of the user. A message is one line: where, what, and how to fix it."""

from ._motley import PeerLost, UserError  # noqa: F401


class CaptureError(UserError):
    """The step cannot be captured; the message names the line of the user's code."""


class NoPlanError(UserError):
    """No plan fits the cluster; the message says what is short."""


class MismatchError(UserError):
    """A step of the plan is not that of the plain model; the message names the first tensor that differs."""
