"""`python tether.py PARENT PROGRAM …`: becomes PROGRAM, which the kernel ends with its parent.

A script of its own, and Python without site packages, because the request has to be made in the
new process and because nothing but `exec` is safe between a fork and it. It reaches only this
process: the models of the server watch it by themselves (`lifeline.py`).
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
    if os.getppid() == int(parent):  # else it ended before it could be asked for
        os.environ[SERVER_VARIABLE] = str(os.getpid())
        os.execv(command[0], command)
