"""End a process that hangs in native code, with a message.

A compile runs in the DSL's native code, which may hold Python's interpreter lock: no thread and no
signal handler of this process would run. So another process waits.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

_WAIT = """
import os, select, signal, sys
seconds, parent, message = sys.argv[1:]
if not select.select([0], [], [], float(seconds))[0]:  # end of file: the parent is done or gone
    print(message, file=sys.stderr, flush=True)
    os.kill(int(parent), signal.SIGTERM)
"""


@contextlib.contextmanager
def at_most(seconds: float, message: str):
    """Terminate this process, after ``message`` on stderr, if the `with` takes longer."""
    watch = None
    if os.name == "posix" and sys.executable:
        words = [sys.executable, "-I", "-S", "-c", _WAIT, str(seconds), str(os.getpid()), message]
        with contextlib.suppress(OSError):
            watch = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        if watch is not None:
            watch.kill()
            watch.stdin.close()
            watch.wait()
