"""`python tether.py PARENT PROGRAM …`: becomes PROGRAM, which the kernel ends when PARENT ends.

A process must itself ask the kernel to be ended with its parent. Between a fork and `exec`, it is
not safe to run Python code that does so, so this script does it. It runs without site packages. The
request does not extend to child processes, so the server's models watch the server themselves
(`lifeline.py`).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
SERVER_VARIABLE = "VLORA_SERVER"

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent has another id, the original one ended before the kernel was asked.
    if os.getppid() == int(parent):
        os.environ[SERVER_VARIABLE] = str(os.getpid())
        os.execv(command[0], command)
