"""The structured benchmark: steps with constrained requests, compared with unconstrained ones.

Other processes compute the token masks while the engine computes the next step. A row whose mask is
late waits, and its time per token grows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType

from benchmarks.benchmark import Bar, Row, at_most
from benchmarks.demo_model import DemoModelBenchmark
from benchmarks.timing import median_or_nan

if TYPE_CHECKING:
    from vlora.engine.engine import Engine
    from vlora.structured.grammars import Grammars

OBJECT = {
    "type": "object",
    "properties": {
        "label": {"type": "string", "maxLength": 20},
        "box": {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4},
        "kind": {"enum": ["red", "green", "blue"]},
    },
    "required": ["label", "box", "kind"],
    "additionalProperties": False,
}

STRUCTURES: Mapping[str, Mapping[str, Any]] = {
    "free": {},
    "everything": {"structured_outputs": {"regex": "(?s:.{4000})"}},
    "json": {"structured_outputs": {"json": {"type": "array", "items": OBJECT, "minItems": 400}}},
    "regex": {"structured_outputs": {"regex": "([a-z]{2,9} ){400}"}},
}
"""Sampling parameters that request each structure, by name of the structure."""


@dataclass(frozen=True)
class Cell:
    """One load: requests that run together with the same structure.

    vocabulary: number of tokens of a tokenizer that replaces the checkpoint's tokenizer. Then only
        the grammar's process is measured, without an engine. None for the checkpoint's tokenizer.
    """

    structure: str
    requests: int
    vocabulary: int | None = None


@dataclass(frozen=True)
class Load:
    """Times of one load in seconds.

    step: median of the steps.
    per_token: duration of the run divided by the number of generated tokens.
    mask: mean processor time of a mask.
    held: number of rows that waited for their mask, divided by the number of generated tokens.
    """

    step: float
    per_token: float
    mask: float
    held: float

    def as_row(self, cell: Cell) -> Row:
        return {
            "structure": cell.structure,
            "requests": cell.requests,
            "step_ms": round(self.step * 1e3, 4),
            "token_ms": round(self.per_token * 1e3, 4),
            "mask_us": round(self.mask * 1e6, 2),
            "mask_share": round(self.mask * cell.requests / self.step, 4),
            "held_share": round(self.held, 4),
        }


def run_load(engine: Engine, cell: Cell, tokens: int) -> Load:
    """Run one load to its end and return its times."""
    from vlora.request import Request
    from vlora.sampling import SamplingParams

    raw = {"temperature": 0.8, "max_tokens": tokens, **STRUCTURES[cell.structure]}
    params = replace(SamplingParams.parse(raw), ignore_eos=True)
    states = [
        engine.prepare(Request(f"r{i}", "<s>what is in the picture?", replace(params, seed=i)))
        for i in range(cell.requests)
    ]
    before = engine.stats()
    steps: list[float] = []
    started = time.perf_counter()
    for index, state in enumerate(states):
        engine.add(state, float(index))
    while not engine.idle:
        step_started = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - step_started)
        errors = [output.error for output in outputs if output.error is not None]
        assert not errors, errors
    span = time.perf_counter() - started
    after = engine.stats()
    drawn = after.generated_tokens - before.generated_tokens
    masks = max(1, after.masks - before.masks)
    mask = (after.mask_seconds - before.mask_seconds) / masks
    return Load(median(steps), span / drawn, mask, (after.rows_held - before.rows_held) / drawn)


class StructuredBenchmark(DemoModelBenchmark[Cell]):
    """Times of the steps and tokens of constrained requests, and processor time of their masks.

    A step of the demo model takes only a millisecond, so masks weigh more than with any real model.
    """

    name = "structured"
    bars: ClassVar[Mapping[str, Bar]] = {"json_token_ratio": at_most(2.0)}

    def set_up(self) -> None:
        self._engine: Engine | None = None
        self._grammars: Grammars | None = None

    def cells(self) -> Sequence[Cell]:
        loads = [
            Cell(structure, requests)
            for requests in self._grid["requests"]
            for _ in range(self._grid["repeats"])
            for structure in STRUCTURES
        ]
        most, tokens = max(self._grid["requests"]), self._grid["vocabulary"]
        return loads + [Cell(name, most, tokens) for name in STRUCTURES if name != "free"]

    def run(self, cell: Cell) -> Iterator[Row]:
        self.status(f"{cell.requests} requests, {cell.structure}")
        if cell.vocabulary is not None:
            yield self._large_vocabulary(cell, cell.vocabulary)
            return
        if self._engine is None:
            from vlora.config import Options
            from vlora.engine.engine import Engine

            self._engine = Engine(Options(model=self._model, merging="off"))
            for structure in STRUCTURES:
                run_load(self._engine, Cell(structure, 2), 8)  # Warm up.
        yield run_load(self._engine, cell, self._grid["tokens"]).as_row(cell)

    def _large_vocabulary(self, cell: Cell, size: int) -> Row:
        from benchmarks.large_vocabulary import grammars_of, make_tokenizer, measure
        from vlora.config import Limits

        if self._grammars is None:
            self._grammars = grammars_of(make_tokenizer(size), size, Limits())
        tokens = self._grid["tokens"]
        figures = measure(self._grammars, STRUCTURES[cell.structure], cell.requests, tokens)
        return {
            "structure": cell.structure,
            "requests": cell.requests,
            "vocabulary": size,
        } | figures

    def _median(self, structure: str, requests: int, key: str) -> float:
        return median_or_nan(
            float(row[key])
            for row in self.rows
            if (row["structure"], row["requests"]) == (structure, requests) and key in row
        )

    def summarize(self) -> dict[str, Any]:
        """Return the figures of the load with the most requests."""
        requests = max(row["requests"] for row in self.rows)

        def figure(structure: str, key: str) -> float:
            return self._median(structure, requests, key)

        free = figure("free", "token_ms")
        return {
            "json_mask_us": figure("json", "mask_us"),
            "json_mask_share": figure("json", "mask_share"),
            "large_vocabulary_json_mask_us": figure("json", "large_mask_us"),
            "json_token_ratio": round(figure("json", "token_ms") / free, 3),
            "regex_token_ratio": round(figure("regex", "token_ms") / free, 3),
            "everything_token_ratio": round(figure("everything", "token_ms") / free, 3),
        }

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.report import figure_table

        keys = ("step_ms", "token_ms", "mask_us", "mask_share", "held_share")
        table = figure_table(
            ("requests, structure", "step, ms", "token, ms", "mask, µs", "of a step", "held"),
            "medians over the repeats; masks of all requests as a share of a step",
        )
        for requests in self._grid["requests"]:
            for structure in STRUCTURES:
                figures = (f"{self._median(structure, requests, key):.4g}" for key in keys)
                table.add_row(f"{requests} {structure}", *figures)
        keys = ("compile_ms", "first_mask_us", "large_mask_us", "highest_mask_us", "memory_mib")
        names = ("compile, ms", "first mask, µs", "mask, µs", "highest", "memory, MiB")
        large = figure_table(
            ("structure", *names),
            f"processor times and private memory of a grammar's process with"
            f" {self._grid['vocabulary']} tokens",
        )
        for row in self.rows:
            if "vocabulary" in row:
                large.add_row(row["structure"], *(f"{row[key]:.4g}" for key in keys))
        return [table, large]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine.adapters.close()
        if self._grammars is not None:
            self._grammars.close()
