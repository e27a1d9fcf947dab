"""The operators that the baselines of `vlora bench policies` were published with, on this engine.

Semantics of each: as `vlora.atmm.op.apply`. Per step the weights of its rows' adapters are found
and laid out anew, as theirs are. Where the CPU has no bf16 instructions they multiply in fp32, from
weights that are widened once: torch's bf16 products would be emulated there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from benchmarks.machine import bf16_instructions
from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segment

Apply = Callable[[torch.Tensor, torch.Tensor, Sequence[Segment], LoraGroup], None]

MANY = 16
"""Rows of a segment from which Punica multiplies it whole (SGMV); fewer are gathered (BGMV)."""
GATHERED = 64
"""Rows whose weights are gathered at a time."""


def slora(y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: LoraGroup) -> None:
    """S-LoRA's: each segment's rows through its adapter's own rank."""
    for part, pairs in _parts(y, group):
        for segment in segments:
            if (pair := pairs[segment.slot]) is not None:
                _whole(part, x, segment, _ready(pair))


def punica(y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: LoraGroup) -> None:
    """Punica's: one rank a launch, so that all are padded to the largest; few rows of an adapter go
    by gathered weights."""
    for part, pairs in _parts(y, group):
        few = [s for s in segments if s.length < MANY and pairs[s.slot] is not None]
        for segment in segments:
            pair = pairs[segment.slot]
            if pair is not None and segment.length >= MANY:
                _whole(part, x, segment, _ready(pair))
        for rows, a, b in _gathered(few, pairs, x):
            low_rank = torch.bmm(a, x[rows].to(a.dtype)[:, :, None])
            part.index_add_(0, rows, torch.bmm(b, low_rank)[:, :, 0].to(part.dtype))


def dlora(y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: LoraGroup) -> None:
    """dLoRA's: every row's weights gathered, ranks padded, two einsums."""
    for part, pairs in _parts(y, group):
        mine = [s for s in segments if s.length and pairs[s.slot] is not None]
        for rows, a, b in _gathered(mine, pairs, x):
            low_rank = torch.einsum("td,trd->tr", x[rows].to(a.dtype), a)
            part.index_add_(0, rows, torch.einsum("tr,tor->to", low_rank, b).to(part.dtype))


OWN: Mapping[str, Apply] = {"punica": punica, "slora": slora, "dlora_einsum": dlora}
RULE_OF = {"punica": "unmerge_only", "slora": "unmerge_only", "dlora_einsum": "dlora"}
"""The policies of the systems that are measured with their own operator."""


@contextmanager
def operator(apply: Apply) -> Iterator[None]:
    """All layers go through this operator instead of ATMM."""
    with patch.object(op, "apply", apply), patch.object(op, "bind_epilogue", lambda *_: None):
        yield


_WIDENED: dict[int, tuple[LoraPair, LoraPair]] = {}
"""By the identity of a pair's A, which the first of the two keeps."""


def _ready(pair: LoraPair) -> LoraPair:
    """In the type that this CPU multiplies fastest."""
    if pair.a.dtype == torch.float32 or bf16_instructions():
        return pair
    known = _WIDENED.get(id(pair.a))
    if known is None:
        known = _WIDENED[id(pair.a)] = (pair, LoraPair(pair.a.float(), pair.b.float()))
    return known[1]


def _parts(
    y: torch.Tensor, group: LoraGroup
) -> Iterator[tuple[torch.Tensor, Sequence[LoraPair | None]]]:
    return zip(torch.split(y, list(group.d_outs), dim=1), group.pairs, strict=True)


def _whole(part: torch.Tensor, x: torch.Tensor, segment: Segment, pair: LoraPair) -> None:
    rows = slice(segment.start, segment.start + segment.length)
    low_rank = x[rows].to(pair.a.dtype) @ pair.a.T
    part[rows] += segment.sign * (low_rank @ pair.b.T)


def _gathered(
    segments: Sequence[Segment], pairs: Sequence[LoraPair | None], x: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows with the weights of each: (rows [n], A [n, r, d_in], B [n, d_out, r]), signs in B."""
    if not segments:
        return
    found = [pairs[s.slot] for s in segments]
    known = [_ready(pair) for pair in found if pair is not None]
    rank = max(pair.rank for pair in known)
    a = known[0].a.new_zeros(len(known), rank, known[0].a.shape[1])
    b = known[0].b.new_zeros(len(known), known[0].b.shape[0], rank)
    for i, (pair, segment) in enumerate(zip(known, segments, strict=True)):
        a[i, : pair.rank] = pair.a
        b[i, :, : pair.rank] = segment.sign * pair.b
    rows = torch.cat([torch.arange(s.start, s.start + s.length) for s in segments])
    owner = torch.arange(len(segments)).repeat_interleave(
        torch.tensor([s.length for s in segments])
    )
    for start in range(0, len(rows), GATHERED):
        these = slice(start, start + GATHERED)
        yield rows[these], a[owner[these]], b[owner[these]]
