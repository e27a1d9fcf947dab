"""The LoRA operator on one device: the three calls of `vlora.atmm.op`, which checks their
arguments.

fp32 uses the row kernels, which use no tensor cores and therefore no TF32. fp16 and bf16 use tile
kernels if all operands are aligned to 16 bytes, else the row kernels.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from vlora.atmm.cuda import library as c
from vlora.atmm.cuda.choice import KernelChoice, Shape, Table, built_in
from vlora.atmm.cuda.library import CudaError, Library
from vlora.atmm.cuda.segments import DeviceSegments, arrange
from vlora.atmm.cuda.tables import DeviceGroup, is_aligned
from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.atmm.types import Merges, MergeUpdate, Segment, Segments

log = logging.getLogger(__name__)

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
TABLES = Path(__file__).resolve().parents[1] / "tables"
EMULATED_MULTIPROCESSORS = 4


class DeviceFault(RuntimeError):
    """Raised if a kernel has skipped an invalid segment or adapter.

    The next `Operator.check` raises it, not the call that launched the kernel.
    """


class Operator:
    """The LoRA operator on one device, with one library. The emulation uses host memory.

    All calls share one workspace, so streams that run concurrently need one operator each.
    """

    def __init__(self, library: Library, device: torch.device) -> None:
        self.library, self.device = library, device
        self.multiprocessors = EMULATED_MULTIPROCESSORS
        self.name = "emulated"
        if not library.emulated:
            properties = torch.cuda.get_device_properties(device)
            self.multiprocessors = properties.multi_processor_count
            self.name = properties.name
        with self._here():
            library.warm_up()
        self.table = Table({})
        # Workspaces in device memory; the last one is in use. Captured graphs may still use the
        # earlier, smaller ones.
        self.workspaces = [torch.zeros(c.HEADER_BYTES, dtype=torch.uint8, device=device)]
        self._groups: WeakKeyDictionary[LoraGroup | HeadGroup, DeviceGroup] = WeakKeyDictionary()

    # ---- preparing ------------------------------------------------------------------------------

    def place(self, segments: Segments, arranged: DeviceSegments, on_device: torch.Tensor) -> None:
        """Register the device's copy of `arranged.tensor` for all later calls with `segments`."""
        segments.prepared[self] = replace(arranged, tensor=on_device)

    def segments(self, segments: Sequence[Segment]) -> DeviceSegments:
        """Return the segments on the device, in waves. Copy them unless that is done already."""
        prepared = Segments.of(segments).prepared
        if (arranged := prepared.get(self)) is None:
            arranged = arrange(self.library, segments)
            arranged = replace(arranged, tensor=arranged.tensor.to(self.device))
            prepared[self] = arranged
        assert isinstance(arranged, DeviceSegments)
        return arranged

    def group(self, group: LoraGroup | HeadGroup, *, update: bool = True) -> DeviceGroup:
        """Return the group's adapters on this device.

        update: whether to update the slots that have changed. Must be False in a capture: the graph
            would otherwise contain the transfers of this update.
        """
        on_device = self._groups.get(group)
        if on_device is None:
            on_device = DeviceGroup(
                group.d_in,
                [1] if isinstance(group, HeadGroup) else group.d_outs,
                torch.float32 if isinstance(group, HeadGroup) else group.dtype,
                self.device,
                keep=False,  # `group` keeps them.
            )
            self._groups[group] = on_device
        if on_device.version == group.version or not update:
            return on_device
        on_device.version = group.version
        for slot, version in enumerate(list(group.versions)):
            if on_device.versions.get(slot) != version:
                if isinstance(group, HeadGroup):
                    on_device.put_head(slot, group.heads[slot])
                else:
                    on_device.put(slot, [column[slot] for column in group.pairs])
                on_device.versions[slot] = version
        on_device.ready()
        return on_device

    def choose(
        self, y: torch.Tensor, x: torch.Tensor, segments: DeviceSegments, group: DeviceGroup
    ) -> KernelChoice:
        """Return the kernels for a call: those of the table if they fit, else `built_in`."""
        tensor_cores = group.dtype != torch.float32 and is_aligned(y, x, group.d_outs)
        sizes = (segments.longest, group.d_in, sum(group.d_outs), group.max_rank)
        shape = Shape(DTYPES[group.dtype], *sizes, len(segments), len(group.d_outs))
        choice = self.table.find(shape)
        if choice is None or (choice.shrink is not None and not tensor_cores):
            choice = built_in(shape, self.library, self.multiprocessors, tensor_cores=tensor_cores)
        return choice

    # ---- the calls of `op` ----------------------------------------------------------------------

    def apply(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        segments: DeviceSegments,
        group: DeviceGroup,
        choice: KernelChoice | None = None,
        *,
        heads: bool = False,
    ) -> None:
        """Launch `op.apply` or `op.heads` on the current stream. Raises CudaError if rejected."""
        self._check_device(y, x)
        if len(segments) == 0 or x.shape[0] == 0:
            return
        tiles = (choice or self.choose(y, x, segments, group)).on(self.library, DTYPES[group.dtype])
        first = 0
        # A call of the library has a maximum number of waves. If there are more, the stream runs
        # several calls in order.
        max_waves = 1 if heads else c.MAX_WAVES
        for wave in range(0, len(segments.ends), max_waves):
            ends = segments.ends[wave : wave + max_waves]
            call = self._call(y, x, segments, group, first, ends, heads)
            call.workspace_bytes = self.library.workspace_bytes(call, tiles)
            call.workspace = self._workspace(call.workspace_bytes).data_ptr()
            with self._here():
                self.library.apply(call, tiles, self._stream())
            first = ends[-1]

    def _call(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        segments: DeviceSegments,
        group: DeviceGroup,
        first: int,
        ends: Sequence[int],
        heads: bool,
    ) -> c.CallStruct:
        call = c.CallStruct(
            x=x.data_ptr(),
            ldx=x.stride(0),
            segments=segments.tensor.data_ptr() + first * ctypes.sizeof(c.SegmentStruct),
            rows=x.shape[0],
            d_in=group.d_in,
            slots=group.capacity,
            max_rank=group.max_rank,
            type=c.TYPES[DTYPES[group.dtype]],
            heads=int(heads),
            shortest=segments.shortest,
            longest=segments.longest,
            waves=len(ends),
            projection_count=len(group.d_outs),
        )
        call.wave_end[: len(ends)] = [end - first for end in ends]
        column = 0
        for i, (table, d_out) in enumerate(zip(group.tables, group.d_outs, strict=True)):
            address = y.data_ptr() + column * y.element_size()
            call.projections[i] = c.ProjectionStruct(
                table.data_ptr(), address, y.stride(0), y.shape[1] if heads else d_out
            )
            column += d_out
        return call

    def merge(
        self, out: torch.Tensor, base: torch.Tensor, updates: Sequence[MergeUpdate], sign: int
    ) -> None:
        """Launch `op.merge` on the current stream. Raises CudaError for a rejected call."""
        self._check_device(out, base)
        if out is not base:
            for offset, size in Merges.of(updates).copied:
                out[offset : offset + size].copy_(base[offset : offset + size])
        MergedParts(self, updates)(out, base, sign)

    # ---- faults and memory -----------------------------------------------------------------------

    def check(self) -> None:
        """Wait for the device. Raises DeviceFault for faults since the last check."""
        self.synchronize()
        for workspace in self.workspaces:
            word = workspace[:8].view(torch.int64)
            if text := self.library.fault(int(word.item())):
                word.zero_()
                raise DeviceFault(f"ATMM for CUDA: {text}")

    def synchronize(self) -> None:
        if not self.library.emulated:
            torch.cuda.synchronize(self.device)

    def _workspace(self, size: int) -> torch.Tensor:
        if self.workspaces[-1].numel() < size:
            if not self.library.emulated and torch.cuda.is_current_stream_capturing():
                raise CudaError(
                    "a captured call must have run once before, to allocate its workspace"
                )
            size = max(size, 2 * self.workspaces[-1].numel())
            self.workspaces.append(torch.zeros(size, dtype=torch.uint8, device=self.device))
        return self.workspaces[-1]

    def _check_device(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != self.device.type:
                raise ValueError(
                    f"a tensor is on {tensor.device}; the operator is on {self.device}"
                )

    def _stream(self) -> int:
        return 0 if self.library.emulated else torch.cuda.current_stream(self.device).cuda_stream

    def _here(self) -> Any:
        return torch.cuda.device(self.device) if not self.library.emulated else nullcontext()


class MergedParts:
    """Prepared merge: the shapes and addresses of the matrices are already on the device."""

    def __init__(self, operator: Operator, updates: Sequence[MergeUpdate]) -> None:
        self._operator = operator
        self._keep = [update.pair for update in updates]
        operator._check_device(*(tensor for pair in self._keep for tensor in pair))
        merges = (c.MergeStruct * len(updates))()
        for merge, (offset, (a, b)) in zip(merges, updates, strict=True):
            merge.offset, merge.d_out, merge.d_in = offset, b.shape[0], a.shape[1]
            merge.rank, merge.a, merge.b = a.shape[0], a.data_ptr(), b.data_ptr()
        self._blocks = operator.library.merge_blocks(merges)
        table = torch.frombuffer(bytearray(merges), dtype=torch.uint8) if updates else None
        self._table = None if table is None else table.to(operator.device)

    def __call__(self, out: torch.Tensor, base: torch.Tensor, sign: int = 1) -> None:
        """Compute out = base + sign · B A for every update, on the current stream."""
        if self._table is None:
            return
        operator = self._operator
        addresses = (out.data_ptr(), base.data_ptr(), self._table.data_ptr())
        kind = c.TYPES[DTYPES[out.dtype]]
        call = c.MergeCallStruct(*addresses, self._blocks, len(self._keep), kind, sign)
        with operator._here():
            operator.library.merge(call, operator._stream())


_using: list[Operator] = []


@contextmanager
def using(operator: Operator) -> Iterator[Operator]:
    """Use this operator as the backend "cuda" within the context."""
    _using.append(operator)
    try:
        yield operator
    finally:
        _using.pop()


def current() -> Operator:
    """Return the operator of the backend "cuda" for torch's current device.

    Raises ImportError, with the reason, if there is no library or no device.
    """
    if _using:
        return _using[-1]
    return _on_device(torch.cuda.current_device() if torch.cuda.is_available() else -1)


@cache
def _on_device(index: int) -> Operator:
    if index < 0:
        raise ImportError("ATMM for CUDA needs a GPU that torch can use")
    operator = Operator(Library(c.find_library()), torch.device("cuda", index))
    path = table_path(operator.name)
    if path.exists():
        operator.table = Table.load(path, operator.library)
    log.info(
        "ATMM: compiled for CUDA, %s, %d tiles, %s",
        operator.name,
        len(operator.library.tiles),
        f"{path.name} ({len(operator.table)})" if path.exists() else "no tile table",
    )
    return operator


def table_path(device: str, folder: Path = TABLES) -> Path:
    """Return the path of the tile table for a device's name, with entries of all types."""
    words = device.lower().replace("-", " ").split()
    return folder / f"cuda-{'-'.join(words)}.json"
