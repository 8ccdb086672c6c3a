"""The motley program that comes with the package, as a command."""

import os
import sys


def main():
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "motley")
    os.execv(program, [program, *sys.argv[1:]])
