"""Paged attention in plain torch: keys and values live in pages, one block table a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vlora.model.chunk import Chunk


class KVStore:
    """The pages' bytes: [pages, layers, 2, block, kv_heads, head_dim], a page contiguous; fp32 or
    bf16."""

    def __init__(
        self,
        pages: int,
        layers: int,
        block: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.block = block
        self._data = torch.zeros(pages, layers, 2, block, kv_heads, head_dim, dtype=dtype)

    def keys_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [pages, block, kv_heads, head_dim] of one layer."""
        return self._data[:, layer, 0], self._data[:, layer, 1]


class AttentionPlan:
    """Where a step's rows write and read. Made once a step, used by every layer.

    Chunks of one row are attended together, padded to the longest; longer ones each alone.
    """

    def __init__(self, chunks: Sequence[Chunk], store: KVStore) -> None:
        self._store = store
        block = store.block
        positions: list[int] = []
        pages: list[int] = []
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                positions.append(position)
                pages.append(chunk.pages[position // block])
        self.positions = torch.tensor(positions, dtype=torch.long)
        self._write_page = torch.tensor(pages, dtype=torch.long)
        self._write_offset = self.positions % block
        self._long = [
            (chunk, torch.tensor(chunk.pages[: -(-chunk.end // block)]), _causal(chunk))
            for chunk in chunks
            if chunk.length > 1
        ]
        self._single = [chunk for chunk in chunks if chunk.length == 1]
        if self._single:
            self._single_rows = torch.tensor([chunk.row for chunk in self._single])
            used = [-(-chunk.end // block) for chunk in self._single]
            widest = max(used)
            self._single_pages = torch.tensor(
                [
                    [*chunk.pages[:count], *[chunk.pages[0]] * (widest - count)]
                    for chunk, count in zip(self._single, used, strict=True)
                ]
            )
            ends = torch.tensor([chunk.end for chunk in self._single])
            columns = torch.arange(widest * block)
            self._single_mask = (columns[None, :] < ends[:, None])[:, None, None, :]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query: [T, heads, dim]; key, value: [T, kv_heads, dim] → [T, heads, dim].

        Writes key and value to their pages, then lets every row see its sequence up to itself.
        """
        keys, values = self._store.keys_values(layer)
        keys[self._write_page, self._write_offset] = key.to(keys.dtype)
        values[self._write_page, self._write_offset] = value.to(values.dtype)
        out = torch.empty_like(query)
        for chunk, pages, mask in self._long:
            rows = slice(chunk.row, chunk.row + chunk.length)
            out[rows] = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                _gather(keys, pages[None], chunk.end),
                _gather(values, pages[None], chunk.end),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )[0].transpose(0, 1)
        if self._single:
            width = self._single_mask.shape[-1]
            out[self._single_rows] = F.scaled_dot_product_attention(
                query[self._single_rows][:, :, None],
                _gather(keys, self._single_pages, width),
                _gather(values, self._single_pages, width),
                attn_mask=self._single_mask,
                enable_gqa=True,
            )[:, :, 0]
        return out


def _causal(chunk: Chunk) -> torch.Tensor | None:
    """[length, end] mask of a chunk; None where it starts its sequence (plain causal)."""
    if chunk.start == 0:
        return None
    rows = torch.arange(chunk.start, chunk.end)
    return torch.arange(chunk.end)[None, :] <= rows[:, None]


def _gather(store: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """[pages, block, kv_heads, dim] by [batch, n] → [batch, kv_heads, length, dim] fp32."""
    batch, count = pages.shape
    block, heads, dim = store.shape[1:]
    gathered = store[pages].view(batch, count * block, heads, dim)
    return gathered[:, :length].transpose(1, 2).float()
