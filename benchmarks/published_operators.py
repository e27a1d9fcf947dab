"""LoRA operators of other systems, for use in our engine in place of ATMM.

Semantics: each operator computes what `vlora.atmm.op.apply` specifies. An operator that gathers
weights copies them in every call, as in the original system. On a CPU without bf16 instructions,
the operators multiply in fp32 with weights that are converted once, because torch would emulate
bf16 products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from benchmarks.machine import has_bf16_instructions
from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segment

Apply = Callable[[torch.Tensor, torch.Tensor, Sequence[Segment], LoraGroup], None]
"""Function of y, x, segments and group that adds the LoRA products to y."""

Pairs = Sequence[LoraPair | None]
SGMV_ROWS = 16
"""Minimum number of rows of a segment for which Punica uses one matrix product (SGMV). Smaller
segments use gathered weights (BGMV)."""
GATHERED_ROWS = 64
"""Number of rows whose weights are gathered at a time."""


def slora(y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: LoraGroup) -> None:
    """Apply S-LoRA's operator: multiply each segment's rows by its adapter, at its own rank."""
    for columns, pairs in _columns(y, group):
        for segment in segments:
            if (pair := pairs[segment.slot]) is not None:
                _apply_segment(columns, x, segment, pair)


def punica(y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: LoraGroup) -> None:
    """Apply Punica's operator: gather the weights of each row of small segments, padded to the
    largest rank, and compute large segments as `slora` does (see SGMV_ROWS).
    """
    for columns, pairs in _columns(y, group):
        small = [s for s in segments if s.length < SGMV_ROWS and pairs[s.slot] is not None]
        for segment in segments:
            pair = pairs[segment.slot]
            if pair is not None and segment.length >= SGMV_ROWS:
                _apply_segment(columns, x, segment, pair)
        for rows, a, b in _gathered(small, pairs, x):
            low_rank = torch.bmm(a, x[rows].to(a.dtype)[:, :, None])
            columns.index_add_(0, rows, torch.bmm(b, low_rank)[:, :, 0].to(columns.dtype))


def dlora(y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: LoraGroup) -> None:
    """Apply dLoRA's operator: gather the weights of each row, padded to the largest rank, and
    compute two einsums.
    """
    for columns, pairs in _columns(y, group):
        with_pair = [s for s in segments if s.length and pairs[s.slot] is not None]
        for rows, a, b in _gathered(with_pair, pairs, x):
            low_rank = torch.einsum("td,trd->tr", x[rows].to(a.dtype), a)
            update = torch.einsum("tr,tor->to", low_rank, b)
            columns.index_add_(0, rows, update.to(columns.dtype))


OPERATORS: Mapping[str, Apply] = {"punica": punica, "slora": slora, "dlora_einsum": dlora}
POLICY_OF_SYSTEM = {"punica": "unmerge_only", "slora": "unmerge_only", "dlora_einsum": "dlora"}
"""The policy of each system that is measured with its own operator."""


@contextmanager
def use_operator(apply: Apply) -> Iterator[None]:
    """Replace ATMM by this operator in all layers while the context is open."""
    with patch.object(op, "apply", apply), patch.object(op, "bind_epilogue", lambda *_: None):
        yield


_CONVERTED: dict[int, tuple[LoraPair, LoraPair]] = {}
"""(Stored pair, converted pair) by the id of the stored A, which the entry keeps alive."""


def _fast(stored: LoraPair | None, dtype: torch.dtype) -> LoraPair | None:
    """Return a pair in the type that this CPU multiplies fastest."""
    if stored is None:
        return None
    if id(stored.a) not in _CONVERTED:
        target = dtype if has_bf16_instructions() else torch.float32
        pair = LoraPair(*(factor.to(dtype).to(target) for factor in stored))
        _CONVERTED[id(stored.a)] = stored, pair
    return _CONVERTED[id(stored.a)][1]


def _columns(y: torch.Tensor, group: LoraGroup) -> Iterator[tuple[torch.Tensor, Pairs]]:
    """Yield, for each target of the group, its columns of y and its pairs by slot."""
    columns = torch.split(y, list(group.d_outs), dim=1)
    for own, pairs in zip(columns, group.pairs, strict=True):
        yield own, [_fast(pair, group.dtype) for pair in pairs]


def _apply_segment(
    columns: torch.Tensor, x: torch.Tensor, segment: Segment, pair: LoraPair
) -> None:
    rows = slice(segment.start, segment.start + segment.length)
    low_rank = x[rows].to(pair.a.dtype) @ pair.a.T
    columns[rows] += segment.sign * (low_rank @ pair.b.T)


def _gathered(
    segments: Sequence[Segment], pairs: Pairs, x: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield, for at most GATHERED_ROWS rows at a time, their indices [n] and their weights.

    The weights are A [n, r, d_in] and B [n, d_out, r]. B is multiplied by the segment's sign.
    """
    if not segments:
        return
    in_use = [pair for s in segments if (pair := pairs[s.slot]) is not None]
    rank = max(pair.rank for pair in in_use)
    a = in_use[0].a.new_zeros(len(in_use), rank, in_use[0].a.shape[1])
    b = in_use[0].b.new_zeros(len(in_use), in_use[0].b.shape[0], rank)
    for i, (pair, segment) in enumerate(zip(in_use, segments, strict=True)):
        a[i, : pair.rank] = pair.a
        b[i, :, : pair.rank] = segment.sign * pair.b
    rows = torch.cat([torch.arange(s.start, s.start + s.length) for s in segments])
    owner = torch.arange(len(segments)).repeat_interleave(
        torch.tensor([s.length for s in segments])
    )
    for start in range(0, len(rows), GATHERED_ROWS):
        part = slice(start, start + GATHERED_ROWS)
        yield rows[part], a[owner[part]], b[owner[part]]
