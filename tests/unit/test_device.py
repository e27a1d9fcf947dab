"""Tests of devices: the option `device`, errors for a missing device, and uploads."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from vlora.config import load_options
from vlora.engine.parts import engine_device
from vlora.errors import InvalidArgument
from vlora.memory import device as devices
from vlora.memory.device import HOST, CudaDevice, open_device, upload
from vlora.memory.kv_cache import KVCache, page_bytes


def _options(folder: Path, **keys: object) -> Path:
    path = folder / "model.json"
    path.write_text(json.dumps({"model": ".", **keys}))
    return path


@pytest.mark.parametrize("name", ["cpu", "auto", "cuda", "cuda:0", "cuda:17"])
def test_valid_devices_are_read(tmp_path: Path, name: str) -> None:
    assert load_options(_options(tmp_path, device=name), {}).device == name
    assert load_options(_options(tmp_path), {}).device == "cpu"


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CPU", ""])
def test_other_devices_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="it must be cpu, cuda, cuda:N"):
        load_options(_options(tmp_path, device=name), {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_there_is_an_error_that_says_so(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'device' = '{name}', but (torch|this machine)"):
        open_device(name)
    assert open_device("auto") is HOST
    assert open_device("cpu") is HOST


def test_reasons_against_a_gpu_are_checked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in str(devices.why_no_gpu("auto"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.why_no_gpu("cuda") == "this machine has no GPU that torch can use"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.why_no_gpu("cuda:2") == "this machine has 2 GPUs, numbered from 0"
    found = Mock(side_effect=ImportError("No module named 'triton'"))
    monkeypatch.setattr(devices.importlib, "import_module", found)
    assert "'triton', in which the GPU kernels are written" in str(devices.why_no_gpu("cuda:1"))
    found.side_effect = None
    assert devices.why_no_gpu("cuda:1") is None


def test_a_gpu_serves_no_quantized_weights_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Mock(CudaDevice)
    gpu.name = "cuda:1"
    monkeypatch.setattr("vlora.engine.parts.open_device", lambda name: gpu)
    options = load_options(_options(tmp_path, device="cuda:1"), {})
    assert engine_device(options) is gpu
    with pytest.raises(InvalidArgument, match="quantized weights are only served on the CPU"):
        engine_device(options, quantized=True)
    on_auto = load_options(_options(tmp_path, device="auto"), {})
    assert engine_device(on_auto, quantized=True) is HOST


def test_uploads_keep_types_shapes_and_values() -> None:
    tensors = [
        torch.arange(5),
        torch.empty(0, 7, dtype=torch.int32),
        torch.randn(3, 2).T,
        torch.tensor([1.5], dtype=torch.float64),
        torch.tensor([True, False, True]),
    ]
    uploaded = upload(tensors, torch.device("cpu"))
    for before, after in zip(tensors, uploaded, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)
        assert after.data_ptr() % devices.ALIGNMENT == 0
    tensors[0][0] = 99
    assert uploaded[0][0] == 0


def test_pages_of_a_gpu_are_rows() -> None:
    device = Mock(wraps=HOST, page_layout="rows")
    cache = KVCache(3, 2, 5, 2, 24, torch.bfloat16, device)
    keys, values = cache.rows(1)
    assert keys.shape == values.shape == (3, 2, 5, 32)
    assert cache.page_bytes == page_bytes(2, 5, 2, 24, torch.bfloat16, "rows") == 2 * 2 * 2 * 5 * 64
    values[1, 1, 4, 23] = torch.inf
    assert cache.is_finite([0, 2])
    assert not cache.is_finite([1])
