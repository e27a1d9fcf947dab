"""Running of a command-line client in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CLIENTS = Path(__file__).resolve().parents[2] / "clients"


def run_client(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `clients/NAME.py` with these arguments; return its exit status and output."""
    command = [sys.executable, str(CLIENTS / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)
