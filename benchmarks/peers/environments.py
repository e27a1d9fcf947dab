"""Environments of the systems, which are created on first use in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.checkpoints import once

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "openvino": (
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "nncf==3.4.0",
        "transformers==5.5.4",
        "requests",
    ),
    "llama_cpp": ("llama-cpp-python==0.3.36", "diskcache", "gguf==0.19.0"),
}
"""Packages of an environment, by the name of the system's module. Others use this environment."""
# They would install torchvision, which we do not need, and with it a torch for GPUs.
WITHOUT_DEPENDENCIES = {"openvino": ("optimum-intel==2.2.0", "optimum==2.3.0")}
# With AMX, llama.cpp ends with a segmentation fault at the first product (its issue 20824).
LLAMA_CPP_BUILD = (
    "-DGGML_NATIVE=ON -DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8"
    " -DLLAVA_BUILD=OFF"
)


def python_of(module: str, root: Path) -> str:
    """Return the Python of a system; install its packages first unless they are installed.

    llama.cpp is compiled, which takes about five minutes on two cores.
    """
    if module not in PACKAGES:
        return sys.executable
    return str(once(root / module, lambda folder: _install(folder, module)) / "bin" / "python")


def _install(folder: Path, module: str) -> None:
    venv.create(folder, with_pip=True)
    # Large packages that this environment has, such as torch, are not installed again.
    (site,) = folder.glob("lib/python*/site-packages")
    own = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join(own) + "\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    variables = os.environ | {"CMAKE_ARGS": LLAMA_CPP_BUILD}
    subprocess.run([*pip, *PACKAGES[module]], check=True, env=variables)
    if alone := WITHOUT_DEPENDENCIES.get(module):
        subprocess.run([*pip, "--no-deps", *alone], check=True)
