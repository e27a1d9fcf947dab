"""What fits into so much memory: weights, adapters, and sequences beside them.

The arithmetic of the engine's own parts, on shapes alone: no weight is read. `tests/unit/
test_capacity.py` holds it to what an engine allocates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vlora.config import Options
from vlora.ids import MatrixId
from vlora.lora.folders import find_folders
from vlora.lora.slab import ATTENTION, GROUPS, TARGETS
from vlora.lora.store import AdapterStore
from vlora.memory.kv_cache import page_bytes
from vlora.memory.pool import Run
from vlora.model.decoder import lora_groups
from vlora.model.decoder_config import DecoderConfig, dtype_of, load_config
from vlora.model.loader import adapter_shape

RANKS = (8, 16, 32, 64)
TARGET_SETS: Mapping[str, tuple[str, ...]] = {
    "q v": ("q_proj", "v_proj"),
    "attention": ATTENTION,
    "all": TARGETS,
}
FP32 = 4


@dataclass(frozen=True)
class AdapterCost:
    """What one adapter takes: packed bytes, the pages of its run, fp32 bytes in host memory."""

    name: str
    packed: int
    pages: int
    host: int


@dataclass(frozen=True)
class Capacity:
    """Bytes, but where a name says otherwise.

    weights: the decoder's. merged: the second copy of what known adapters change. page: of the
    pool, `block` tokens. pages: that fit beside weights and merged. known: adapters of the folder,
    kinds: by rank and targets.
    """

    memory: int
    weights: int
    merged: int
    page: int
    block: int
    context: int
    pages: int
    known: tuple[AdapterCost, ...]
    kinds: tuple[AdapterCost, ...]

    @property
    def token(self) -> float:
        """Bytes of one token's keys and values."""
        return self.page / self.block

    @property
    def sequence_pages(self) -> int:
        """Of one sequence as long as the context."""
        return -(-self.context // self.block)

    def sequences(self, adapter_pages: int) -> int:
        """Sequences of the whole context that fit beside adapters of so many pages."""
        return max(0, self.pages - adapter_pages) // self.sequence_pages

    @property
    def known_pages(self) -> int:
        return sum(cost.pages for cost in self.known)


def plan(options: Options, names: Mapping[str, str], memory: int) -> Capacity:
    """memory: bytes for all of it. Raises InvalidArgument for a model that is not served."""
    config = load_config(options.model)
    dtype = dtype_of(options.dtype, options.model)
    size = dtype.itemsize
    store = AdapterStore(
        adapter_shape(options.model, config), options.limits.max_adapter_bytes, dtype, host_bytes=0
    )
    for places in lora_groups(config.layers):
        store.group(places)
    store.load(find_folders(options.adapters, names), make_resident=False)
    page = page_bytes(config.layers, options.block_size, config.kv_heads, config.head_dim, dtype)

    def cost(name: str, packed: int, host: int) -> AdapterCost:
        return AdapterCost(name, packed, Run.length(packed, page), host)

    handles = [store.handle(name) for name in store.names()]
    known = [cost(h.name, store.packed_bytes(h), h.description.host_bytes) for h in handles]
    kinds = []
    for label, targets in TARGET_SETS.items():
        for rank in RANKS:
            ranks: dict[MatrixId, int] = {
                (layer, target): rank for layer in range(config.layers) for target in targets
            }
            shapes = [config.target_shapes[target] for _, target in ranks]
            host = sum(rank * sum(shape) * FP32 for shape in shapes)
            kinds.append(cost(f"rank {rank}, {label}", store.bytes_of(ranks), host))
    weights = weights_bytes(config, size)
    merged = 0 if options.merging != "out_of_place" else _merged_bytes(config, store.matrices, size)
    context = options.max_model_len or config.context
    pages = max(0, memory - weights - merged) // page
    return Capacity(
        memory,
        weights,
        merged,
        page,
        options.block_size,
        context,
        pages,
        tuple(known),
        tuple(kinds),
    )


def weights_bytes(config: DecoderConfig, size: int) -> int:
    """Of the decoder: matrices as they are stored, norms and biases in fp32."""
    return sum(
        math.prod(shape) * (size if len(shape) > 1 else FP32)
        for shape in config.weight_shapes.values()
    )


def _merged_bytes(config: DecoderConfig, places: Iterable[MatrixId], size: int) -> int:
    """Fused groups that any known adapter changes; a slab takes them in whole huge pages."""
    touched = {
        (layer, group)
        for layer, target in places
        for group in GROUPS
        if layer >= 0 and target in group
    }
    return sum(
        math.prod(config.target_shapes[target]) * size for _, group in touched for target in group
    )
