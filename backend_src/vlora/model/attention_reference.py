"""Reference implementation of paged attention in plain torch: gather the pages, then attend.

Masked positions may contain values that are not finite, of a page's previous owner or of a later
row. A weight of zero does not mask them, since 0 · NaN is NaN, so they are replaced by zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vlora.kernels import reference
from vlora.memory.kv_cache import LANES, KVCache
from vlora.model.chunk import Chunk
from vlora.model.rotary import Rotary


class ReferencePlan:
    """Indices of the pages that the rows of a step write and read. Chunks with a single row are
    computed together, padded to the longest context, and longer ones one at a time.
    """

    def __init__(self, chunks: Sequence[Chunk], kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        block = kv_cache.block
        rows = [
            (chunk.pages[position // block], position % block)
            for chunk in chunks
            for position in range(chunk.start, chunk.end)
        ]
        self._page, offsets = torch.tensor(rows).unbind(1)
        self._panel, self._lane = offsets // LANES, offsets % LANES
        self._long_chunks = [
            (chunk, torch.tensor(chunk.pages[: -(-chunk.end // block)]), _causal(chunk))
            for chunk in chunks
            if chunk.length > 1
        ]
        self._single_chunks = [chunk for chunk in chunks if chunk.length == 1]
        if self._single_chunks:
            self._single_rows = torch.tensor([chunk.row for chunk in self._single_chunks])
            page_counts = [-(-chunk.end // block) for chunk in self._single_chunks]
            max_pages = max(page_counts)
            pages = [
                [*chunk.pages[:count], *[chunk.pages[0]] * (max_pages - count)]
                for chunk, count in zip(self._single_chunks, page_counts, strict=True)
            ]
            self._single_pages = torch.tensor(pages)
            ends = torch.tensor([chunk.end for chunk in self._single_chunks])
            columns = torch.arange(max_pages * block)
            self._single_mask = (columns[None, :] < ends[:, None])[:, None, None, :]

    def attend(self, layer: int, heads: int, qkv: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        kv_cache = self._kv_cache
        query, key, value = torch.split(
            qkv.view(len(qkv), -1, kv_cache.head_dim),
            [heads, kv_cache.kv_heads, kv_cache.kv_heads],
            dim=1,
        )
        query = reference.rotate(query, rotary.cosines, rotary.sines)
        key = reference.rotate(key, rotary.cosines, rotary.sines)
        keys, values = kv_cache.keys(layer), kv_cache.values(layer)
        pairs = key.reshape(*key.shape[:-1], -1, 2).to(keys.dtype)
        keys[self._page, :, self._panel, :, :, self._lane] = pairs
        values[self._page, :, self._panel, self._lane // 2, self._lane % 2] = value.to(values.dtype)
        keys = keys.permute(0, 1, 2, 5, 3, 4)
        out = torch.empty_like(query)
        self._attend_long(out, query, keys, values)
        if self._single_chunks:
            self._attend_single(out, query, keys, values)
        return out.flatten(1)

    def _attend_long(
        self, out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        for chunk, pages, mask in self._long_chunks:
            rows = slice(chunk.row, chunk.row + chunk.length)
            seen_keys = self._gather(keys, pages[None], chunk.end)
            seen_values = self._gather(values, pages[None], chunk.end)
            finite = _zero_not_finite(seen_keys, seen_values)
            out[rows] = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                seen_keys,
                seen_values,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )[0].transpose(0, 1)
            out[rows][~finite[0].cummin(0).values[chunk.start :]] = torch.nan

    def _attend_single(
        self, out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        width = self._single_mask.shape[-1]
        seen_keys = self._gather(keys, self._single_pages, width)
        seen_values = self._gather(values, self._single_pages, width)
        finite = _zero_not_finite(seen_keys, seen_values)
        attended = F.scaled_dot_product_attention(
            query[self._single_rows][:, :, None],
            seen_keys,
            seen_values,
            attn_mask=self._single_mask,
            enable_gqa=True,
        )[:, :, 0]
        attended[(~finite & self._single_mask[:, 0, 0]).any(1)] = torch.nan
        out[self._single_rows] = attended

    def _gather(self, view: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
        # `view` is [pages, kv_heads, panels, …]; its last axes hold the LANES tokens of a panel.
        kv_cache = self._kv_cache
        gathered = view[pages].transpose(1, 2)
        gathered = gathered.reshape(*gathered.shape[:3], -1, kv_cache.head_dim)
        return gathered[:, :, :, : kv_cache.block].flatten(2, 3)[:, :, :length].float()


def _zero_not_finite(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    # The attention of rows that see a position that is not finite must be set to NaN.
    finite = (keys.isfinite() & values.isfinite()).all(3).all(1)
    if not bool(finite.all()):
        for tensor in (keys, values):
            tensor.masked_fill_(~finite[:, None, :, None], 0.0)
    return finite


def _causal(chunk: Chunk) -> torch.Tensor | None:
    if chunk.start == 0:
        return None
    return torch.arange(chunk.end)[None, :] <= torch.arange(chunk.start, chunk.end)[:, None]
