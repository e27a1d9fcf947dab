"""Tests of an engine on a real GPU, which `make gpu` runs; they are skipped without one."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.engine_client import answers
from tests.support.gpu_engines import (
    answers_of_loop,
    every_request,
    logits_of_fixed_tokens,
    small_options,
)
from vlora.atmm import op
from vlora.config import Options
from vlora.device.cuda import MAX_LOADS, CudaDevice
from vlora.device.device import Load
from vlora.engine.engine import Engine
from vlora.vision.encoder import VisionEncoder
from vlora.vision.images import DecodedImage

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # Without the compiled core, the CPU's engine uses torch. Without ATMM for CUDA, so does LoRA.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture
def options(checkpoint: Path, adapters_dir: Path) -> Options:
    return small_options(checkpoint, adapters_dir)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("policy", ["unmerge_only", "paper"])
def test_answers_of_a_gpu_equal_the_cpus(options: Options, policy: str, eager: bool) -> None:
    options = replace(options, policy=policy, enforce_eager=eager)
    on_cpu = Engine(options)
    expected = answers(on_cpu, every_request(on_cpu))
    engine = Engine(replace(options, device="cuda"))
    assert answers(engine, every_request(engine)) == expected
    if eager:
        assert engine.stats().graphs_replayed == 0
    elif op.captures(torch.device("cuda")):
        # Without ATMM for CUDA, steps with adapters have no graph, so perhaps no step has one.
        assert engine.stats().graphs_replayed > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logits_of_a_gpu_are_the_cpus_within_rounding(options: Options, dtype: str) -> None:
    """Compute prompts and decoding rows of the base model, an adapter and a merged adapter."""
    expected = logits_of_fixed_tokens(Engine(options))
    actual = logits_of_fixed_tokens(Engine(replace(options, device="cuda", dtype=dtype)))
    bound = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-1}[dtype]
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one.cpu() - other).abs().max() < bound * other.abs().max()


def test_another_thread_computes_on_the_last_gpu(options: Options) -> None:
    on_cpu = Engine(options)
    expected = answers(on_cpu, every_request(on_cpu))
    last = torch.cuda.device_count() - 1
    engine = Engine(replace(options, device=f"cuda:{last}"))
    tokens = answers_of_loop(engine, every_request(on_cpu))
    assert tokens == {name: tokens for name, (tokens, _) in expected.items()}


def test_graphs_can_be_captured_after_all_were_discarded() -> None:
    gpu = CudaDevice(0)
    weight = torch.randn(64, 64, device="cuda")
    out = torch.empty(4, 64, device="cuda")
    rows = torch.randn(4, 64, device="cuda")
    for _ in range(3):
        torch.mm(rows, weight, out=out)
        expected = out.clone()
        graph = gpu.capture(lambda: torch.mm(rows * 1, weight, out=out))
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
        del graph
        torch.cuda.empty_cache()


def test_work_that_cannot_be_captured_leaves_the_stream_as_it_was() -> None:
    gpu = CudaDevice(0)
    number = torch.ones(1, device="cuda")
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        gpu.capture(lambda: number.item())
    assert torch.cuda.current_stream() == before
    assert gpu.read_back([number + 1]).get()[0].item() == 2
    # Later captures succeed, and torch uses memory again that two streams have used.
    gpu.capture(lambda: number.add_(1)).replay()
    assert number.item() == 2
    held = torch.cuda.memory_reserved()
    for _ in range(20):
        gpu.load([torch.ones(8 << 20)]).wait()
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= held + (128 << 20)


def _sleep_before_loads(gpu: CudaDevice) -> None:
    """Let the stream of loads wait for about 0.1 s before its next copy."""
    with torch.cuda.stream(gpu._load_stream):
        torch.cuda._sleep(200_000_000)


def _prepare_memory_of_loads(gpu: CudaDevice, sources: list[torch.Tensor], count: int) -> None:
    """Let `count` loads allocate nothing, and find NaN in their memory until they are copied."""
    pinned = [gpu.load(sources) for _ in range(count)]
    torch.cuda.synchronize()
    del pinned
    torch.cuda.empty_cache()
    size = count * sum(source.numel() for source in sources)
    with torch.cuda.stream(gpu._load_stream):
        held = torch.full((size,), torch.nan, device="cuda")
    torch.cuda.synchronize()
    del held


@pytest.mark.parametrize("waits", [True, False])
def test_work_that_waits_for_a_late_load_finds_its_copy(waits: bool) -> None:
    """Delay each copy. Without `wait`, the same work must find NaN, so this test can fail."""
    gpu = CudaDevice(0)
    sources = [torch.randn(256, 1024), torch.randn(512, 256)]
    # The first product loads a kernel, which takes long.
    torch.mm(*(torch.zeros_like(source, device="cuda") for source in reversed(sources)))
    _prepare_memory_of_loads(gpu, sources, MAX_LOADS // 2)
    loads: list[Load] = []
    products: list[torch.Tensor] = []
    for _ in range(MAX_LOADS // 2):
        _sleep_before_loads(gpu)
        loads.append(gpu.load(sources))
        if waits:
            loads[-1].wait()
        a, b = loads[-1].tensors
        products.append(b @ a)
    for product in products:
        if waits:
            expected = sources[1] @ sources[0]
            torch.testing.assert_close(product.cpu(), expected, rtol=1e-3, atol=1e-2)
        else:
            assert product.isnan().all()


def test_adapters_are_loaded_from_another_thread_while_the_gpu_computes() -> None:
    """Start more loads than may be under way, each of them late."""
    gpu = CudaDevice(0)
    sources = [[torch.randn(512, 1024), torch.randn(1024, 512)] for _ in range(2 * MAX_LOADS)]
    side = torch.randn(4096, 4096, device="cuda")
    loads: list[Load] = []

    def load_all() -> None:
        for tensors in sources:
            gpu.make_current()
            _sleep_before_loads(gpu)
            loads.append(gpu.load(tensors))

    for _ in range(50):
        side = torch.mm(side, side).clamp_(-1, 1)
    thread = threading.Thread(target=load_all)
    thread.start()
    thread.join()
    assert not gpu._loads[-1].query(), "the last loads are still under way"
    for load, tensors in zip(loads, sources, strict=True):
        load.wait()
        a, b = load.tensors
        torch.testing.assert_close((b @ a).cpu(), tensors[1] @ tensors[0], rtol=1e-3, atol=1e-2)


def test_the_encoder_gives_the_cpus_features(checkpoint: Path) -> None:
    pixels = torch.randint(0, 255, (60, 80, 3), dtype=torch.uint8).numpy()
    image = DecodedImage(pixels)
    (expected,) = VisionEncoder(checkpoint, 1).encode([image])
    encoder = VisionEncoder(checkpoint, 1, device=CudaDevice(0, 0.5))
    found: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: found.extend(map(torch.from_numpy, encoder.encode([image])))
    )
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0], torch.from_numpy(expected), rtol=2e-3, atol=2e-3)
