"""Random problems for the LoRA operator, and their results in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, cast

import pytest
import torch

from csrc.atmm.cuda.build import NoToolchain, emulate
from vlora import native
from vlora.atmm import op, tiles
from vlora.atmm.cuda.library import Library
from vlora.atmm.cuda.operator import Operator, current
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segment
from vlora.backends import Backend

FP32, BF16 = torch.float32, torch.bfloat16


class Form(NamedTuple):
    """Types of a call: that of the adapters, and that of x and y."""

    dtype: torch.dtype
    rows: torch.dtype

    def randn(self, *shape: int) -> torch.Tensor:
        """Return random rows of x or y."""
        return torch.randn(shape).to(self.rows)


FORMS = [Form(FP32, FP32), Form(BF16, BF16), Form(BF16, FP32)]
each_form = pytest.mark.parametrize("form", FORMS)

MULTIPLY_PAIRS = ("twin", "avx512_bf16", "amx")
"""Instruction sets that round fp32 rows to bf16 before multiplying."""

EMULATED, CUDA = "cuda-emulated", "cuda"


FORCED = os.environ.get("VLORA_ISA")
"""Instruction sets that `make test-isas` forces; None if the tests run with each set."""


def isas() -> list[str]:
    """Return the instruction sets of this CPU and the plain C++ twin of AMX; none without the core.

    They are sorted by name, because each worker must find the tests in the same order, and
    `tiles.isas()` orders them by a measurement.
    """
    try:
        return [FORCED] if FORCED else [*sorted(tiles.isas()), "twin"]
    except ImportError:
        return []


def implementations() -> list[str]:
    """Return the names of all implementations: the reference, those of this CPU, the CUDA kernels
    emulated on the host and, if there is a GPU, those on the GPU. `make test-isas` runs only what
    it forces."""
    if FORCED:
        return isas()
    return ["reference", *isas(), EMULATED, *([CUDA] if torch.cuda.is_available() else [])]


def emulation() -> Library:
    """Return the CUDA kernels compiled for the host; skip the test without a C++ compiler."""
    try:
        return Library(emulate())
    except NoToolchain as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def emulated() -> Operator:
    """Return the operator of the CUDA kernels that are compiled for the host."""
    return Operator(emulation(), torch.device("cpu"))


@pytest.fixture(scope="module", params=["emulated", "cuda"])
def operator(request: pytest.FixtureRequest) -> Operator:
    """Return the operator of the emulated kernels, and that of a GPU if there is one."""
    if request.param == "emulated":
        return cast(Operator, request.getfixturevalue("emulated"))
    try:
        return current()
    except ImportError as error:
        pytest.skip(str(error))


compiled = pytest.mark.skipif(not isas(), reason="the compiled core was not built")


def group_of(
    d_in: int, d_outs: Sequence[int], ranks: Sequence[int | None], dtype: torch.dtype = FP32
) -> LoraGroup:
    """Return a group of random pairs that keep values near 1. A rank of None means no pair."""
    group = LoraGroup(d_in, d_outs, dtype)
    for rank in ranks:
        group.append(
            [
                LoraPair(
                    (torch.randn(rank, d_in) / d_in**0.5).to(dtype),
                    (torch.randn(d_out, rank) / rank**0.5).to(dtype),
                )
                if rank
                else None
                for d_out in d_outs
            ]
        )
    return group


class Pairs(Protocol):
    """Adapters of projections: a group, or what stands for one on a GPU.

    pairs: the pair of each slot, by projection.
    """

    @property
    def d_outs(self) -> Sequence[int]: ...
    @property
    def pairs(self) -> Sequence[Sequence[LoraPair | None]]: ...


def expected(
    y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: Pairs
) -> torch.Tensor:
    """Return the result in float64, following the operator's semantics."""
    result = y.double().clone()
    column = 0
    for d_out, pairs in zip(group.d_outs, group.pairs, strict=True):
        for segment in segments:
            pair = pairs[segment.slot]
            if pair is not None:
                rows = slice(segment.start, segment.start + segment.length)
                low = x[rows].double() @ pair.a.double().T
                result[rows, column : column + d_out] += segment.sign * low @ pair.b.double().T
        column += d_out
    return result


def tolerance_of(backend: Backend, dtype: torch.dtype, rows_dtype: torch.dtype) -> float:
    """Return the relative and absolute tolerance for adapters and rows of these types."""
    rounding = backend == "cuda" or (
        backend == "cpu" and tiles.current_isa("bf16") in MULTIPLY_PAIRS
    )
    exact = dtype == FP32 or (rows_dtype == FP32 and not rounding)
    # bf16: the intermediate and the sum are each rounded to 8 bits.
    return 2e-5 if exact else 4e-2


def check(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    group: LoraGroup,
    backend: Backend,
    **options: int,
) -> None:
    """Compare `op.apply` with `expected`. Check that rows outside all segments are unchanged."""
    desired = expected(y, x, segments, group)
    # A clone of strided or unaligned rows would be neither.
    memory = y.untyped_storage().clone()
    actual = y.new_empty(0).set_(memory, y.storage_offset(), y.size(), y.stride())
    op.apply(actual, x, segments, group, backend=backend, **options)
    tolerance = tolerance_of(backend, group.dtype, y.dtype)
    torch.testing.assert_close(actual.double(), desired, rtol=tolerance, atol=tolerance)
    untouched = torch.ones(len(y), dtype=torch.bool, device=y.device)
    for segment in segments:
        untouched[segment.start : segment.start + segment.length] = False
    assert torch.equal(actual[untouched], y[untouched])


@contextmanager
def pinned(name: str | None = None) -> Iterator[None]:
    """Use one tile for every shape, by default the built-in one, while the context is open.

    All sums then have the same order, so a row's output is bit-identical in any batch.
    """
    core = native.kernels().atmm
    before = core.pin(name or "default")
    try:
        yield
    finally:
        core.pin(before)


def counters() -> dict[str, int]:
    """Return the counts of look-ups in the tile table by outcome since the last reset.

    `hits` found their bucket, `misses` used the nearest bucket of the table, and `defaults` the
    built-in configuration, because the table has no entry for the operation and dtype.
    """
    return cast(dict[str, int], native.kernels().atmm.counters())


def reset_counters() -> None:
    native.kernels().atmm.reset_counters()
