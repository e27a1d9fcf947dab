"""The prefix benchmark: conversations about one image, with and without the prefix cache.

The prompt of each round is the conversation so far and one more question. The model is the demo
checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import RenderableType

from benchmarks import frame
from benchmarks.driver import WORDS, Driver, DriverRequest, random_image
from benchmarks.frame import Bar, DemoBenchmark, Row, at_least
from benchmarks.timing import median_or_nan
from vlora.config import Options
from vlora.engine.engine import Engine


@dataclass(kw_only=True)
class Prefix(DemoBenchmark):
    """Computed tokens and time to first token. A cell is a conversation's seed."""

    name = "prefix"
    bars: ClassVar[Mapping[str, Bar]] = {"saved_over_expected": at_least(0.7)}

    def prepare(self) -> None:
        super().prepare()
        self._drivers: dict[bool, Driver] = {}

    def cells(self) -> Sequence[int]:
        for cached in (True, False):
            options = Options(model=self.model, enable_prefix_caching=cached, merging="off")
            self._drivers[cached] = Driver(Engine(options))
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
            outcome = driver.run([DriverRequest(conversation, None, 1, images)], watch=False)
            conversation += " " + " ".join(rng.choices(WORDS, k=grid["output"] // 2))
            first_token_ms = round(outcome.first[0] * 1e3, 3)
            row = {"round": number, "cached": cached, "first_token_ms": first_token_ms}
            yield row | {"computed_tokens": outcome.rows}

    def _median(self, key: str, number: int, cached: bool) -> float:
        chosen = [r for r in self.rows if (r["round"], r["cached"]) == (number, cached)]
        return median_or_nan(row[key] for row in chosen)

    def summarize(self) -> dict[str, Any]:
        """Return medians with the cache, divided by medians without it.

        `saved_over_expected` is the saved share of the second round's time to first token, divided
        by the saved share of its computed tokens.
        """

        def ratio(key: str, number: int) -> float:
            return self._median(key, number, True) / self._median(key, number, False)

        ttft, tokens = ratio("first_token_ms", 2), ratio("computed_tokens", 2)
        return {
            "second_round_ttft_ratio": round(ttft, 3),
            "computed_token_ratio": round(tokens, 3),
            "saved_over_expected": round((1 - ttft) / (1 - tokens), 3),
            "first_round_ttft_ratio": round(ratio("first_token_ms", 1), 3),
        }

    def tables(self) -> Iterable[RenderableType]:
        columns: dict[str, Any] = {"round": "round"}
        for title, key in (("first token, ms", "first_token_ms"), ("tokens", "computed_tokens")):
            for cached, suffix in ((True, ""), (False, ", without cache")):
                columns[title + suffix] = lambda row, key=key, cached=cached: self._median(
                    key, row["round"], cached
                )
        rounds = [{"round": number} for number in sorted({row["round"] for row in self.rows})]
        yield frame.table("medians over the conversations", rounds, columns)

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()
