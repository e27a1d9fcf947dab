"""A system in a process of its own, which answers commands with lines of JSON.

The process runs this module with the Python of the system's environment. A class `System` of the
module that its setup names does the work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

ROOT = Path(__file__).parents[2]
LONGEST_MESSAGES = 1 << 24


class Cannot(Exception):
    """Raised when a system cannot do what it is asked, with the reason."""


@dataclass(frozen=True)
class Prompt:
    """Prompt of a request, as text and as tokens, and the name of its adapter, if any."""

    text: str
    tokens: list[int]
    adapter: str | None


@dataclass(frozen=True)
class Answer:
    """Seconds from the common start to the first token and to the end, and the tokens."""

    first: float
    end: float
    tokens: list[int]


@dataclass(frozen=True)
class Setup:
    """Inputs of a system.

    module: name of the module in this package.
    llava, llama: folders of the checkpoint; llama is that of `checkpoints.llama_folder`.
    adapters: names of the adapters.
    options: those of one of the system's settings.
    """

    module: str
    llava: str
    llama: str
    adapters: list[str]
    threads: int
    options: dict[str, Any]


class System(Protocol):
    """Work of a system. A module's `System` is made from a `Setup`."""

    def run(self, prompts: Sequence[Prompt]) -> Sequence[Answer]:
        """Answer all prompts, which arrive together, greedily with `loads.OUTPUT` tokens."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the dequantized weights by their names in a Llama; empty if not quantized."""


class PeerProcess:
    """Process of a system. Its messages go to a file in memory."""

    def __init__(self, python: str, setup: Setup) -> None:
        self._log = os.memfd_create("messages")
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "backend_src")))
        # Waiting threads must not spin while another system is measured.
        waiting = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "1"}
        threads = {"OMP_NUM_THREADS": str(setup.threads)}
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.process", json.dumps(asdict(setup))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": paths} | waiting | threads,
        )
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Answer all prompts. Raises Cannot."""
        return [Answer(**one) for one in self._ask({"prompts": [asdict(p) for p in prompts]})]

    def save_weights(self, path: Path) -> bool:
        """Write the dequantized weights to a file; return False if they are not quantized."""
        return bool(self._ask({"weights": str(path)}))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        os.close(self._log)

    def _ask(self, command: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_receive` says how the process ended.
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            messages = os.pread(self._log, LONGEST_MESSAGES, 0).decode(errors="replace")
            lines = messages.strip().splitlines() or ["no message"]
            raise Cannot(f"its process ended with {self._process.wait()}: {lines[-1]}")
        answer = json.loads(line)
        if "cannot" in answer:
            raise Cannot(answer["cannot"])
        return answer["result"]


def main() -> None:
    """Answer commands until the input ends. A fault ends the process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries print, too.
    setup = Setup(**json.loads(sys.argv[1]))
    torch.set_num_threads(setup.threads)
    # The module that runs is `__main__`, but systems raise the `Cannot` of the imported one.
    reasons: Any = import_module("benchmarks.peers.process").Cannot
    system: System | None = None

    def answer(command: Mapping[str, Any]) -> Any:
        nonlocal system
        if system is None:
            system = import_module(f"benchmarks.peers.{setup.module}").System(setup)
            return True
        if "weights" in command:
            return _save(system.weights(), command["weights"])
        return [asdict(one) for one in system.run([Prompt(**p) for p in command["prompts"]])]

    line = "{}"
    while line:
        try:
            result = {"result": answer(json.loads(line))}
        except reasons as reason:
            result = {"cannot": str(reason)}
        answers.write(json.dumps(result) + "\n")
        answers.flush()
        line = sys.stdin.readline()


def _save(weights: Mapping[str, torch.Tensor], path: str) -> bool:
    from safetensors.torch import save_file

    if weights:
        save_file({n: w.float().contiguous() for n, w in weights.items()}, path)
    return bool(weights)


if __name__ == "__main__":
    main()
