"""`vlora bench prefix`: several rounds of questions on one image, with and without the cache.

Each round's prompt is all that was said before and one more question. On the demo checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.adapters.measurement import WORDS
from benchmarks.driver import Ask, Driver, Outcome
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.request import ImageFeatures


@dataclass(frozen=True)
class Round:
    """One round of one conversation. cached: with the prefix cache."""

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


def run(model: Path, grid: Mapping[str, Any]) -> list[Round]:
    """The same conversations with and without the cache, side by side; the first is not counted."""
    drivers = {
        cached: Driver(Engine(Options(model=model, enable_prefix_caching=cached, merging="off")))
        for cached in (True, False)
    }
    found = []
    for repeat in range(-1, grid["repeats"]):
        for cached, driver in drivers.items():
            rounds = converse(driver, grid, repeat)
            if repeat >= 0:
                found += [Round(i + 1, cached, outcome) for i, outcome in enumerate(rounds)]
    for driver in drivers.values():
        driver.close()
    return found


def converse(driver: Driver, grid: Mapping[str, Any], seed: int) -> list[Outcome]:
    """One image that was never seen, and so many rounds on it."""
    hidden = driver.engine.config.hidden
    rows = grid["image_tokens"]
    features = np.random.default_rng(seed + 7).normal(size=(rows, hidden)).astype(np.float32)
    images = ImageFeatures(features, np.array([[0, rows, 1, 1, rows, 0]], np.int32))
    rng = random.Random(seed)
    said = "<s><image>"
    outcomes = []
    for _ in range(grid["rounds"]):
        said += " " + " ".join(rng.choices(WORDS, k=grid["question"] // 2))
        # One token of this answer, to see when it comes; what is said next is ours.
        outcomes.append(driver.run([Ask(said, None, 1, images)], watch=False))
        said += " " + " ".join(rng.choices(WORDS, k=grid["output"] // 2))
    return outcomes


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    """The keys of the issue, of the second round: with the cache over without."""

    def of(cached: bool, number: int) -> list[Outcome]:
        return [one.outcome for one in rounds if (one.cached, one.number) == (cached, number)]

    def first(cached: bool, number: int) -> float:
        return median(outcome.first[0] for outcome in of(cached, number))

    def computed(cached: bool) -> float:
        return median(outcome.rows for outcome in of(cached, 2))

    ttft = first(True, 2) / first(False, 2)
    tokens = computed(True) / computed(False)
    return {
        "second_round_ttft_ratio": round(ttft, 3),
        "computed_token_ratio": round(tokens, 3),
        "saved_over_expected": round((1 - ttft) / (1 - tokens), 3),
        "first_round_ttft_ratio": round(first(True, 1) / first(False, 1), 3),
    }
