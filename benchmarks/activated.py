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
from typing import Any, ClassVar

from rich.console import RenderableType
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmarks import frame
from benchmarks.driver import WORDS, Driver, DriverRequest, Outcome, random_image
from benchmarks.frame import DEMO, Bar, DemoBenchmark, Row, at_most
from benchmarks.timing import median_or_nan
from vlora.config import Options
from vlora.engine.engine import Engine

KINDS = ("activated", "ordinary")
ADAPTER = "counting"
WEIGHTS = "adapter_model.safetensors"
INVOCATION = " answer in short"


@dataclass(kw_only=True)
class Activated(DemoBenchmark):
    """Questions about an image. A cell is a number of adapters, one per question, and a repeat."""

    name = "activated"
    bars: ClassVar[Mapping[str, Bar]] = {"time_ratio": at_most(1.0)}

    def prepare(self) -> None:
        super().prepare()
        self._scratch = tempfile.TemporaryDirectory()
        self._driver: Driver | None = None

    def cells(self) -> Sequence[tuple[int, int]]:
        repeats = range(self.values["repeats"])
        return [(count, repeat) for count in self.values["adapters"] for repeat in repeats]

    def measure(self, cell: tuple[int, int]) -> Iterator[Row]:
        adapters, repeat = cell
        self.status(f"{adapters} adapters, image {repeat + 1}")
        if self._driver is None:
            self._driver = self._start()
            for kind in KINDS:  # Load all adapters.
                self._ask(self._driver, kind, max(self.values["adapters"]), -1)
        for kind in KINDS if repeat % 2 else KINDS[::-1]:
            outcome = self._ask(self._driver, kind, adapters, repeat)
            yield {
                "kind": kind,
                "adapters": adapters,
                "computed_tokens": outcome.rows,
                "seconds": round(outcome.span, 5),
                "first_token_ms": round(median(outcome.first) * 1e3, 3),
            }

    def _start(self) -> Driver:
        """Return the driver of an engine with enough activated and ordinary adapters."""
        folder = Path(self._scratch.name)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        invocation = tokenizer(INVOCATION, add_special_tokens=False)["input_ids"]
        for kind in KINDS:
            for number in range(max(self.values["adapters"])):
                own = folder / f"{kind}-{number}"
                shutil.copytree(DEMO / "adapters" / ADAPTER, own)
                config = own / "adapter_config.json"
                settings = json.loads(config.read_text())
                settings["alora_invocation_tokens"] = invocation if kind == KINDS[0] else None
                config.write_text(json.dumps(settings))
                # Adapters with equal weights would share their keys and values.
                tensors = load_file(own / WEIGHTS)
                scaled = {name: (1 + number / 1000) * value for name, value in tensors.items()}
                save_file(scaled, own / WEIGHTS)
        return Driver(Engine(Options(model=self.model, adapters=folder, merging="off")))

    def _ask(self, driver: Driver, kind: str, adapters: int, repeat: int) -> Outcome:
        """Ask one question of each adapter, one after another, and return their joint outcome."""
        seed, rng = [adapters, repeat + 1, KINDS.index(kind)], random.Random(repeat)
        images = random_image(seed, self.values["image_tokens"], driver.engine.config.hidden)
        outcomes = []
        for number in range(adapters):
            question = " ".join(rng.choices(WORDS, k=self.values["question"]))
            prompt = f"<s><image>{INVOCATION} {question}"
            request = DriverRequest(prompt, f"{kind}-{number}", self.values["output"], images)
            outcomes.append(driver.run([request], watch=False))
        return Outcome.joined(outcomes)

    def _median(self, kind: str, adapters: int, key: str) -> float:
        rows = [row for row in self.rows if (row["kind"], row["adapters"]) == (kind, adapters)]
        return median_or_nan(float(row[key]) for row in rows)

    def summarize(self) -> dict[str, Any]:
        """Return medians with the most activated adapters, divided by those with ordinary ones."""
        most = max(row["adapters"] for row in self.rows)
        keys = ("seconds", "first_token_ms", "computed_tokens")
        names = ("time_ratio", "first_token_ratio", "computed_token_ratio")
        medians = ([self._median(kind, most, key) for kind in KINDS] for key in keys)
        return {name: round(a / b, 3) for name, (a, b) in zip(names, medians, strict=True)}

    def tables(self) -> Iterable[RenderableType]:
        lines = [
            {key: self._median(kind, adapters, key) for key in self.rows[0] if key != "kind"}
            | {"adapters": f"{adapters} {kind}"}
            for adapters in self.values["adapters"]
            for kind in KINDS
        ]
        columns = {"adapters": "adapters", "tokens computed": "computed_tokens"}
        columns |= {"time, s": "seconds", "first token, ms": "first_token_ms"}
        title = "medians over the images; all questions about an image together"
        yield frame.table(title, lines, columns)

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
        self._scratch.cleanup()
