"""Tests of the memory plan against the memory that an engine allocates."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from vlora import cli
from vlora.config import Options
from vlora.engine import capacity
from vlora.engine.engine import Engine
from vlora.errors import InvalidArgument
from vlora.kernels.formats import Format
from vlora.model.decoder_config import load_config
from vlora.model.loader import load_weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_pages_adapters_and_weights_equal_those_of_an_engine(
    checkpoint: Path, adapters_dir: Path, dtype: str
) -> None:
    options = Options(model=checkpoint, adapters=adapters_dir, dtype=dtype, block_size=8)
    memory = 256 * 1024 * 1024
    plan = capacity.plan(options, {}, memory)
    engine = Engine(options)
    assert plan.page_bytes == engine.memory.kv_cache.page_bytes
    assert {cost.name: cost.pages for cost in plan.adapters} == {
        name: engine.adapters.tiers.pages_of(engine.adapters.handle(name))
        for name in engine.adapters.names()
    }
    assert engine.pool.adapter == plan.adapter_pages
    assert engine.adapters.tiers.host.used_bytes == plan.host_bytes
    assert plan.host_bytes == sum(cost.host_bytes for cost in plan.adapters)
    assert engine.slab.base.nbytes < plan.weights_bytes
    # The engine merges in huge pages, at most one more at each end of each group.
    assert plan.merged_bytes <= engine.switcher.merged_bytes
    assert plan.configured_pages == engine.pool.total
    assert plan.pages == (memory - plan.fixed_bytes) // plan.page_bytes
    sequences = plan.sequences(plan.adapter_pages)
    assert sequences * plan.sequence_pages + plan.adapter_pages <= plan.pages


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planned_memory_agrees_with_the_resident_memory_of_an_engine(
    checkpoint: Path, tmp_path: Path, dtype: str
) -> None:
    """The process runs within 10 % of the plan, and what the engine allocates within 15 %."""
    command = [sys.executable, "-m", "tests.programs.measure_engine", str(checkpoint), dtype]
    output = subprocess.check_output([*command, "60", str(tmp_path)], text=True)
    figures = json.loads(output.splitlines()[-1])
    assert figures["planned_host"] == figures["host"] > 50 << 20
    assert figures["planned"] == pytest.approx(figures["measured"], rel=0.10)
    assert figures["planned"] - figures["process"] == pytest.approx(figures["grown"], rel=0.15)


def test_host_copies_are_bounded_by_their_budget_unless_they_are_resident(
    checkpoint: Path, adapters_dir: Path
) -> None:
    options = Options(model=checkpoint, adapters=adapters_dir)
    every = capacity.plan(options, {}, 1 << 28)
    total = sum(cost.host_bytes for cost in every.adapters)
    bounded = replace(options, adapter_pool_bytes=0, adapter_host_bytes=total // 2)
    assert capacity.plan(bounded, {}, 1 << 28).host_bytes == total // 2
    resident = replace(options, adapter_host_bytes=1)
    assert capacity.plan(resident, {}, 1 << 28).host_bytes == total
    cost = every.adapters[0]
    left = every.sequences_beside(64, cost)
    assert left < every.sequences_beside(64, replace(cost, host_bytes=0))


def test_the_planned_weights_equal_the_loaded_ones(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_weights(checkpoint, config, dtype)
        loaded = [weights.slab.base, weights.embedding, weights.lm_head, weights.final_norm]
        loaded += [*weights.norms.values(), *weights.biases.values()]
        assert capacity.weights_bytes(config, dtype.itemsize) == sum(t.nbytes for t in loaded)


@pytest.mark.parametrize(
    "form",
    [
        Format(8, None),
        Format(8, None, dynamic=True),
        *(Format(4, n, zeros=True) for n in (32, 128)),
        Format(4, 64, zeros=True, dynamic=True),
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_planned_quantized_weights_equal_the_loaded_ones(
    tmp_path: Path, tied: bool, form: Format
) -> None:
    sizes = {"vocab_size": 301, "hidden_size": 96, "intermediate_size": 160}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "attention_bias": True}
    LlamaForCausalLM(LlamaConfig(**sizes, **layers, tie_word_embeddings=tied)).save_pretrained(
        tmp_path
    )
    config = load_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.bfloat16, form)
    loaded = [weights.slab.memory, weights.embedding, weights.lm_head, weights.final_norm]
    loaded += [*weights.norms.values(), *weights.biases.values()]
    assert capacity.weights_bytes(config, 2, form) == sum(t.nbytes for t in loaded)


def test_the_table_shows_the_cost_of_each_rank(checkpoint: Path, adapters_dir: Path) -> None:
    plan = capacity.plan(Options(model=checkpoint, adapters=adapters_dir), {}, 1 << 28)
    by_rank = [cost.packed_bytes for cost in plan.examples if cost.name.endswith("all")]
    assert by_rank == sorted(by_rank)
    options = Options(model=checkpoint, feature_cache_bytes=1 << 30)
    assert capacity.private_bytes() > 100 << 20
    others = capacity.others_bytes(options, 200 << 20)
    # An encoder and two smaller models of at least 100 MiB each besides the cache.
    assert (1 << 30) + (400 << 20) < others < (1 << 30) + (2000 << 20)
    alone, all_ = (capacity.plan(options, {}, 1 << 31, others_bytes=one) for one in (0, others))
    assert all_.fixed_bytes == alone.fixed_bytes + others
    assert by_rank[-1] > 4 * by_rank[0]
    result = CliRunner().invoke(
        cli.app,
        ["capacity", "--model", str(checkpoint), "--adapters", str(adapters_dir), "--memory", "64"],
    )
    assert result.exit_code == 0, result.output
    for name in (
        "rank 8, all",
        "attention-r4",
        "other processes",
        "merged weights",
        "host copies",
        "page pool",
    ):
        assert name in result.output


def test_too_little_memory_for_the_weights_fails_without_a_table_of_adapters(
    checkpoint: Path,
) -> None:
    arguments = ["capacity", "--model", str(checkpoint), "--memory", "0.0001"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1, result.output
    assert "nothing is left for pages" in result.output
    (row,) = (text for text in result.output.splitlines() if "- keys and values" in text)
    assert row.split()[4] == "0.0", "a size is never negative"
    found = re.search(r"must\s+be\s+at\s+least\s+([\d.]+)", result.output)
    assert found is not None, result.output
    enough = CliRunner().invoke(cli.app, [*arguments[:-1], found[1]])
    assert enough.exit_code == 0, enough.output
    assert "packed MiB" not in result.output


@pytest.mark.parametrize("pickles", [[], ["pytorch_model.bin"]], ids=["no weights", "pickles"])
def test_a_checkpoint_without_readable_weights_is_refused_as_by_the_loader(
    checkpoint: Path, tmp_path: Path, pickles: list[str]
) -> None:
    folder = shutil.copytree(
        checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*")
    )
    for name in pickles:
        (folder / name).touch()
    with pytest.raises(InvalidArgument) as refused:
        load_weights(folder, load_config(folder), torch.float32)
    result = CliRunner().invoke(cli.app, ["capacity", "--model", str(folder)])
    assert (result.exit_code, result.stderr) == (1, f"error: {refused.value}\n")
    assert ("save_pretrained" in result.stderr) == bool(pickles)
