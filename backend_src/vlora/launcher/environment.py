"""Environment variables of the server, and a check for unknown ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

PREFIX = "VLORA_"

KNOWN = {
    "VLORA_MODEL": "folder of the checkpoint, as --model",
    "VLORA_ADAPTERS": "folder of the adapters, as --adapters",
    "VLORA_ATMM": "backend of the LoRA operator, cpu or reference",
    "VLORA_KERNELS": "backend of the other kernels, cpu or reference",
    "VLORA_ISA": "instruction set of the kernels",
    "VLORA_ATMM_CUDA": "path of the operator's CUDA library",
    "VLORA_CUTLASS": "folder of CUTLASS's headers, to compile that library",
    "VLORA_BIND": "read by docker/compose.yaml: the host's address for the ports",
    "VLORA_RUN": "set by vlora serve: the run's folder",
    "VLORA_SERVER": "set by vlora serve: the server's process id",
    "VLORA_GPU_TESTS": "set by tools.gpu: the tests of GPU kernels run on the GPU",
}
"""Meaning of each variable with the prefix VLORA_ that any part of the project reads."""

_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Ending of a variable that Kubernetes sets for a service, since a service may be named `vlora`."""


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return a warning for each variable that has the prefix VLORA_ but is not in KNOWN."""
    unknown = (name for name in names if name.startswith(PREFIX) and name not in KNOWN)
    return [
        f"nothing reads the environment variable {name}; known are {', '.join(KNOWN)}"
        for name in sorted(unknown)
        if not _SERVICE.search(name)
    ]
