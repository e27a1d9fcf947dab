"""The activated benchmark: questions about one image, each with an adapter of its own.

An activated adapter acts only from its invocation tokens on. So all activated adapters share the
keys and values that the base model computes for the image, while each ordinary adapter computes its
own. The questions arrive one after another. The adapters are copies of a demo adapter, each scaled
by a slightly different factor.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType

from benchmarks.benchmark import Bar, Row, at_most, demo_folder
from benchmarks.demo_model import DemoModelBenchmark
from benchmarks.timing import median_or_nan

if TYPE_CHECKING:
    from benchmarks.driver import Driver, Outcome

KINDS = ("activated", "ordinary")
ADAPTER = "counting"
WEIGHTS = "adapter_model.safetensors"
INVOCATION = " answer in short"


@dataclass(frozen=True)
class Cell:
    """One question per adapter, all about one image. Each repeat has a new image."""

    adapters: int
    repeat: int


class ActivatedBenchmark(DemoModelBenchmark[Cell]):
    """Benchmark of activated and ordinary adapters, which answer questions about one image."""

    name = "activated"
    bars: ClassVar[Mapping[str, Bar]] = {"time_ratio": at_most(1.0)}

    def set_up(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._driver: Driver | None = None

    def cells(self) -> Sequence[Cell]:
        repeats = range(self._grid["repeats"])
        return [Cell(count, repeat) for count in self._grid["adapters"] for repeat in repeats]

    def run(self, cell: Cell) -> Iterator[Row]:
        self.status(f"{cell.adapters} adapters, image {cell.repeat + 1}")
        if self._driver is None:
            self._driver = self._start()
            for kind in KINDS:  # Load all adapters.
                self._ask(self._driver, kind, max(self._grid["adapters"]), -1)
        for kind in KINDS if cell.repeat % 2 else KINDS[::-1]:
            outcome = self._ask(self._driver, kind, cell.adapters, cell.repeat)
            yield {
                "kind": kind,
                "adapters": cell.adapters,
                "computed_tokens": outcome.rows,
                "seconds": round(outcome.span, 5),
                "first_token_ms": round(median(outcome.first) * 1e3, 3),
            }

    def _start(self) -> Driver:
        """Return the driver of an engine with enough activated and ordinary adapters."""
        from safetensors.torch import load_file, save_file
        from transformers import AutoTokenizer

        from benchmarks.driver import Driver
        from vlora.config import Options
        from vlora.engine.engine import Engine

        folder = Path(self._scratch.name)
        tokenizer = AutoTokenizer.from_pretrained(self._model)
        invocation = tokenizer(INVOCATION, add_special_tokens=False)["input_ids"]
        for kind in KINDS:
            for number in range(max(self._grid["adapters"])):
                own = folder / f"{kind}-{number}"
                shutil.copytree(demo_folder() / "adapters" / ADAPTER, own)
                config = own / "adapter_config.json"
                settings = json.loads(config.read_text())
                settings["alora_invocation_tokens"] = invocation if kind == KINDS[0] else None
                config.write_text(json.dumps(settings))
                # Adapters with equal weights would share their keys and values.
                tensors = load_file(own / WEIGHTS)
                scaled = {name: (1 + number / 1000) * value for name, value in tensors.items()}
                save_file(scaled, own / WEIGHTS)
        return Driver(Engine(Options(model=self._model, adapters=folder, merging="off")))

    def _ask(self, driver: Driver, kind: str, adapters: int, repeat: int) -> Outcome:
        """Ask one question of each adapter, one after another, and return their joint outcome."""
        import numpy as np

        from benchmarks.driver import WORDS, DriverRequest, Outcome
        from vlora.request import ImageFeatures

        rows, seed = self._grid["image_tokens"], [adapters, repeat + 1, KINDS.index(kind)]
        features = np.random.default_rng(seed).normal(size=(rows, driver.engine.config.hidden))
        layout = np.array([[0, rows, 1, 1, rows, 0]], np.int32)
        images = ImageFeatures(features.astype(np.float32), layout)
        rng = random.Random(repeat)
        outcomes = []
        for number in range(adapters):
            question = " ".join(rng.choices(WORDS, k=self._grid["question"]))
            prompt = f"<s><image>{INVOCATION} {question}"
            request = DriverRequest(prompt, f"{kind}-{number}", self._grid["output"], images)
            outcomes.append(driver.run([request], watch=False))
        return Outcome.joined(outcomes)

    def _median(self, kind: str, adapters: int, key: str) -> float:
        rows = [row for row in self.rows if (row["kind"], row["adapters"]) == (kind, adapters)]
        return median_or_nan(float(row[key]) for row in rows)

    def summarize(self) -> dict[str, Any]:
        """Return the ratios of time, of time to first token and of computed tokens.

        Each is the median with activated adapters divided by the median with ordinary adapters, for
        the largest number of adapters.
        """
        most = max(row["adapters"] for row in self.rows)

        def ratio(key: str) -> float:
            activated, ordinary = (self._median(kind, most, key) for kind in KINDS)
            return round(activated / ordinary, 3)

        return {
            "time_ratio": ratio("seconds"),
            "first_token_ratio": ratio("first_token_ms"),
            "computed_token_ratio": ratio("computed_tokens"),
        }

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.report import figure_table

        keys = ("computed_tokens", "seconds", "first_token_ms")
        table = figure_table(
            ("adapters", "tokens computed", "time, s", "first token, ms"),
            "medians over the images; all questions about an image together",
        )
        for adapters in self._grid["adapters"]:
            for kind in KINDS:
                figures = (f"{self._median(kind, adapters, key):.4g}" for key in keys)
                table.add_row(f"{adapters} {kind}", *figures)
        return [table]

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
        self._scratch.cleanup()
