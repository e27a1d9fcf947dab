"""`python tether.py PARENT PROGRAM …`: replaces itself by PROGRAM, which ends with its parent.

This is a separate script because only the new process can ask the kernel for this, and because
between a fork and `exec` no other code is safe. It runs without site packages. It affects only this
process: the server's models watch the server themselves (`lifeline.py`).
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
    # A parent with another id means that ours ended before the kernel was asked.
    if os.getppid() == int(parent):
        os.environ[SERVER_VARIABLE] = str(os.getpid())
        os.execv(command[0], command)
