"""What the published V-LoRA code gets wrong, one test each, as far as the engine has the part.

The faults that concern merging, mode changes and starvation are tested with those parts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.questions import Case
from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segment
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.request import Output


@pytest.fixture(scope="module")
def together(
    cases: list[Case], checkpoint: Path, parity_adapters: Path
) -> list[tuple[Case, list[Output]]]:
    """All questions of the pool, asked at once."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters))
    outputs: dict[str, list[Output]] = {f"r{i}": [] for i in range(len(cases))}
    for index, case in enumerate(cases):
        engine.add(engine.prepare(case.request(f"r{index}")), arrival=0.0)
    while not engine.idle:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return list(zip(cases, outputs.values(), strict=True))


def test_every_row_uses_its_own_adapter_not_the_first_one(
    together: list[tuple[Case, list[Output]]], cases: list[Case]
) -> None:
    """There, ATMM takes adapter 0 for every row."""
    same_words = [c for c in cases if c.question.pixels is not None and not c.question.use_head]
    answers = {c.question.adapter: c.expected.tokens for c in same_words}
    assert len({tuple(tokens[:3]) for tokens in answers.values()}) > 3, "adapters must differ"
    for case, outputs in together:
        assert outputs[-1].adapter == case.question.adapter
        if not case.question.use_head:
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == case.expected.tokens


def test_expand_reads_b_as_d_out_by_rank() -> None:
    """There, expand reads a square B transposed."""
    x, pair = torch.randn(3, 8), LoraPair(torch.randn(5, 8), torch.randn(5, 5))
    y = torch.zeros(3, 5)
    op.apply(y, x, [Segment(0, 3, 0)], LoraGroup.of(8, [pair]))
    torch.testing.assert_close(y, (x @ pair.a.T) @ pair.b.T)
    assert not torch.allclose(y, (x @ pair.a.T) @ pair.b)


def test_the_lora_scale_counts_when_unmerged(
    together: list[tuple[Case, list[Output]]],
) -> None:
    """There, the unmerged operator ignores the scale that merging applies."""
    scaled = {"attention-r4": 8 / 4, "all-r8": 16 / 8**0.5, "feed-forward-r16": 32 / 16}
    checked = 0
    for case, outputs in together:
        if case.question.adapter in scaled:
            checked += 1
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == case.expected.tokens
    assert checked >= 9


def test_task_heads_answer_in_the_same_batch_as_the_lm_head(
    together: list[tuple[Case, list[Output]]],
) -> None:
    """There, no task head exists in serving."""
    heads = [(case, outputs) for case, outputs in together if case.question.use_head]
    assert heads
    for case, outputs in heads:
        (only,) = outputs
        assert only.head is not None
        assert (only.num_output_tokens, only.finish_reason) == (0, "stop")
        torch.testing.assert_close(torch.tensor(only.head.scores), case.scores, rtol=0.0, atol=1e-4)
        assert only.text == only.head.labels[int(case.scores.argmax())]
