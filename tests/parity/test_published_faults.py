"""Tests of faults in the published V-LoRA code, one for each that this engine could share.

Starvation is tested with the policies (tests/unit/test_policy.py).
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
def batch(
    cases: list[Case], checkpoint: Path, parity_adapters: Path
) -> list[tuple[Case, list[Output]]]:
    """Return all cases with the outputs of a run that serves them in one batch."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters))
    outputs: dict[str, list[Output]] = {f"r{i}": [] for i in range(len(cases))}
    for index, case in enumerate(cases):
        engine.add(engine.prepare(case.request(f"r{index}")), arrival=0.0)
    while not engine.idle:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return list(zip(cases, outputs.values(), strict=True))


def test_every_row_uses_its_own_adapter_not_the_first_one(
    batch: list[tuple[Case, list[Output]]], cases: list[Case]
) -> None:
    """The published ATMM uses adapter 0 for every row."""
    same_words = [c for c in cases if c.question.pixels is not None and not c.question.use_head]
    answers = {c.question.adapter: c.expected.tokens for c in same_words}
    assert len({tuple(tokens[:3]) for tokens in answers.values()}) > 3, "adapters must differ"
    for case, outputs in batch:
        assert outputs[-1].adapter == case.question.adapter
        if not case.question.use_head:
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == case.expected.tokens


def test_expand_reads_b_as_d_out_by_rank() -> None:
    """The published expand kernel reads a square B transposed."""
    x, pair = torch.randn(3, 8), LoraPair(torch.randn(5, 8), torch.randn(5, 5))
    y = torch.zeros(3, 5)
    op.apply(y, x, [Segment(0, 3, 0)], LoraGroup.of(8, [pair]))
    torch.testing.assert_close(y, (x @ pair.a.T) @ pair.b.T)
    assert not torch.allclose(y, (x @ pair.a.T) @ pair.b)


def test_the_lora_scale_applies_to_unmerged_rows(
    batch: list[tuple[Case, list[Output]]],
) -> None:
    """The published unmerged operator ignores the scale that merging applies."""
    scaled = {"attention-r4": 8 / 4, "all-r8": 16 / 8**0.5, "feed-forward-r16": 32 / 16}
    checked = 0
    for case, outputs in batch:
        if case.question.adapter in scaled:
            checked += 1
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == case.expected.tokens
    assert checked >= 9


def run_with_live(
    engine: Engine, selected: list[Case], live: str | None
) -> tuple[list[list[int]], list[Output]]:
    """Return tokens and last outputs of cases served in one batch, with `live` merged."""
    slot = engine.adapters.slot(live)
    drive(engine, lambda _: slot)
    tokens: dict[str, list[int]] = {}
    last: dict[str, Output] = {}
    for index, case in enumerate(selected):
        engine.add(engine.prepare(case.request(f"m{index}")), arrival=0.0)
    while not engine.idle:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            last[output.request_id] = output
    assert engine.switcher.live == slot
    names = [f"m{index}" for index in range(len(selected))]
    return [tokens[name] for name in names], [last[name] for name in names]


@pytest.fixture(scope="module")
def by_adapter(cases: list[Case]) -> dict[str | None, list[Case]]:
    """Return the cases that the LM head answers with several tokens, by adapter."""
    groups: dict[str | None, list[Case]] = {}
    for case in cases:
        if not case.question.use_head and case.max_tokens > 3:
            groups.setdefault(case.question.adapter, []).append(case)
    return groups


def expected(selected: list[Case]) -> list[list[int]]:
    return [list(case.expected.tokens) for case in selected]


def test_a_merged_decode_applies_the_adapter_once(
    by_adapter: dict[str | None, list[Case]], checkpoint: Path, parity_adapters: Path
) -> None:
    """The published merged decode also runs the unmerged operator."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters))
    selected = by_adapter["all-r8"]
    tokens, last = run_with_live(engine, selected, "all-r8")
    assert tokens == expected(selected)
    assert all(set(output.modes) == {"merged"} for output in last)


def test_the_lora_scale_is_the_same_merged_and_unmerged(
    by_adapter: dict[str | None, list[Case]], checkpoint: Path, parity_adapters: Path
) -> None:
    """The published merging applies a scale that the unmerged operator ignores."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters))
    for name in ("attention-r4", "all-r8", "feed-forward-r16"):
        selected = by_adapter[name][:2]
        for live in (name, None):
            tokens, _ = run_with_live(engine, selected, live)
            assert tokens == expected(selected)


def test_a_mixture_decode_subtracts_the_live_adapter_from_all_other_rows(
    by_adapter: dict[str | None, list[Case]], checkpoint: Path, parity_adapters: Path
) -> None:
    """The published code disables deLoRA during decoding."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters))
    names = (None, "attention-r4", "feed-forward-r16", "all-r8", "lm-head-r32")
    selected = [case for name in names for case in by_adapter[name][:1]]
    tokens, last = run_with_live(engine, selected, "all-r8")
    assert tokens == expected(selected)
    assert all("mixture" in output.modes for output in last)
    assert all(output.modes["mixture"] > 1 for output in last[:3])


def test_an_idle_engine_keeps_track_of_its_merged_adapter(
    by_adapter: dict[str | None, list[Case]], checkpoint: Path, parity_adapters: Path
) -> None:
    """The published code clears the merged flag at the end of a batch, but not the weights."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters))
    for live in ("all-r8", "all-r8", None, "attention-r4", None):
        for name in ("all-r8", None):
            selected = by_adapter[name][:1]
            tokens, _ = run_with_live(engine, selected, live)
            assert tokens == expected(selected), (live, name)


def test_task_heads_answer_in_the_same_batch_as_the_lm_head(
    batch: list[tuple[Case, list[Output]]],
) -> None:
    """The published server has no task heads."""
    heads = [(case, outputs) for case, outputs in batch if case.question.use_head]
    assert heads
    for case, outputs in heads:
        (output,) = outputs
        assert output.head is not None
        assert (output.num_output_tokens, output.finish_reason) == (0, "stop")
        scores = torch.tensor(output.head.scores)
        torch.testing.assert_close(scores, case.scores, rtol=0.0, atol=1e-4)
        assert output.text == output.head.labels[int(case.scores.argmax())]
