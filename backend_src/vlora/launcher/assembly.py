"""Finds a `tritonserver`, with the files and environment to run the models with this Python."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import vlora
from vlora.errors import ServerError

# Meaning of each variable with the prefix VLORA_ that any part of the project reads.
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
    "VLORA_PEERS": "set by vlora serve --replicas: the folder that all replicas share",
    "VLORA_GPU_TESTS": "set by tools.gpu: the tests of GPU kernels run on the GPU",
    "VLORA_WATCH_PASSWORD": "read by vlora watch: the password of its page",
}

# Ending of a variable that Kubernetes sets for a service, since a service may be named `vlora`.
_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return a warning for each variable that has the prefix VLORA_ but is not in KNOWN."""
    return [
        f"nothing reads the environment variable {name}; known are {', '.join(KNOWN)}"
        for name in sorted(names)
        if name.startswith("VLORA_") and name not in KNOWN and not _SERVICE.search(name)
    ]


@dataclass(frozen=True)
class Assembly:
    """A `tritonserver`, with the arguments and environment variables that locate its backends."""

    binary: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]


def assemble(folder: Path) -> Assembly:
    """Return the server to start: one on PATH, as in NVIDIA's container, else that of the wheel.

    folder: existing folder for links to the wheel's parts of the Python backend.

    Raises ServerError with the command that installs what is missing.
    """
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Assembly(Path(on_path), (), _python_environment([]))
    spec = find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ServerError(
            "tritonserver was not found on PATH, and the wheel nvidia-pytriton is not installed;"
            " install it with: pip install 'vlora[server]'"
        )
    root = Path(spec.origin).parent / "tritonserver"
    binary = root / "bin" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    for part in (binary, stub):
        if not part.is_file():
            raise ServerError(f"the nvidia-pytriton wheel has no {part} for Python {version}")
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True, exist_ok=True)
    for part in (*(root / "backends" / "python").iterdir(), stub):
        link = backend / part.name
        link.unlink(missing_ok=True)
        link.symlink_to(part)
    libraries = [root.parent.parent / "nvidia_pytriton.libs", find_libpython().parent]
    arguments = (f"--backend-directory={backend.parent}",)
    return Assembly(binary, arguments, _python_environment(libraries))


def find_libpython() -> Path:
    """Return the path of this Python's shared library, which the backend's stub is linked to."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    if not name.startswith("libpython") or ".so" not in name:
        name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    libdir = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    folders = [libdir, libdir / multiarch, Path(sys.base_prefix) / "lib"]
    folders += [Path("/usr/lib") / multiarch, Path("/usr/lib64"), Path("/usr/lib")]
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    package = f"libpython{sys.version_info.major}.{sys.version_info.minor}"
    raise ServerError(
        f"{name}, which Triton's Python backend needs, was not found; install it with:"
        f" apt-get install {package} (or use a Python that was built with --enable-shared)"
    )


def _python_environment(libraries: list[Path]) -> dict[str, str]:
    # The wheel's stub ignores PYTHONPATH. It uses the packages of the first `python3` on PATH,
    # which may belong to a virtual environment. The container's stub reads PYTHONPATH.
    package = Path(vlora.__file__).resolve().parent.parent
    packages = [str(package)] + [entry for entry in sys.path if entry.endswith("-packages")]
    environment = {
        "PATH": _joined([str(Path(sys.executable).parent)], "PATH"),
        "PYTHONPATH": _joined(packages, "PYTHONPATH"),
    }
    if libraries:
        environment["LD_LIBRARY_PATH"] = _joined([str(p) for p in libraries], "LD_LIBRARY_PATH")
    return environment


def _joined(entries: list[str], variable: str) -> str:
    given = filter(None, os.environ.get(variable, "").split(":"))
    inherited = [str(Path(entry).absolute()) for entry in given]
    return ":".join(dict.fromkeys(entries + inherited))
