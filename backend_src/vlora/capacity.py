"""Memory plan of an engine: what weights, adapters and sequences need and how many fit.

Computed from shapes with the functions that the engine itself uses; no weight is read.
`tests/unit/test_capacity.py` compares the plan with what an engine allocates.
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

EXAMPLE_RANKS = (8, 16, 32, 64)
EXAMPLE_TARGETS: Mapping[str, tuple[str, ...]] = {
    "q v": ("q_proj", "v_proj"),
    "attention": ATTENTION,
    "all": TARGETS,
}
FP32_BYTES = 4


@dataclass(frozen=True)
class AdapterCost:
    """Memory that one adapter needs.

    packed_bytes: bytes of its packed matrices. pages: pages of its run in the pool.
    host_bytes: fp32 bytes in host memory.
    """

    name: str
    packed_bytes: int
    pages: int
    host_bytes: int


@dataclass(frozen=True)
class Capacity:
    """Memory plan of an engine.

    memory_bytes: memory of the plan.
    weights_bytes: weights of the decoder.
    merged_bytes: second copy of the matrices that known adapters change.
    page_bytes: one page of the pool. block_tokens: tokens of keys and values in a page.
    context_tokens: maximum length of a sequence.
    pages: number of pages that fit in addition to the weights.
    adapters: costs of the adapters in the folder. examples: costs by rank and targets.
    """

    memory_bytes: int
    weights_bytes: int
    merged_bytes: int
    page_bytes: int
    block_tokens: int
    context_tokens: int
    pages: int
    adapters: tuple[AdapterCost, ...]
    examples: tuple[AdapterCost, ...]

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's keys and values."""
        return self.page_bytes / self.block_tokens

    @property
    def sequence_pages(self) -> int:
        """Number of pages of a sequence of maximum length."""
        return -(-self.context_tokens // self.block_tokens)

    @property
    def adapter_pages(self) -> int:
        """Number of pages of all adapters in the folder."""
        return sum(cost.pages for cost in self.adapters)

    def sequences(self, adapter_pages: int) -> int:
        """Return how many sequences of maximum length fit in addition to adapters of some pages."""
        return max(0, self.pages - adapter_pages) // self.sequence_pages


def plan(options: Options, names: Mapping[str, str], memory_bytes: int) -> Capacity:
    """Return the memory plan of an engine with these options.

    names: adapter names, as `config.load_adapter_names` returns them.
    memory_bytes: memory for weights and page pool together.

    Raises InvalidArgument for an unsupported model.
    """
    config = load_config(options.model)
    dtype = dtype_of(options.dtype, options.model)
    store = AdapterStore(
        adapter_shape(options.model, config), options.limits.max_adapter_bytes, dtype, host_bytes=0
    )
    for matrices in lora_groups(config.layers):
        store.group(matrices)
    store.load(find_folders(options.adapters, names), make_resident=False)
    page = page_bytes(config.layers, options.block_size, config.kv_heads, config.head_dim, dtype)
    weights = weights_bytes(config, dtype.itemsize)
    merged = 0
    if options.merging == "out_of_place":
        merged = _merged_bytes(config, store.matrices, dtype.itemsize)
    handles = [store.handle(name) for name in store.names()]
    return Capacity(
        memory_bytes=memory_bytes,
        weights_bytes=weights,
        merged_bytes=merged,
        page_bytes=page,
        block_tokens=options.block_size,
        context_tokens=options.max_model_len or config.context,
        pages=max(0, memory_bytes - weights - merged) // page,
        adapters=tuple(
            _cost(h.name, store.packed_bytes(h), h.description.host_bytes, page) for h in handles
        ),
        examples=tuple(
            _example_cost(config, store, rank, label, page)
            for label in EXAMPLE_TARGETS
            for rank in EXAMPLE_RANKS
        ),
    )


def weights_bytes(config: DecoderConfig, itemsize: int) -> int:
    """Return the bytes of the decoder's weights.

    itemsize: bytes per element of the matrices; norms and biases are fp32.
    """
    return sum(
        math.prod(shape) * (itemsize if len(shape) > 1 else FP32_BYTES)
        for shape in config.weight_shapes.values()
    )


def _cost(name: str, packed_bytes: int, host_bytes: int, page: int) -> AdapterCost:
    return AdapterCost(name, packed_bytes, Run.length(packed_bytes, page), host_bytes)


def _example_cost(
    config: DecoderConfig, store: AdapterStore, rank: int, label: str, page: int
) -> AdapterCost:
    """Return the cost of an adapter of one rank for a set of targets in all layers."""
    ranks: dict[MatrixId, int] = {
        (layer, target): rank for layer in range(config.layers) for target in EXAMPLE_TARGETS[label]
    }
    shapes = [config.target_shapes[target] for _, target in ranks]
    host = sum(rank * sum(shape) * FP32_BYTES for shape in shapes)
    return _cost(f"rank {rank}, {label}", store.bytes_of(ranks), host, page)


def _merged_bytes(config: DecoderConfig, matrices: Iterable[MatrixId], itemsize: int) -> int:
    """Return the bytes of all fused groups that hold one of `matrices`.

    The slab allocates them in huge pages, which is up to one more at each end of a group.
    """
    changed = {
        (layer, group)
        for layer, target in matrices
        for group in GROUPS
        if layer >= 0 and target in group
    }
    return sum(
        math.prod(config.target_shapes[target]) * itemsize
        for _, group in changed
        for target in group
    )
