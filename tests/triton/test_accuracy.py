"""Test that the demo checkpoint answers over gRPC as transformers with PEFT does.

A text must equal the oracle's, unless the two best logits of the oracle are a near tie.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.support.oracle import Mismatch, Oracle
from tools.demo.__main__ import ADAPTERS, CHECKPOINT
from tools.demo.accuracy import Served, ask_all
from tools.demo.heldout import DOMAINS, Item, is_right, items
from vlora.launcher.server import TritonServer

ITEMS = 6
"""Number of items per domain; the model card was measured with 200."""
HEAD_TOLERANCE = 1e-4


@dataclass
class Comparison:
    """Comparison of the server's answers with the oracle's.

    ties: number of answers that differ at a near tie of the oracle's logits.
    wrong: descriptions of all other differences.
    """

    right: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, item: Item, served: Served, oracle: Oracle) -> None:
        answer = oracle.answer(item, item.adapter)
        self.right += is_right(item, served.text)
        if answer.scores is not None:
            labels = oracle.adapter_info(item.adapter)["head"]["labels"]
            worst = _worst_score(served, answer.scores, labels)
            if worst > HEAD_TOLERANCE:
                self.wrong.append(f"{item.id}: head scores differ by {worst:.2e}")
            return
        try:
            self.ties += oracle.text_ties(item, item.adapter, answer, served.text)
        except Mismatch as why:
            difference = f"{served.text!r} instead of {answer.text!r}"
            self.wrong.append(f"{item.id}: {difference} ({why})")


def _worst_score(served: Served, expected: Sequence[float], labels: Sequence[str]) -> float:
    """Return the largest difference between the server's scores and the oracle's."""
    if served.scores is None or list(served.scores) != list(labels):
        return math.inf
    return max(abs(a - b) for a, b in zip(served.scores.values(), expected, strict=True))


@pytest.mark.slow
def test_served_predictions_equal_the_oracles(demo_server: TritonServer) -> None:
    asked = [item for domain in DOMAINS for item in items(domain, ITEMS)]
    random.Random(0).shuffle(asked)
    oracle, found = Oracle(CHECKPOINT, ADAPTERS), Comparison()
    for item, answer in zip(asked, ask_all(demo_server.grpc_url, asked), strict=True):
        found.add(item, answer, oracle)
    assert found.wrong == []
    assert found.ties <= max(1, len(asked) // 100)
    assert found.right / len(asked) > 0.7, "most of the held-out set is answered correctly"
