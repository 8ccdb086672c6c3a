"""Runs a script, and rests before Python ends: torch 2.13's gloo may abort a process that ends right behind a collective, since its
threads let go of Python objects then."""

import runpy
import sys
import time

script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, script.rpartition("/")[0])
runpy.run_path(script, run_name="__main__")
time.sleep(1)
