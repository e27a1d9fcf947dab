"""The prefix benchmark: conversations about one image, with and without the prefix cache.

The prompt of each round is the conversation so far and one more question. The model is the demo
checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import RenderableType

from benchmarks.driver import Driver, DriverRequest, random_image
from benchmarks.frame import DemoBenchmark, Row, medians_by, table
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.load.contents import WORDS


@dataclass(kw_only=True)
class Prefix(DemoBenchmark):
    """Computed tokens and time to first token. A cell is a conversation's seed."""

    name = "prefix"
    bars: ClassVar = {"saved_over_expected": "≥ 0.7"}

    def cells(self) -> Sequence[int]:
        self._drivers: dict[bool, Driver] = {}
        for cached in (True, False):
            options = Options(model=self.model, enable_prefix_caching=cached, merging="off")
            self._drivers[cached] = Driver(Engine(options))
            self.stack.callback(self._drivers[cached].close)
        list(self.measure(-1))  # Warm up.
        return range(self.values["repeats"])

    def measure(self, cell: int) -> Iterator[Row]:
        self.status(f"conversation {cell + 1}")
        for cached, driver in self._drivers.items():
            yield from self._converse(driver, cell, cached)

    def _converse(self, driver: Driver, seed: int, cached: bool) -> Iterator[Row]:
        """Run all rounds of a conversation. Each seed has its own image."""
        grid, rng = self.values, random.Random(seed)
        images = random_image(seed + 7, grid["image_tokens"], driver.engine.config.hidden)
        conversation = "<s><image>"
        for number in range(1, grid["rounds"] + 1):
            conversation += " " + " ".join(rng.choices(WORDS, k=grid["question"] // 2))
            # Only one token is generated, to time it. The rest of the answer is drawn at random.
            outcome = driver.run([DriverRequest(conversation, None, 1, images)])
            conversation += " " + " ".join(rng.choices(WORDS, k=grid["output"] // 2))
            row = {"round": number, "cached": cached, "first_token_ms": outcome.first[0] * 1e3}
            yield row | {"computed_tokens": outcome.rows}

    def summarize(self) -> dict[str, Any]:
        """Return medians with the cache, divided by medians without it.

        `saved_over_expected` is the saved share of the second round's time to first token, divided
        by the saved share of its computed tokens.
        """

        def ratio(key: str, number: int) -> float:
            with_cache = self.median(key, round=number, cached=True)
            return with_cache / self.median(key, round=number, cached=False)

        ttft, tokens = ratio("first_token_ms", 2), ratio("computed_tokens", 2)
        return {
            "second_round_ttft_ratio": ttft,
            "computed_token_ratio": tokens,
            "saved_over_expected": (1 - ttft) / (1 - tokens),
            "first_round_ttft_ratio": ratio("first_token_ms", 1),
        }

    def tables(self) -> Iterable[RenderableType]:
        lines = medians_by(self.rows, "round", "cached")
        keys = "round cached first_token_ms computed_tokens"
        yield table("medians over the conversations", lines, keys)
