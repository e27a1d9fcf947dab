"""Tests of the step benchmark: its arithmetic, and a run of a tiny grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import llava, step
from benchmarks.frame import command_line
from benchmarks.models import MODEL_TYPES, ChunkWork, SyntheticModel, slab_elements, step_work

KEYS = {
    *("decode_fp32", "decode_bf16", "prefill_fp32", "prefill_bf16"),
    *("lora_cost_1", "lora_cost_16", "lora_cost_1_over_bytes", "lora_cost_16_over_bytes"),
    *("elsewhere", "repeated", "python", "busy_neighbour"),
}
TINY = llava.tiny(llava.Sizes(layers=2, kv_heads=16, context=128))


def test_the_bytes_of_a_step_are_those_of_a_real_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    checkpoint = llava.make(TINY, tmp_path)
    stored = load_file(checkpoint.folder / "model.safetensors")
    matrices = sum(
        tensor.numel()
        for name, tensor in stored.items()
        if tensor.dim() == 2 and "vision" not in name and "projector" not in name
    )
    work = step_work([ChunkWork(1, 7, adapter=0)], TINY, 2)
    embedding = TINY.vocabulary * TINY.hidden
    assert work.weights == 2 * (matrices - embedding)
    adapter = load_file(
        checkpoint.adapters / checkpoint.adapter_names[0] / "adapter_model.safetensors"
    )
    assert work.adapters == sum(tensor.nbytes for tensor in adapter.values())
    assert work.kv == 2 * (7 + 2) * 2 * TINY.hidden * TINY.layers


def test_an_adapter_counts_once_for_any_number_of_rows() -> None:
    single = step_work([ChunkWork(1, 7, adapter=3)], TINY, 4)
    shared = step_work([ChunkWork(1, 7, adapter=3)] * 5, TINY, 4)
    assert shared.adapters == single.adapters > 0
    assert shared.weights == single.weights
    assert shared.kv == 5 * single.kv
    assert shared.flops == pytest.approx(5 * single.flops)


def test_only_rows_with_logits_count_beyond_the_last_layers_keys_and_values() -> None:
    five = [ChunkWork(5, 0)]
    without_logits = [ChunkWork(5, 0, logits=False)]
    hidden, inner = TINY.hidden, TINY.inner
    skipped = 2 * (2 * hidden**2 + 3 * hidden * inner)  # q, o, gate, up, down of a row
    attention = 4 * hidden * 5  # products with five keys and with their values
    lm_head = 2 * TINY.vocabulary * hidden
    difference = step_work(five, TINY, 4).flops - step_work(without_logits, TINY, 4).flops
    assert difference == skipped + attention + lm_head


def test_a_prompt_of_n_words_has_n_tokens_and_the_begin_of_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    checkpoint = llava.make(TINY, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    text = llava.prompt(31, 5, TINY)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 32
    assert tokenizer.decode(ids[1:]) == text
    odd = "An odd text: wörld, <3!"
    assert tokenizer.decode(tokenizer(odd)["input_ids"][1:]) == odd


def test_a_checkpoint_is_generated_once_and_with_the_same_bytes_everywhere(tmp_path: Path) -> None:
    first, second = llava.make(TINY, tmp_path / "a"), llava.make(TINY, tmp_path / "b")
    weights = "model.safetensors"
    assert (first.folder / weights).read_bytes() == (second.folder / weights).read_bytes()
    before = (first.folder / weights).stat().st_mtime_ns
    llava.make(TINY, tmp_path / "a")
    assert (first.folder / weights).stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["int8", "int4-bf16"])
def test_the_bytes_of_quantized_weights_are_those_that_the_engine_holds(
    name: str, tmp_path: Path
) -> None:
    checkpoint, kind = llava.make(TINY, tmp_path), MODEL_TYPES[name]
    model = SyntheticModel(checkpoint, name, kv_tokens=64, max_rows=16, adapters=False)
    work = step_work([ChunkWork(1, 7)], TINY, kind.itemsize, kind.form)
    lm_head = TINY.vocabulary * (TINY.hidden + 4)
    held = sum(view.nbytes for view in model.engine.slab.views)
    assert work.weights - lm_head == held < kind.itemsize * slab_elements(TINY)


def run_of(
    root: Path, monkeypatch: pytest.MonkeyPatch, groups: list[dict[str, Any]], *options: str
) -> dict[str, Any]:
    """Return the figures of a run of the tiny model with this grid."""
    monkeypatch.setattr(llava, "MODELS", {"whole": TINY})
    monkeypatch.setattr(step, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(step, "MULTIPLY_ROUNDS", 1000)
    monkeypatch.setattr(step, "QUICK", (3, 0.01))
    monkeypatch.setattr(step, "TYPICAL_CONTEXT", 16)
    grid, out = root / "grid.json", root / "figures.json"
    grid.write_text(json.dumps({"groups": groups}))
    arguments = ["--quick", "--threads", "1", "--grid", str(grid), "--json", str(out)]
    result = CliRunner().invoke(command_line("step"), [*arguments, "--root", str(root), *options])
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def test_a_run_writes_all_summary_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"models": ["whole"], "adapters": [0, 1, 16], "quick": {}}
    groups = [
        {"phase": "decode", "rows": [1, 16], "contexts": [16], **both},
        {"phase": "prefill", "rows": [32], "contexts": [0], **both},
    ]
    written = run_of(tmp_path, monkeypatch, groups)
    assert set(written["summary"]) == KEYS
    assert all(value is not None for value in written["summary"].values())
    assert len(written["rows"]) == 6
    for row in written["rows"]:
        assert set(row["ms"]) == {"0", "1", "16"}
        assert row["shares"]["0"]["products"] > 0
        assert row["shares"]["0"]["attention"] > 0
        assert row["shares"]["0"]["lora"] == 0 < row["shares"]["16"]["lora"]


def test_quantized_types_have_a_figure_for_each_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = {"models": ["whole"], "adapters": [0, 1], "rows": [1, 4, 16], "quick": {}}
    groups = [{"phase": "decode", "contexts": [16], **cells}]
    written = run_of(tmp_path, monkeypatch, groups, "--dtypes", "int4,int8")
    assert [row["dtype"] for row in written["rows"]] == ["int8"] * 3 + ["int4"] * 3
    summary = written["summary"]
    for name in ("int8", "int4"):
        assert all(summary[f"decode_{name}_{rows}"] > 0 for rows in (1, 4, 16))
    assert summary["decode_fp32"] is None


def test_an_unknown_type_is_refused_with_the_valid_ones() -> None:
    result = CliRunner().invoke(command_line("step"), ["--dtypes", "int2"])
    assert result.exit_code == 2
    assert "int4-bf16" in result.output
