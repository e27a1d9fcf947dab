"""Tests that all environment variables that are read are known, and others are reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlora.launcher.assembly import KNOWN, unknown_variables

ROOT = Path(__file__).resolve().parents[2]
READERS = ("backend_src/**/*.py", "csrc/**/*.cpp", "csrc/**/*.h", "tools/**/*.py")
COMPOSE = ROOT / "docker" / "compose.yaml"


def test_the_known_variables_are_those_that_the_sources_name() -> None:
    sources = [path for pattern in READERS for path in ROOT.glob(pattern)]
    texts = [path.read_text() for path in sources if path.name != "environment.py"]
    read = {name for text in texts for name in re.findall(r'"(VLORA_[A-Z_]+)"', text)}
    read |= set(re.findall(r"\$\{(VLORA_[A-Z_]+)", COMPOSE.read_text()))
    assert read == set(KNOWN)


def test_a_variable_that_nothing_reads_is_reported_with_the_known_ones() -> None:
    (warning,) = unknown_variables([*KNOWN, "PATH", "VLORA_CUDA_LIBRARY"])
    assert warning.startswith("nothing reads the environment variable VLORA_CUDA_LIBRARY; known")
    assert "VLORA_ATMM_CUDA" in warning


def test_variables_of_a_kubernetes_service_are_not_reported() -> None:
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_8000_TCP"]
    names += ["PORT_8000_TCP_ADDR", "TRITON_SERVICE_HOST"]
    assert unknown_variables(f"VLORA_{name}" for name in names) == []


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_sets_only_variables_that_are_read(name: str) -> None:
    names = re.findall(r"\b(VLORA_[A-Z_]+)=", (ROOT / "docker" / name).read_text())
    assert unknown_variables(names) == []
