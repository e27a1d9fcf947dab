"""Finds a `tritonserver` and what it needs to run our models under this very Python.

Either the one on PATH (NVIDIA's container), with its own backends; or the one in the
`nvidia-pytriton` wheel, for which a backend directory is put together from links.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import vlora


class ServerError(Exception):
    """The server cannot run; the message says why and what mends it."""


@dataclass(frozen=True)
class Assembly:
    """A server binary with the arguments and the environment that make it find its parts."""

    binary: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]


def assemble(folder: Path) -> Assembly:
    """The server to start; `folder` (existing, owned by the caller) gets the backend links.

    Raises ServerError naming what is missing and the command that installs it.
    """
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Assembly(Path(on_path), (), _python_environment([]))
    spec = find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ServerError(
            "no tritonserver: none is on PATH and the wheel is not installed;"
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
    return Assembly(
        binary,
        (f"--backend-directory={backend.parent}",),
        _python_environment(libraries),
    )


def find_libpython() -> Path:
    """The shared library of the running Python, which the backend's stub links against."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    if not name.startswith("libpython") or ".so" not in name:
        name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    libdir = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    places = [libdir, libdir / multiarch, Path(sys.base_prefix) / "lib"]
    places += [Path("/usr/lib") / multiarch, Path("/usr/lib64"), Path("/usr/lib")]
    for place in places:
        if (place / name).exists():
            return place / name
    package = f"libpython{sys.version_info.major}.{sys.version_info.minor}"
    raise ServerError(
        f"{name} was not found; Triton's Python backend needs it. Install it with:"
        f" apt-get install {package}"
        " (or use a Python that was built with --enable-shared)"
    )


def _python_environment(libraries: list[Path]) -> dict[str, str]:
    """What lets the backend's embedded Python import what this one imports.

    The wheel's stub is isolated: it ignores PYTHONPATH, but takes the packages of the `python3`
    that is first on PATH, a virtual environment's included. The container's reads PYTHONPATH.
    """
    package = Path(vlora.__file__).resolve().parent.parent
    found = [str(package)] + [entry for entry in sys.path if entry.endswith("-packages")]
    environment = {
        "PATH": _joined([str(Path(sys.executable).parent)], "PATH"),
        "PYTHONPATH": _joined(found, "PYTHONPATH"),
    }
    if libraries:
        environment["LD_LIBRARY_PATH"] = _joined([str(p) for p in libraries], "LD_LIBRARY_PATH")
    return environment


def _joined(entries: list[str], variable: str) -> str:
    inherited = [entry for entry in os.environ.get(variable, "").split(":") if entry]
    return ":".join(dict.fromkeys(entries + inherited))
