"""A fixed set of questions with the oracle's answers. Schedules are composed of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from tests.support.oracle import Greedy, Oracle, Question
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams

TEXT = (
    "what colour is the circle on the left of a striped square how many shapes are there in"
    " picture zebra ω 漢字 🙂 is it blue or green"
)
WORDS = TEXT.split()


@dataclass
class Case:
    """A question, its token limit, and the oracle's answer, which is computed on first use."""

    oracle: Oracle
    question: Question
    max_tokens: int

    @cached_property
    def expected(self) -> Greedy:
        return self.oracle.greedy(self.question, self.max_tokens)

    @cached_property
    def scores(self) -> torch.Tensor:
        return self.oracle.head_scores(self.question)

    @cached_property
    def images(self) -> ImageFeatures | None:
        if self.question.pixels is None:
            return None
        features = self.oracle.features(self.question.pixels)
        count = len(self.question.pixels)
        rows = features.shape[0] // count
        layout = [[i * rows, rows, 1, 8, 8, 0] for i in range(count)]
        return ImageFeatures(features, np.array(layout, dtype=np.int32))

    @property
    def length(self) -> int:
        return len(self.oracle.prompt_ids(self.question))

    def request(self, request_id: str) -> Request:
        return Request(
            id=request_id,
            prompt=self.question.prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=self.max_tokens),
            adapter=self.question.adapter,
            images=self.images,
            use_head=self.question.use_head,
        )


def make_cases(oracle: Oracle, adapters: list[str], heads: set[str], seed: int = 0) -> list[Case]:
    """Return cases for the base model and every adapter.

    Prompts have from 1 to about 150 tokens, and no, one or two images. For adapters in `heads` the
    task head answers some of them.
    """
    rng = np.random.default_rng(seed)
    cases: list[Case] = []
    for adapter in [None, *adapters]:
        for images, words in ((0, 1), (0, 12), (0, 120), (1, 8), (2, 30)):
            text = " ".join(rng.choice(WORDS, size=words))
            pixels = torch.from_numpy(rng.uniform(-1, 1, (images, 3, 64, 64)).astype(np.float32))
            question = Question(
                prompt=f"<s>{'<image>' * images} {text} Answer:",
                adapter=adapter,
                pixels=pixels if images else None,
                use_head=adapter in heads and words in (8, 120),
            )
            cases.append(Case(oracle, question, max_tokens=int(rng.integers(1, 32))))
    return cases
