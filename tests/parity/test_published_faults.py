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

Batch = list[tuple[Case, list[Output]]]


@pytest.fixture
def engine(checkpoint: Path, parity_adapters: Path) -> Engine:
    return Engine(Options(model=checkpoint, adapters=parity_adapters))


def served(engine: Engine, cases: list[Case]) -> Batch:
    """Serve cases in one batch. Check the tokens of those that the LM head answers."""
    outputs: dict[str, list[Output]] = {f"r{i}": [] for i in range(len(cases))}
    for name, case in zip(outputs, cases, strict=True):
        engine.add(engine.prepare(case.request(name)), arrival=0.0)
    while not engine.idle:
        for output in engine.step():
            outputs[output.request_id].append(output)
    batch = list(zip(cases, outputs.values(), strict=True))
    for case, answer in batch:
        if not case.question.use_head:
            tokens = [token for output in answer for token in output.token_ids]
            assert tokens == list(case.expected.tokens), case.question
    return batch


def served_with(engine: Engine, live: str | None, cases: list[Case]) -> list[Output]:
    """Serve cases with `live` merged. Return the last output of each."""
    slot = engine.adapters.slot(live)
    drive(engine, lambda _: slot)
    batch = served(engine, cases)
    assert engine.switcher.live == slot
    return [answer[-1] for _, answer in batch]


@pytest.fixture(scope="module")
def by_adapter(cases: list[Case]) -> dict[str | None, list[Case]]:
    """Return the cases that the LM head answers with several tokens, by adapter."""
    groups: dict[str | None, list[Case]] = {}
    for case in cases:
        if not case.question.use_head and case.max_tokens > 3:
            groups.setdefault(case.question.adapter, []).append(case)
    return groups


def test_every_row_uses_its_own_adapter_with_its_scale_and_its_own_head(
    engine: Engine, cases: list[Case]
) -> None:
    """The published ATMM uses adapter 0 for every row, and the unmerged operator ignores the scale
    that merging applies. The published server has no task heads."""
    same_words = [c for c in cases if c.question.pixels is not None and not c.question.use_head]
    answers = {c.question.adapter: c.expected.tokens for c in same_words}
    assert len({tuple(tokens[:3]) for tokens in answers.values()}) > 3, "adapters must differ"
    # The scales of these are 8 / 4, 16 / √8 and 32 / 16.
    assert {"attention-r4", "all-r8", "feed-forward-r16"} <= answers.keys()
    batch = served(engine, cases)
    assert all(answer[-1].adapter == case.question.adapter for case, answer in batch)
    heads = [(case, answer) for case, answer in batch if case.question.use_head]
    assert heads
    for case, (output,) in heads:
        assert output.head is not None
        assert (output.num_output_tokens, output.finish_reason) == (0, "stop")
        scores = torch.tensor(output.head.scores)
        torch.testing.assert_close(scores, case.scores, rtol=0.0, atol=1e-4)
        assert output.text == output.head.labels[int(case.scores.argmax())]


def test_expand_reads_b_as_d_out_by_rank() -> None:
    """The published expand kernel reads a square B transposed."""
    x, pair = torch.randn(3, 8), LoraPair(torch.randn(5, 8), torch.randn(5, 5))
    y = torch.zeros(3, 5)
    op.apply(y, x, [Segment(0, 3, 0)], LoraGroup.of(8, [pair]))
    torch.testing.assert_close(y, (x @ pair.a.T) @ pair.b.T)
    assert not torch.allclose(y, (x @ pair.a.T) @ pair.b)


def test_a_merged_decode_applies_the_adapter_once(
    engine: Engine, by_adapter: dict[str | None, list[Case]]
) -> None:
    """The published merged decode also runs the unmerged operator."""
    last = served_with(engine, "all-r8", by_adapter["all-r8"])
    assert all(set(output.modes) == {"merged"} for output in last)


def test_the_lora_scale_is_the_same_merged_and_unmerged(
    engine: Engine, by_adapter: dict[str | None, list[Case]]
) -> None:
    """The published merging applies a scale that the unmerged operator ignores."""
    for name in ("attention-r4", "all-r8", "feed-forward-r16"):
        for live in (name, None):
            served_with(engine, live, by_adapter[name][:2])


def test_a_mixture_decode_subtracts_the_live_adapter_from_all_other_rows(
    engine: Engine, by_adapter: dict[str | None, list[Case]]
) -> None:
    """The published code disables deLoRA during decoding."""
    names = (None, "attention-r4", "feed-forward-r16", "all-r8", "lm-head-r32")
    last = served_with(engine, "all-r8", [by_adapter[name][0] for name in names])
    assert all("mixture" in output.modes for output in last)
    assert all(output.modes["mixture"] > 1 for output in last[:3])


def test_an_idle_engine_keeps_track_of_its_merged_adapter(
    engine: Engine, by_adapter: dict[str | None, list[Case]]
) -> None:
    """The published code clears the merged flag at the end of a batch, but not the weights."""
    for live in ("all-r8", "all-r8", None, "attention-r4", None):
        for name in ("all-r8", None):
            served_with(engine, live, by_adapter[name][:1])
