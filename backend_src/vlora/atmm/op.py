"""The LoRA operator (ATMM in the paper). Only this module dispatches to its implementations.

The backends are "cpu" (csrc/atmm, compiled), "cuda" (csrc/atmm/cuda) and "reference" (plain torch).
The default is chosen once per process for each type of device on which tensors are
(`vlora.backends`). `apply`, `heads` and `merge` take `backend`, which overrides it for one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vlora import backends, native
from vlora.atmm import reference
from vlora.atmm.cuda import operator
from vlora.atmm.cuda.segments import DeviceSegments, SegmentBounds, arrange, bounds_of
from vlora.atmm.groups import HeadGroup, LoraGroup, latest_version
from vlora.atmm.types import (
    DTYPES,
    ON_GPU,
    CapturedSegments,
    Merges,
    MergeUpdate,
    Segment,
    Segments,
)
from vlora.backends import Backend

# Function that adds to a product y = x Wᵀ in place. Its arguments are: address of y, row stride of
# y in elements, address of x, row stride of x in elements, and number of rows.
Epilogue = Callable[[int, int, int, int, int], None]


def apply(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    group: LoraGroup,
    *,
    config: int | None = None,
    threads: int | None = None,
    backend: Backend | None = None,
) -> None:
    """Add the low-rank products of all projections of a group to rows of y, in place.

    Semantics: let R = start … start+length−1 be the rows of a segment (start, length, slot, sign).
    For every segment, and every projection p of the group with (A, B) = group.pairs[p][slot]:
        y[R, columns of p] += sign · (x[R] Aᵀ) Bᵀ

    Pairs of None are skipped. A value that is not finite affects only the rows of its segment. Sums
    are fp32. CPUs with instructions for pairs of bf16 may round x and x Aᵀ to bf16 if the group is
    bf16. On CUDA, x, x Aᵀ and the term that is added to y are rounded to the group's dtype.

    y, x: [T, sum of d_out] and [T, d_in], of the group's dtype or fp32. Rows may be strided.
    config: index of a tile configuration in `tiles.configs("apply", dtype)`; None to choose it.
    threads: number of threads; torch's by default.

    Raises ValueError for a segment outside x, an unknown slot, or a shape that does not fit.
    """
    _check_rows(y, x, group)
    chosen = backend or _backend_for(y)
    if chosen == "cpu":
        _on_cpu(x, y)
    else:
        _check(len(x), segments, len(group))
        group.pending.wait_for(segments)
    if chosen == "reference":
        reference.apply(y, x, segments, group)
        return
    if (y.stride(1) != 1 and group.width > 1) or (x.stride(1) != 1 and group.d_in > 1):
        raise ValueError("the columns of x and y must be contiguous")
    if chosen == "cuda":
        if config is not None:
            raise ValueError("config must be None on CUDA; it is an index of the CPU's tiles")
        _on_cuda(y, x, segments, group)
        return
    rows = (y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), len(x))
    tile, threads = -1 if config is None else config, threads or torch.get_num_threads()
    found = Segments.of(segments).native
    group.native.apply(*rows, x.dtype == torch.float32, found, tile, threads)


def _check_rows(y: torch.Tensor, x: torch.Tensor, group: LoraGroup) -> None:
    if y.shape != (len(x), group.width) or x.shape[1] != group.d_in:
        raise ValueError(
            f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit a group"
            f" {group.d_in} → {group.d_outs}"
        )
    if y.dtype != x.dtype or x.dtype not in (group.dtype, torch.float32):
        types = f"x is {x.dtype} and y {y.dtype}, the group is {group.dtype}"
        raise ValueError(f"{types}; x and y must both be of its type or both torch.float32")


class StepSegments:
    """Segment lists of a step, which are copied to the device with the step's other inputs.

    Each list object is copied once, so equal lists should be the same object. The CPU operator
    needs no copies.
    """

    def __init__(self, lists: Iterable[Segments], device: torch.device) -> None:
        self._operator = None
        self._arranged: list[tuple[Segments, DeviceSegments]] = []
        if backends.backend_of("atmm", device.type, operator.current) == "cuda":
            self._operator = operator.current()
            distinct = {id(segments): segments for segments in lists if segments}
            self._arranged = [(s, arrange(self._operator.library, s)) for s in distinct.values()]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors to upload, in host memory."""
        return [arranged.tensor for _, arranged in self._arranged]

    def place(self, uploaded: Sequence[torch.Tensor]) -> None:
        """Register the copies of `inputs` on the device for later calls with these lists."""
        if self._operator is not None:
            for (segments, arranged), tensor in zip(self._arranged, uploaded, strict=True):
                self._operator.place(segments, arranged, tensor)


@dataclass(frozen=True)
class BoundedSegments:
    """Segments of a call that a graph captures or replays.

    bounds: limits of the captured call, which can be replayed with any segments within them.
    tensor: the segments in host memory. The call reads a copy of this tensor on the device.
    """

    segments: Segments
    bounds: SegmentBounds
    tensor: torch.Tensor

    def captured(self, on_device: torch.Tensor, layout: GroupLayout) -> CapturedSegments:
        """Return segments to capture with the groups of `layout`. Replays read `on_device`."""
        segments = CapturedSegments(self.segments)
        segments.groups = frozenset(layout.parts)
        segments.prepared[operator.current()] = self.bounds.on(on_device)
        return segments


@dataclass
class GroupLayout:
    """Properties of groups on which captured calls of the operator depend.

    version: latest version of any group when this layout was last compared with the groups.
    parts: addresses of the tables and maximum rank of each group that has had a pair.
    """

    version: int
    parts: dict[LoraGroup, tuple[int, ...]]


def captures(device: torch.device) -> bool:
    """Return whether a graph can capture calls of the operator on this device."""
    return backends.backend_of("atmm", device.type, operator.current) == "cuda"


def bounded(segments: Segments) -> BoundedSegments:
    """Return the segments, and the bounds of a captured call that can be replayed with them."""
    return BoundedSegments(segments, *bounds_of(operator.current().library, segments))


def group_layout(groups: Sequence[LoraGroup], known: GroupLayout | None) -> GroupLayout:
    """Copy what has changed in the groups to the device, and return their layout.

    If the result is not `known` itself, earlier graphs that apply these groups are out of date.
    """
    version = latest_version()
    if known is not None and known.version == version:
        return known
    on_device = operator.current()
    parts = {group: on_device.group(group).layout for group in groups if group.ever_used}
    if known is not None and known.parts == parts:
        known.version = version
        return known
    return GroupLayout(version, parts)


def bind_epilogue(
    segments: Sequence[Segment], group: LoraGroup, x: torch.Tensor
) -> Epilogue | None:
    """Return the function with which a `Matrix` adds the segments' adapters to its product with x.

    Only the compiled CPU backend has such a function. For any other, the result is None, and the
    caller calls `apply` after the product. The function takes fp32 rows that the product has
    checked: for one row of a small adapter, the checks of `apply` take longer than its arithmetic.
    """
    if _backend_for(x) != "cpu":
        return None
    return partial(group.native.add, Segments.of(segments).native, torch.get_num_threads())


def _backend_for(out: torch.Tensor) -> Backend:
    return backends.backend_of("atmm", out.device.type, operator.current)


def _on_cuda(
    y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: LoraGroup
) -> None:
    """Run `apply` on CUDA. Rows of another type are converted to the group's dtype."""
    device, segments = operator.current(), Segments.of(segments)
    out = y if y.dtype == group.dtype else torch.zeros_like(y, dtype=group.dtype)
    # `group_layout` has updated the groups before a call is captured.
    on_device = device.group(group, update=not segments.captured)
    device.apply(out, x.to(group.dtype), device.segments(segments), on_device)
    if out is not y:
        y.add_(out)


def heads(
    x: torch.Tensor,
    segments: Sequence[Segment],
    group: HeadGroup,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Return the scores of vision task heads, before the softmax.

    Semantics: y[R, : classes of slot] = x[R] Wᵀ + bias for the rows R of every segment; zero
        elsewhere.

    x: [T, d_in] fp32. Returns y: [T, maximum number of classes of the segments' slots].

    Raises ValueError for a wrong segment or x, and for a slot without a head.
    """
    rows = x.shape[0]
    if x.dim() != 2 or x.shape[1] != group.d_in or x.dtype != torch.float32:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit fp32 heads of {group.d_in}")
    _check(rows, segments, len(group))
    for segment in segments:
        if group.heads[segment.slot] is None:
            raise ValueError(f"slot {segment.slot} has no head")
    group.pending.wait_for(segments)
    y = x.new_zeros(rows, max((group.classes(segment.slot) for segment in segments), default=0))
    chosen = backend or _backend_for(y)
    if chosen == "reference":
        reference.heads(y, x, segments, group)
        return y
    x = x.contiguous()
    if chosen == "cpu":
        _on_cpu(x)
    if chosen == "cuda":
        device = operator.current()
        device.apply(y, x, device.segments(segments), device.group(group), heads=True)
        return y
    group.native.heads(
        y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), rows, Segments.of(segments).native
    )
    return y


def merge(
    out: torch.Tensor,
    base: torch.Tensor,
    updates: Sequence[MergeUpdate],
    sign: int = 1,
    *,
    config: int | None = None,
    threads: int | None = None,
    backend: Backend | None = None,
) -> None:
    """Compute the merged weights of all layers and targets in one call (§4.4.1 of the paper).

    Semantics: for every update (offset, (A, B)), with W = base[offset : …] viewed as [d_out, d_in],
    the same elements of out become W + sign · B A. The parts in `Merges.copied` are copied from
    base to out. Other elements are not written.

    out, base: slabs [elements] of one dtype: fp32, bf16, or on a GPU fp16. They may be the same.
    updates: A and B are fp32 and contiguous. Updates must not overlap.

    Raises ValueError for arguments that do not fit.
    """
    if out.shape != base.shape or out.dim() != 1 or out.dtype != base.dtype:
        raise ValueError(
            f"out {tuple(out.shape)} {out.dtype} and base {tuple(base.shape)} {base.dtype} must be"
            " vectors of the same length and type"
        )
    chosen = backend or _backend_for(out)
    served = DTYPES if chosen == "cpu" else ON_GPU
    if out.dtype not in served or not (out.is_contiguous() and base.is_contiguous()):
        types = ", ".join(map(str, served))
        raise ValueError(f"slabs of {out.dtype}: they must be contiguous, and of one of {types}")
    merges = Merges.of(updates)
    if merges.end > base.shape[0]:
        raise ValueError(f"updates up to element {merges.end} do not fit a slab of {len(base)}")
    if chosen == "reference":
        reference.merge(out, base, merges, sign)
        return
    if chosen == "cuda":
        operator.current().merge(out, base, merges, sign)
        return
    _on_cpu(out, base)
    target = (out.data_ptr(), base.data_ptr(), DTYPES[out.dtype])
    tile, threads = -1 if config is None else config, threads or torch.get_num_threads()
    native.kernels().atmm.merge(*target, merges.native, sign, tile, threads)


def _on_cpu(*tensors: torch.Tensor) -> None:
    """Raise ValueError unless the tensors are in CPU memory. The core takes their addresses."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ValueError(f"a tensor is on {tensor.device}; the CPU operator cannot read it")


def _check(rows: int, segments: Sequence[Segment], slots: int) -> None:
    for segment in segments:
        if not 0 <= segment.slot < slots:
            raise ValueError(f"slot {segment.slot} is not one of the {slots} adapters")
        if segment.start < 0 or segment.length < 0 or segment.start + segment.length > rows:
            raise ValueError(f"{segment} lies outside the {rows} rows")
        if segment.sign not in (1, -1):
            raise ValueError(f"{segment}: the sign must be +1 or -1")
