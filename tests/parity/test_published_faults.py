"""What the published V-LoRA code gets wrong, one test each, as far as the engine has the part.

Starvation is tested with the policy (tests/unit/test_policy.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.modes import drive
from tests.support.questions import Case
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


def answered(
    engine: Engine, chosen: list[Case], live: str | None
) -> tuple[list[list[int]], list[Output]]:
    """(tokens, last outputs) of cases asked together, with this adapter in the weights."""
    slot = engine.adapters.slot(live)
    drive(engine, lambda _: slot)
    tokens: dict[str, list[int]] = {}
    last: dict[str, Output] = {}
    for index, case in enumerate(chosen):
        engine.add(engine.prepare(case.request(f"m{index}")), arrival=0.0)
    while not engine.idle:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            last[output.request_id] = output
    assert engine.switcher.live == slot
    names = [f"m{index}" for index in range(len(chosen))]
    return [tokens[name] for name in names], [last[name] for name in names]


@pytest.fixture(scope="module")
def of_adapter(cases: list[Case]) -> dict[str | None, list[Case]]:
    """Questions that the LM head answers with several tokens, by adapter."""
    found: dict[str | None, list[Case]] = {}
    for case in cases:
        if not case.question.use_head and case.max_tokens > 3:
            found.setdefault(case.question.adapter, []).append(case)
    return found


def expected(chosen: list[Case]) -> list[list[int]]:
    return [list(case.expected.tokens) for case in chosen]


def test_a_merged_decode_adds_the_adapter_once(
    of_adapter: dict[str | None, list[Case]], checkpoint: Path, parity_adapters: Path
) -> None:
    """There, a merged decode goes through the unmerged operator as well."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters))
    chosen = of_adapter["all-r8"]
    tokens, last = answered(engine, chosen, "all-r8")
    assert tokens == expected(chosen)
    assert all(set(output.modes) == {"merged"} for output in last)


def test_the_lora_scale_counts_when_merged_as_it_does_unmerged(
    of_adapter: dict[str | None, list[Case]], checkpoint: Path, parity_adapters: Path
) -> None:
    """There, merging applies a scale that the unmerged operator does not know."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters))
    for name in ("attention-r4", "all-r8", "feed-forward-r16"):
        chosen = of_adapter[name][:2]
        for live in (name, None):
            tokens, _ = answered(engine, chosen, live)
            assert tokens == expected(chosen)


def test_a_mixture_decode_takes_the_live_adapter_out_of_all_other_rows(
    of_adapter: dict[str | None, list[Case]], checkpoint: Path, parity_adapters: Path
) -> None:
    """There, deLoRA is switched off while decoding."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters))
    names = (None, "attention-r4", "feed-forward-r16", "all-r8", "lm-head-r32")
    chosen = [case for name in names for case in of_adapter[name][:1]]
    tokens, last = answered(engine, chosen, "all-r8")
    assert tokens == expected(chosen)
    assert all("mixture" in output.modes for output in last)
    assert all(output.modes["mixture"] > 1 for output in last[:3])


def test_an_engine_that_ran_dry_still_knows_what_is_in_its_weights(
    of_adapter: dict[str | None, list[Case]], checkpoint: Path, parity_adapters: Path
) -> None:
    """There, a drained batch clears the merged flag and leaves the weights merged."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters))
    for live in ("all-r8", "all-r8", None, "attention-r4", None):
        for name in ("all-r8", None):
            chosen = of_adapter[name][:1]
            tokens, _ = answered(engine, chosen, live)
            assert tokens == expected(chosen), (live, name)


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
