"""Threads for the end of the process too: while it ends, Python 3.12 and newer start none any more.

    threads = Threads(at_the_end=4)
    threads.run(answer, connection)
"""

import queue
import sys
import threading


class Threads:
    """Runs calls beside the caller, each in a thread at once; a thread is kept for later calls."""

    def __init__(self, at_the_end):
        """at_the_end: how many calls may run at once while the process ends."""
        self.calls, self.lock = queue.SimpleQueue(), threading.Lock()
        self.free = 0  # threads that wait, less calls that do
        if sys.version_info >= (3, 12):  # 3.12.1 starts none in what threading._register_atexit() takes either
            for _ in range(at_the_end):
                self._start()

    def run(self, function, *arguments):
        """Where no thread can be started, as soon as one is free."""
        with self.lock:
            if self.free <= 0:
                try:
                    self._start()
                except RuntimeError:
                    pass
            self.free -= 1
        self.calls.put((function, arguments))

    def _start(self):
        threading.Thread(target=self._serve, daemon=True).start()
        self.free += 1

    def _serve(self):
        while True:
            function, arguments = self.calls.get()
            try:
                function(*arguments)
            except Exception:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            with self.lock:
                self.free += 1
            del function, arguments
