"""Tests of the comparison with other systems, of which only PEFT is installed everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import llava
from benchmarks.frame import command_line
from benchmarks.peers import summarize
from benchmarks.peers.checkpoints import gguf_name, permuted

TINY = llava.tiny(llava.Sizes(layers=2, kv_heads=16, context=512))
OPTIONS = {"quantization": "int8-dynamic", "dtype": "float32", "max_num_batched_tokens": 1024}


def test_an_unknown_peer_is_refused() -> None:
    result = CliRunner().invoke(command_line("peers"), ["--peer", "OpenVINO"])
    assert result.exit_code == 2
    assert "OpenVINO int8" in " ".join(result.output.replace("│", "").split())


def test_the_summary_compares_with_the_best_peer() -> None:
    overs = {"ours int8": 1.0, "OpenVINO int8": 0.8, "PEFT mixed": 0.5, "vLLM": None}
    rows = [{"requests": 4, "adapters": 0, "system": n, "over": v} for n, v in overs.items()]
    expected = {"over_OpenVINO int8_4_0": 0.8, "over_PEFT mixed_4_0": 0.5, "over_best_4_0": 0.8}
    assert summarize(rows) == expected | {"refused_4_0": 1}


def test_names_and_rows_are_those_of_gguf() -> None:
    assert gguf_name("model.layers.3.self_attn.o_proj.weight") == "blk.3.attn_output.weight"
    assert gguf_name("lm_head.weight") == "output.weight"
    weight = torch.arange(16.0).view(8, 2)  # Two heads of four values.
    ordered = permuted(weight, 2)
    assert ordered[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]
    assert torch.equal(permuted(ordered, 2, back=True), weight)


@pytest.mark.slow
@pytest.mark.usefixtures("_restore_threads")
def test_a_later_run_measures_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llava, "MODELS", {"whole": TINY})
    grid, out = tmp_path / "grid.json", tmp_path / "out.json"
    systems = {
        "ours int8": ["vlora_engine", [OPTIONS]],
        "PEFT mixed": ["peft_mixed", [{"dtype": "float32"}]],
        "broken": ["peft_mixed", [{"dtype": "no_such_type"}]],
    }
    values = {"requests": [2], "adapters": [0, 4], "repeats": 1, "searched": 0, "checked": 2}
    grid.write_text(json.dumps(values | {"systems": systems}))
    common = ["--grid", str(grid), "--json", str(out), "--threads", "1", "--root", str(tmp_path)]
    for peers, rows in (("PEFT mixed", 4), ("PEFT mixed,broken", 8)):
        result = CliRunner().invoke(command_line("peers"), [*common, "--peer", peers])
        assert result.exit_code == 0, result.output
        written = json.loads(out.read_text())
        assert len(written["rows"]) == rows
    for row in written["rows"]:
        if row["system"] == "broken":
            assert "no_such_type" in row["cannot"]
        else:
            assert row["largest_gap"] < 0.1, row
    assert {"over_best_2_0", "over_PEFT mixed_2_2"} <= set(written["summary"])
