"""Tests of devices: the option `device`, errors for a missing device, and uploads."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.fake_device import FakeDevice, fake_gpu
from vlora.config import Options, load_options
from vlora.device import host_memory
from vlora.device.cuda import CudaDevice
from vlora.device.device import ALIGNMENT, HOST, upload
from vlora.engine.capacity import merge_factor_bytes
from vlora.engine.engine import Engine
from vlora.engine.parts import engine_device
from vlora.errors import InvalidArgument, OutOfMemory
from vlora.memory.kv_cache import KVCache, page_bytes
from vlora.model.switcher import MAX_PREPARED
from vlora.vision.encoder import VisionEncoder
from vlora.vision.images import DecodedImage


def _options(folder: Path, **keys: object) -> Path:
    path = folder / "model.json"
    path.write_text(json.dumps({"model": ".", **keys}))
    return path


@pytest.fixture
def options(checkpoint: Path, adapters_dir: Path) -> Options:
    return Options(model=checkpoint, adapters=adapters_dir, kv_cache_tokens=1024)


def test_valid_devices_are_read_and_others_refused(tmp_path: Path) -> None:
    assert load_options(_options(tmp_path), {}).device == "cpu"
    for name in ("cpu", "auto", "cuda", "cuda:0", "cuda:17"):
        assert load_options(_options(tmp_path, device=name), {}).device == name
    for name in ("gpu", "cuda:", "cuda:-1", "cuda:x", "CPU", ""):
        with pytest.raises(InvalidArgument, match="it must be cpu, cuda, cuda:N"):
            load_options(_options(tmp_path, device=name), {})


def test_a_gpu_serves_no_quantized_weights_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Mock(CudaDevice)
    gpu.name = "cuda:1"
    monkeypatch.setattr("vlora.engine.parts.open_device", lambda name, share: gpu)
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
        assert after.data_ptr() % ALIGNMENT == 0
    tensors[0][0] = 99
    assert uploaded[0][0] == 0


def test_an_upload_into_given_memory_keeps_its_addresses() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    for values in ([1, 2, 3], [4, 5, 6]):
        tensors = [torch.tensor(values), torch.tensor(values[:2], dtype=torch.int32)]
        uploaded = upload(tensors, torch.device("cpu"), memory)
        assert [part.data_ptr() - memory.data_ptr() for part in uploaded] == [0, 32]
        assert all(map(torch.equal, uploaded, tensors))
    with pytest.raises(ValueError, match="112 bytes does not fit 64"):
        upload([torch.zeros(10)] * 2 + [torch.zeros(1)], torch.device("cpu"), memory)


def test_the_encoder_computes_on_its_device_on_any_thread(checkpoint: Path) -> None:
    encoder = VisionEncoder(checkpoint, 1, device=(gpu := FakeDevice()))
    image = DecodedImage(np.zeros((32, 32, 3), np.uint8))
    thread = threading.Thread(target=encoder.encode, args=([image],))
    thread.start()
    thread.join()
    assert len(gpu.threads) == 2


def test_memory_for_the_factors_of_two_merges_is_kept(options: Options) -> None:
    with fake_gpu() as gpu:
        engine = Engine(replace(options, policy="paper"))
        factors = merge_factor_bytes(engine.adapters)
        largest = sorted(
            sum(
                pair.a.nbytes + pair.b.nbytes
                for pair in engine.adapters.slots.adapter(slot).pairs.values()
            )
            for slot in engine.adapters.resident
        )[-2:]
        assert sum(largest) <= factors < sum(largest) + 10_000
        gpu.memory = left = 1 << 30
        engine = Engine(replace(options, policy="paper"))
        assert engine.switcher.memory == left - factors
        # Preparing a merge copies A and B, so only those of the last merge and of this one stay.
        for slot in sorted(engine.adapters.resident)[:3]:
            engine.switcher.switch(slot)
            assert slot in engine.switcher._prepared
            assert len(engine.switcher._prepared) <= MAX_PREPARED


def test_float16_needs_a_gpu(checkpoint: Path) -> None:
    says = "'dtype' = 'float16' cannot be used on device 'cpu', which supports float32, bfloat16; "
    for device in ("cpu", "auto"):
        with pytest.raises(InvalidArgument, match=says):
            Engine(Options(model=checkpoint, dtype="float16", device=device))
    with pytest.raises(InvalidArgument, match=says):
        VisionEncoder(checkpoint, 1, torch.float16)
    encoder = VisionEncoder(checkpoint, 1, torch.float16, FakeDevice())
    assert {tensor.dtype for tensor in encoder._model.state_dict().values()} == {torch.float32}


def test_an_engine_that_does_not_fit_its_gpu_says_what_needs_how_much(options: Options) -> None:
    mib = 1 << 20
    with fake_gpu() as gpu:
        gpu.memory = 10 * mib
        with pytest.raises(OutOfMemory) as raised:
            Engine(options)
        found = re.fullmatch(
            r"device 'fake' has 10\.0 MiB left, but (\d+\.\d) MiB are needed: weights (\S+) MiB,"
            r" pages for keys, values and adapters (\S+) MiB, adapters (\S+) MiB,"
            r" the largest step (\S+) MiB; raise 'engine_memory_share', or reduce .*",
            str(raised.value),
        )
        assert found is not None, raised.value
        needed, *parts = map(float, found.groups())
        assert needed == pytest.approx(sum(parts), abs=0.3)
        gpu.memory = int((needed + 0.1) * mib)
        engine = Engine(options)
        stored = engine.slab.nbytes + engine.memory.kv_cache.cache.nbytes
        assert stored < (parts[0] + parts[1]) * mib


def test_an_encoder_that_does_not_fit_its_gpu_says_so(checkpoint: Path) -> None:
    gpu = FakeDevice()
    gpu.memory = 1000
    with pytest.raises(OutOfMemory, match=r"vision tower .* MiB; raise 'encoder_memory_share'"):
        VisionEncoder(checkpoint, 1, device=gpu)


def test_without_memory_for_merged_weights_no_adapter_is_merged(
    options: Options, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(options, policy="predictive")
    with fake_gpu():
        engine = Engine(options)
        # A GPU commits memory at once, so a whole slab is needed, and it is allocated at the start.
        assert engine.switcher.merged_bytes == engine.slab.nbytes
        assert engine.switcher._merged is not None
        allocated, zeros = [engine.slab.base.numel()], FakeDevice.zeros

        def only_once(self: FakeDevice, *shape: int, dtype: torch.dtype) -> torch.Tensor:
            if list(shape) == allocated and shape in seen:
                raise OutOfMemory("too little is left")
            seen.add(shape)
            return zeros(self, *shape, dtype=dtype)

        seen: set[tuple[int, ...]] = set()
        monkeypatch.setattr(FakeDevice, "zeros", only_once)
        engine = Engine(options)
    assert not engine.switcher.can_merge(engine.adapters.slot("all-r8"))
    assert "no adapter is merged: too little is left" in caplog.text


def test_whether_pages_are_finite_is_read_at_once() -> None:
    """Each number that the host reads from a GPU is a wait, and so is each copy to the host."""
    cache = KVCache(4, 2, 5, 2, 24)
    reads: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            reads.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    cache.cache[2, 1, 0, 0, 0, 3] = torch.nan
    with Reads():
        assert cache.is_finite([0, 1, 3])
        assert not cache.is_finite([1, 2])
        assert cache.is_finite([])
    assert reads.count("_local_scalar_dense") == 0
    assert reads.count("aminmax") == 5
    assert reads.count("stack") == 2


def test_pages_of_a_gpu_are_rows() -> None:
    device = Mock(wraps=HOST, page_layout="rows")
    cache = KVCache(3, 2, 5, 2, 24, torch.bfloat16, device)
    keys, values = cache.rows(1)
    assert keys.shape == values.shape == (3, 2, 5, 32)
    assert cache.page_bytes == page_bytes(2, 5, 2, 24, torch.bfloat16, "rows") == 2 * 2 * 2 * 5 * 64
    values[1, 1, 4, 23] = torch.inf
    assert cache.is_finite([0, 2])
    assert not cache.is_finite([1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_start_on_a_huge_page_and_keep_their_memory_alive(dtype: torch.dtype) -> None:
    zeros = host_memory.hugepage_zeros(3, 5, 7, dtype=dtype)
    assert zeros.shape == (3, 5, 7)
    assert zeros.dtype == dtype
    assert zeros.is_contiguous()
    assert zeros.data_ptr() % host_memory.PAGE == 0
    assert not zeros.any()
    last = zeros[-1]
    del zeros
    last.fill_(1)
    assert last.sum() == 35
