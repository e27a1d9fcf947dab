"""The prefix benchmark: conversations about one image, with and without the prefix cache.

The prompt of each round is the conversation so far and one more question. The model is the demo
checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType

from benchmarks.benchmark import Bar, Row, at_least
from benchmarks.demo_model import DemoModelBenchmark
from benchmarks.timing import median_or_nan

if TYPE_CHECKING:
    from benchmarks.driver import Driver, Outcome


@dataclass(frozen=True)
class ConversationRound:
    """Result of one round of a conversation.

    cached: whether the prefix cache was enabled.
    """

    number: int
    cached: bool
    outcome: Outcome

    def as_row(self) -> dict[str, Any]:
        return {
            "round": self.number,
            "cached": self.cached,
            "first_token_ms": round(self.outcome.first[0] * 1e3, 3),
            "computed_tokens": self.outcome.rows,
        }


class Conversations:
    """Two engines of one checkpoint, with and without the prefix cache."""

    def __init__(self, model: Path, grid: Mapping[str, Any]) -> None:
        from benchmarks.driver import Driver
        from vlora.config import Options
        from vlora.engine.engine import Engine

        self._grid = grid
        self._drivers = {
            cached: Driver(
                Engine(Options(model=model, enable_prefix_caching=cached, merging="off"))
            )
            for cached in (True, False)
        }

    def run(self, seed: int) -> list[ConversationRound]:
        """Run one conversation on both engines."""
        return [
            ConversationRound(number, cached, outcome)
            for cached, driver in self._drivers.items()
            for number, outcome in enumerate(self._converse(driver, seed), start=1)
        ]

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()

    def _converse(self, driver: Driver, seed: int) -> list[Outcome]:
        """Run all rounds of a conversation. Each seed has its own image."""
        import numpy as np

        from benchmarks.driver import WORDS, DriverRequest
        from vlora.request import ImageFeatures

        grid, hidden = self._grid, driver.engine.config.hidden
        rows = grid["image_tokens"]
        features = np.random.default_rng(seed + 7).normal(size=(rows, hidden)).astype(np.float32)
        images = ImageFeatures(features, np.array([[0, rows, 1, 1, rows, 0]], np.int32))
        rng = random.Random(seed)
        conversation = "<s><image>"
        outcomes = []
        for _ in range(grid["rounds"]):
            conversation += " " + " ".join(rng.choices(WORDS, k=grid["question"] // 2))
            # Only one token is generated, to time it. The rest of the answer is drawn at random.
            request = DriverRequest(conversation, None, 1, images)
            outcomes.append(driver.run([request], watch=False))
            conversation += " " + " ".join(rng.choices(WORDS, k=grid["output"] // 2))
        return outcomes


def summarize(rounds: Sequence[ConversationRound]) -> dict[str, Any]:
    """Return medians with the cache, divided by medians without it.

    `saved_over_expected` is the saved share of the second round's time to first token, divided by
    the saved share of its computed tokens.
    """

    def outcomes(cached: bool, number: int) -> list[Outcome]:
        return [r.outcome for r in rounds if (r.cached, r.number) == (cached, number)]

    def first_token(cached: bool, number: int) -> float:
        return median_or_nan(outcome.first[0] for outcome in outcomes(cached, number))

    def computed_tokens(cached: bool) -> float:
        return median_or_nan(outcome.rows for outcome in outcomes(cached, 2))

    ttft = first_token(True, 2) / first_token(False, 2)
    tokens = computed_tokens(True) / computed_tokens(False)
    return {
        "second_round_ttft_ratio": round(ttft, 3),
        "computed_token_ratio": round(tokens, 3),
        "saved_over_expected": round((1 - ttft) / (1 - tokens), 3),
        "first_round_ttft_ratio": round(first_token(True, 1) / first_token(False, 1), 3),
    }


class PrefixBenchmark(DemoModelBenchmark[int]):
    """Benchmark of computed tokens and time to first token. A cell is a conversation's seed."""

    name = "prefix"
    bars: ClassVar[Mapping[str, Bar]] = {"saved_over_expected": at_least(0.7)}

    def set_up(self) -> None:
        self._conversations: Conversations | None = None
        self._rounds: list[ConversationRound] = []

    def cells(self) -> Sequence[int]:
        return range(self._grid["repeats"])

    def run(self, cell: int) -> Iterator[Row]:
        self.status(f"conversation {cell + 1}")
        if self._conversations is None:
            self._conversations = Conversations(self._model, self._grid)
            self._conversations.run(-1)  # Warm up.
        rounds = self._conversations.run(cell)
        self._rounds += rounds
        yield from (conversation_round.as_row() for conversation_round in rounds)

    def summarize(self) -> dict[str, Any]:
        return summarize(self._rounds)

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.report import figure_table

        table = figure_table(
            ("round", "first token, ms", "without cache", "tokens computed", "without cache"),
            "medians over the conversations",
        )
        for number in sorted({row["round"] for row in self.rows}):
            figures = [
                median_or_nan(
                    r[key] for r in self.rows if (r["round"], r["cached"]) == (number, cached)
                )
                for key in ("first_token_ms", "computed_tokens")
                for cached in (True, False)
            ]
            table.add_row(str(number), *(f"{figure:.5g}" for figure in figures))
        return [table]

    def close(self) -> None:
        if self._conversations is not None:
            self._conversations.close()
