"""Turns of systems whose batches have one adapter only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from benchmarks.peers.process import Answer, Prompt


def in_turns(
    prompts: Sequence[Prompt], turn: Callable[[Sequence[Prompt], float], list[Answer]]
) -> list[Answer]:
    """Answer the prompts of each adapter together, one adapter after another.

    turn: answers prompts of one adapter, with times from its second argument.
    """
    started = time.perf_counter()
    answers: dict[int, Answer] = {}
    for adapter in dict.fromkeys(prompt.adapter for prompt in prompts):
        own = [i for i, prompt in enumerate(prompts) if prompt.adapter == adapter]
        answers |= zip(own, turn([prompts[i] for i in own], started), strict=True)
    return [answers[i] for i in range(len(prompts))]
