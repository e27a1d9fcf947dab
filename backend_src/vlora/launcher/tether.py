"""`python tether.py PARENT VARIABLE PROGRAM …`: becomes PROGRAM, which ends when PARENT ends.

The environment variable VARIABLE tells PROGRAM and its children the process id of PROGRAM.

Only a process itself can ask the kernel for this, and Python code between `fork` and `exec` is not
safe. Children of PROGRAM are not ended, so the server's models watch it (`lifeline.py`).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, variable, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent has another id, the original one ended before the kernel was asked.
    if os.getppid() == int(parent):
        os.environ[variable] = str(os.getpid())
        os.execv(command[0], command)
