"""Few cases that stand for all combinations of a test's parameters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

CANDIDATES = 20
"""Number of random cases of which the one with the most new pairs is taken."""


def cases_of(**values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases in which each pair of values of two parameters occurs, drawn with a fixed seed.

    values: all values of each parameter. A case has one value of each, in their order. A fault that
    needs certain values of three parameters may be missed, so parameters that select a kernel
    together must be given as one.
    """
    drawn = random.Random(0)
    options = [range(len(each)) for each in values.values()]
    missing = {
        frozenset(((first, a), (second, b)))
        for first, second in combinations(range(len(options)), 2)
        for a in options[first]
        for b in options[second]
    }
    cases = []
    while missing:
        fixed = dict(min(missing, key=sorted))
        candidates = [
            tuple(fixed.get(n, drawn.choice(each)) for n, each in enumerate(options))
            for _ in range(CANDIDATES)
        ]
        new = [set(map(frozenset, combinations(enumerate(case), 2))) for case in candidates]
        best = max(range(CANDIDATES), key=lambda index: len(new[index] & missing))
        missing -= new[best]
        cases.append(candidates[best])
    return [
        tuple(each[index] for each, index in zip(values.values(), case, strict=True))
        for case in cases
    ]


def drawn(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with `cases_of` the values of its parameters."""
    return pytest.mark.parametrize(tuple(values), cases_of(**values))
