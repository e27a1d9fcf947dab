"""Run the tests of the compiled kernels with each instruction set that this CPU has.

`make test` runs the tests of single kernels with each instruction set, but everything else with the
one that is fastest here. This program forces each set for whole runs, and two at once, for fp32 and
bf16: a CPU may be faster at bf16 products with an older set.

usage: python -m tests.programs.each_isa -n 2

All arguments are passed to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys

from vlora import native
from vlora.atmm.tiles import isa

REQUESTS = (
    *("scalar", "avx2", "avx512", "avx512_bf16", "amx"),
    *("avx2,scalar", "avx512_bf16,avx512", "avx512,amx"),
)
"""Values of VLORA_ISA: a set for both types, or those of fp32 and bf16."""
TESTS = (
    *("tests/unit/kernels", "tests/unit/atmm"),
    *("tests/parity/test_types.py", "tests/parity/test_modes.py"),
)


def lacking(request: str) -> str:
    """Return why this CPU cannot run a request; "" if it can."""
    try:
        with isa(request):
            return ""
    except ValueError as error:
        return str(error)


def main(arguments: list[str]) -> int:
    """Run the tests with each request, and return 1 if a run failed."""
    native.kernels()  # Without kernels there is nothing to test, and this says why.
    failed = []
    for request in REQUESTS:
        if reason := lacking(request):
            print(f"VLORA_ISA={request} is skipped: {reason}", flush=True)
            continue
        print(f"VLORA_ISA={request}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *arguments, *TESTS]
        if subprocess.run(command, env={**os.environ, "VLORA_ISA": request}).returncode:
            failed.append(request)
    print(f"failed with VLORA_ISA={' and '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
