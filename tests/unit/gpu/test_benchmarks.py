"""Tests of the benchmarks of steps and of the engine on a fake GPU, with interpreted kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import engine, gpu_device, llava, loads
from benchmarks.frame import command_line
from tests.support.fake_device import FakeDevice, fake_gpu
from vlora.device.device import Device
from vlora.vision.encoder import VisionEncoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("launch", "cuda_operator")]

TINY = llava.tiny(llava.Sizes(layers=2, kv_heads=16, context=512, adapters=2))


def _run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, grid: dict[str, Any], *more: str
) -> tuple[dict[str, Any], FakeDevice]:
    """Run a benchmark on the tiny model; return its figures and the device."""
    limits = gpu_device.GpuLimits(1e10, 1e11, 1e11)
    monkeypatch.setattr(gpu_device, "measure_limits", lambda device: limits)
    monkeypatch.setattr(llava, "MODELS", {"whole": TINY})
    file, out = folder / "grid.json", folder / "figures.json"
    file.write_text(json.dumps(grid))
    arguments = ["--quick", "--device", "cuda", "--dtypes", "fp32", "--grid", str(file), *more]
    arguments += ["--root", str(folder), "--json", str(out)]
    with fake_gpu() as device:
        result = CliRunner().invoke(command_line(name), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written: dict[str, Any] = json.loads(out.read_text())
    assert written["meta"]["device"] == "cuda"
    return written, device


def test_steps_are_measured_without_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = {"phase": "decode", "rows": [2], "contexts": [20], "adapters": [0, 2]}
    prefill = {"phase": "prefill", "rows": [8], "contexts": [0], "adapters": [0]}
    groups = [group | {"models": ["whole"], "quick": {}} for group in (decode, prefill)]
    written, device = _run(tmp_path, monkeypatch, "step", {"groups": groups}, "--threads", "1")
    assert [row["phase"] for row in written["rows"]] == ["decode", "prefill"]
    for row in written["rows"]:
        assert row["shares"] == {}
        assert row["python"] is None
        assert row["gb_per_s"] == 10.0
    summary = written["summary"]
    assert summary["decode_fp32"] is not None
    assert summary["prefill_fp32"] is not None
    assert summary["elsewhere"] is summary["busy_neighbour"] is None
    assert device.graph_events.count("replay") > device.graph_events.count("capture") > 1


def test_requests_with_images_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "OUTPUT", 2)
    monkeypatch.setattr(loads, "OUTPUT", 2)
    devices: list[Device] = []

    def encoder(*arguments: Any) -> VisionEncoder:
        """Return an encoder in host memory: torch's modules cannot be moved to the fake device."""
        devices.append(arguments[3])
        return VisionEncoder(*arguments[:3])

    monkeypatch.setattr(engine, "VisionEncoder", encoder)
    grid = {"kinds": ["text", "image"], "adapters": [2], "repeats": 1, "requests": 2, "quick": {}}
    options = ["--no-served", "--threads", "1"]
    written, device = _run(tmp_path, monkeypatch, "engine", grid, *options)
    assert [row["requests"] for row in written["rows"]] == [2, 2]
    assert devices == [device]
    assert device.events.count("upload") > 4
