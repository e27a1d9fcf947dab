"""Tests that premerging is exact: PEFT gives the same on the fused base as on the old base."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.make_adapters import SPECS, AdapterSpec, make_adapters
from tests.support.oracle import Oracle, Question
from vlora.cli import app
from vlora.offline.premerge import BASE_ADAPTER

COLD = AdapterSpec(
    "some-layers-r5",
    rank=5,
    targets=("o_proj", "up_proj"),
    alpha=3,
    options={"rank_pattern": {r"layers\.1\.self_attn\.o_proj": 3}, "use_rslora": True},
)
PROMPTS = ("What color is the star?", "Is there a circle? Answer yes or no.", "a b c")
TOLERANCE = 2e-5
"""Maximum difference of two logits, as a share of the largest one."""


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapters(checkpoint, tmp_path_factory.mktemp("cold"), (*SPECS, COLD), seed=11)


@pytest.mark.parametrize("hot", [spec.name for spec in SPECS])
def test_logits_on_the_fused_base_equal_those_on_the_old_one(
    checkpoint: Path, adapters: Path, tmp_path: Path, hot: str
) -> None:
    out = tmp_path / "out"
    arguments = [
        "--model",
        checkpoint,
        "--adapters",
        adapters,
        "--out",
        out,
        "--hot",
        hot,
        "--float32",
    ]
    result = CliRunner().invoke(app, ["premerge", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    before = Oracle(checkpoint, adapters)
    after = Oracle(out / "model", out / "adapters")
    pairs = {spec.name: spec.name for spec in (*SPECS, COLD)}
    for old, new in {**pairs, None: BASE_ADAPTER, hot: None}.items():
        for prompt in PROMPTS:
            expected = before.logits(Question(prompt, old))
            got = after.logits(Question(prompt, new))
            largest = float(expected.abs().max())
            assert float((got - expected).abs().max()) <= TOLERANCE * largest, (old, new)
        difference = before.logits(Question(prompt, old)) - before.logits(Question(prompt, None))
        assert old is None or float(difference.abs().max()) > 100 * TOLERANCE * largest
