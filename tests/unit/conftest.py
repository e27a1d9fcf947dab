"""Fixtures for all unit tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.atmm_problems import emulated, operator

__all__ = ["emulated", "operator"]
"""Fixtures of several folders."""


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    """Restore torch's number of threads, which a test may have changed."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Any) -> Any:
    from vlora.model.tokenizer import Vocabulary

    return Vocabulary(tokenizer)


@pytest.fixture
def key_and_certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Return the key and the certificate of a server with the name `vlora`."""
    if not shutil.which("openssl"):
        pytest.skip("makes no certificate without openssl")
    key, certificate = tmp_path / "server.key", tmp_path / "server.crt"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=vlora"]
    command += ["-addext", "subjectAltName=DNS:vlora"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate
