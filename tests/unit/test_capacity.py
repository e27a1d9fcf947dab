"""The planner's arithmetic is what an engine allocates."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlora import capacity, cli
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.model.decoder_config import load_config
from vlora.model.loader import load_weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_adapters_and_weights_are_those_of_an_engine(
    checkpoint: Path, adapters_dir: Path, dtype: str
) -> None:
    options = Options(model=checkpoint, adapters=adapters_dir, dtype=dtype, block_size=8)
    memory = 256 * 1024 * 1024
    found = capacity.plan(options, {}, memory)
    engine = Engine(options)
    assert found.page == engine.memory.store.page_bytes
    assert {cost.name: cost.pages for cost in found.known} == {
        name: engine.adapters.pages_of(engine.adapters.handle(name))
        for name in engine.adapters.names()
    }
    assert engine.pool.adapter == found.known_pages
    assert engine.adapters.host_bytes == sum(cost.host for cost in found.known)
    assert engine.slab.base.nbytes < found.weights
    # In whole huge pages, at most one more at either end of each of the groups.
    assert found.merged <= engine.switcher.merged_bytes
    assert found.pages == (memory - found.weights - found.merged) // found.page
    left = found.sequences(found.known_pages)
    assert left * found.sequence_pages + found.known_pages <= found.pages


def test_the_decoders_bytes_are_those_that_are_loaded(checkpoint: Path) -> None:
    import torch

    config = load_config(checkpoint)
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_weights(checkpoint, config, dtype)
        loaded = [weights.slab.base, weights.embedding, weights.lm_head, weights.final_norm]
        loaded += [*weights.norms.values(), *weights.biases.values()]
        assert capacity.weights_bytes(config, dtype.itemsize) == sum(t.nbytes for t in loaded)


def test_more_rank_costs_more_and_the_table_says_how_much(
    checkpoint: Path, adapters_dir: Path
) -> None:
    found = capacity.plan(Options(model=checkpoint, adapters=adapters_dir), {}, 1 << 28)
    by_rank = [cost.packed for cost in found.kinds if cost.name.endswith("all")]
    assert by_rank == sorted(by_rank)
    assert by_rank[-1] > 4 * by_rank[0]
    told = CliRunner().invoke(
        cli.app,
        ["capacity", "--model", str(checkpoint), "--adapters", str(adapters_dir), "--memory", "1"],
    )
    assert told.exit_code == 0, told.output
    for name in ("rank 8, all", "attention-r4", "merged weights", "page pool"):
        assert name in told.output


def test_memory_that_the_weights_do_not_fit_into_fails_without_a_table_of_adapters(
    checkpoint: Path,
) -> None:
    asked = ["capacity", "--model", str(checkpoint), "--memory", "0.0001"]
    told = CliRunner().invoke(cli.app, asked)
    assert told.exit_code == 1, told.output
    assert "the weights alone do not fit" in told.output
    assert "an adapter of" not in told.output
