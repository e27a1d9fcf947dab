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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from rich.console import RenderableType
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmarks.driver import Driver, DriverRequest, Outcome, random_image
from benchmarks.frame import DEMO, DemoBenchmark, Row, medians_by, table
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.load.contents import WORDS

KINDS = ("activated", "ordinary")
ADAPTER = "counting"
WEIGHTS = "adapter_model.safetensors"
INVOCATION = " answer in short"


@dataclass(kw_only=True)
class Activated(DemoBenchmark):
    """Questions about an image. A cell is a number of adapters, one per question, and a repeat."""

    name = "activated"
    bars: ClassVar = {"time_ratio": "≤ 1"}

    def cells(self) -> Sequence[tuple[int, int]]:
        self._driver = self._start()
        for kind in KINDS:  # Load all adapters.
            self._ask(kind, max(self.values["adapters"]), -1)
        repeats = range(self.values["repeats"])
        return [(count, repeat) for count in self.values["adapters"] for repeat in repeats]

    def measure(self, cell: tuple[int, int]) -> Iterator[Row]:
        adapters, repeat = cell
        self.status(f"{adapters} adapters, image {repeat + 1}")
        for kind in KINDS if repeat % 2 else KINDS[::-1]:
            outcome = self._ask(kind, adapters, repeat)
            yield {
                "kind": kind,
                "adapters": adapters,
                "computed_tokens": outcome.rows,
                "seconds": outcome.span,
                "first_token_ms": median(outcome.first) * 1e3,
            }

    def _start(self) -> Driver:
        """Return the driver of an engine with enough activated and ordinary adapters."""
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
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
        driver = Driver(Engine(Options(model=self.model, adapters=folder, merging="off")))
        self.stack.callback(driver.close)
        return driver

    def _ask(self, kind: str, adapters: int, repeat: int) -> Outcome:
        """Ask one question of each adapter, one after another, and return their joint outcome."""
        seed, rng = [adapters, repeat + 1, KINDS.index(kind)], random.Random(repeat)
        hidden = self._driver.engine.config.hidden
        images = random_image(seed, self.values["image_tokens"], hidden)
        outcomes = []
        for number in range(adapters):
            question = " ".join(rng.choices(WORDS, k=self.values["question"]))
            prompt = f"<s><image>{INVOCATION} {question}"
            request = DriverRequest(prompt, f"{kind}-{number}", self.values["output"], images)
            outcomes.append(self._driver.run([request]))
        return Outcome.joined(outcomes)

    def summarize(self) -> dict[str, Any]:
        """Return medians with the most activated adapters, divided by those with ordinary ones."""
        most = max(row["adapters"] for row in self.rows)

        def ratio(key: str) -> float:
            first, second = (self.median(key, kind=kind, adapters=most) for kind in KINDS)
            return first / second

        return {
            "time_ratio": ratio("seconds"),
            "first_token_ratio": ratio("first_token_ms"),
            "computed_token_ratio": ratio("computed_tokens"),
        }

    def tables(self) -> Iterable[RenderableType]:
        lines = medians_by(self.rows, "adapters", "kind")
        title = "medians over the images; all questions about an image together"
        yield table(title, lines, "adapters kind computed_tokens seconds first_token_ms")
