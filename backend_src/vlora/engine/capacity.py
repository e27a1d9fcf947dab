"""Memory plan of an engine: bytes per part, and the numbers of adapters and sequences that fit.

It is computed from shapes, with the engine's own functions and without reading weights.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vlora.adapters.catalog import find_folders
from vlora.adapters.store import AdapterStore
from vlora.config import Options
from vlora.device.device import Device, PageLayout, require_memory
from vlora.engine.memory import pages_for_adapters
from vlora.ids import MatrixId
from vlora.kernels.formats import Format
from vlora.memory.kv_cache import page_bytes
from vlora.memory.pool import Run
from vlora.model.decoder import lora_groups
from vlora.model.decoder_config import (
    DecoderConfig,
    dtype_of,
    lm_head_format,
    load_config,
    quantization_of,
)
from vlora.model.inputs import PromptReader
from vlora.model.loader import adapter_shape
from vlora.model.switcher import MAX_PREPARED
from vlora.model.weight_files import open_weights, weight_files
from vlora.model.workspace import FP32_BYTES, workspace_bytes
from vlora.weights.quantized_slab import padded_bytes
from vlora.weights.slab import ATTENTION, GROUPS, TARGETS

EXAMPLE_RANKS = (8, 16, 32, 64)
EXAMPLE_TARGETS: Mapping[str, tuple[str, ...]] = {
    "q v": ("q_proj", "v_proj"),
    "attention": ATTENTION,
    "all": TARGETS,
}

# Private memory of vision_encoder, and of lmm_unary and task_head, which import less, relative to
# that of this process, measured with the demo.
OTHER_MODELS = 1 + 2 * 0.6
# Bytes of launcher, guard, tritonserver, one image decoder and the gateway, measured with the demo.
OTHER_BYTES = 160 << 20

# Bytes per logit beside `step_bytes`: the output in the dtype of the weights, its fp32 copy for
# CUDA graphs, and the id of a candidate token in sampling take at most 4 each.
LOGIT_BYTES = 12


@dataclass(frozen=True)
class AdapterCost:
    """Size of an adapter: bytes of its packed copy, pages that it needs, bytes of its host copy."""

    name: str
    packed_bytes: int
    pages: int
    host_bytes: int


@dataclass(frozen=True)
class Capacity:
    """Memory plan of an engine. All sizes are in bytes.

    process_bytes: memory of interpreter, libraries and tokenizer.
    others_bytes: memory of all other processes of a server, such as the encoder's.
    merged_bytes: merged copy of the matrices that known adapters change.
    step_bytes: intermediate results of the largest step.
    host_bytes: host copies of adapters.
    block_tokens, context_tokens: tokens of a page, and of the longest sequence.
    configured_pages: number of pages that the pool has with these options.
    adapters, examples: known adapters, and example adapters with different ranks and targets.
    """

    memory_bytes: int
    process_bytes: int
    weights_bytes: int
    merged_bytes: int
    step_bytes: int
    host_bytes: int
    page_bytes: int
    block_tokens: int
    context_tokens: int
    configured_pages: int
    adapters: tuple[AdapterCost, ...]
    examples: tuple[AdapterCost, ...]
    others_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Sum in bytes of all parts except the page pool."""
        parts = (self.weights_bytes, self.merged_bytes, self.step_bytes, self.host_bytes)
        return self.process_bytes + self.others_bytes + sum(parts)

    @property
    def configured_bytes(self) -> int:
        """Size in bytes of an engine with these options: all parts, and the configured pages."""
        return self.fixed_bytes + self.configured_pages * self.page_bytes

    @property
    def pages(self) -> int:
        """Number of pages that fit into the memory that all other parts leave."""
        return max(0, self.memory_bytes - self.fixed_bytes) // self.page_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's keys and values."""
        return self.page_bytes / self.block_tokens

    @property
    def sequence_pages(self) -> int:
        """Number of pages that a sequence of maximum length needs."""
        return -(-self.context_tokens // self.block_tokens)

    @property
    def adapter_pages(self) -> int:
        """Number of pages that all known adapters need together."""
        return sum(cost.pages for cost in self.adapters)

    def sequences(self, adapter_pages: int) -> int:
        """Return the number of longest sequences that fit beside adapters with this many pages."""
        return max(0, self.pages - adapter_pages) // self.sequence_pages

    def sequences_beside(self, count: int, cost: AdapterCost) -> int:
        """Return the number of longest sequences that fit beside adapters of equal cost.

        count: number of these adapters. All are resident, and they replace the known adapters.
        """
        fixed = self.fixed_bytes - self.host_bytes + count * cost.host_bytes
        pages = max(0, self.memory_bytes - fixed) // self.page_bytes
        return max(0, pages - count * cost.pages) // self.sequence_pages


def plan(
    options: Options,
    names: Mapping[str, str],
    memory_bytes: int,
    process_bytes: int = 0,
    layout: PageLayout = "panels",
    others_bytes: int = 0,
) -> Capacity:
    """Return the memory plan of an engine with these options.

    names: name → folder of adapters, as `config.load_adapter_names` returns them.
    memory_bytes: available memory, of which interpreter and libraries use `process_bytes`, and the
        other processes `others_bytes`.
    layout: layout of keys and values in a page on the engine's device.

    Raises InvalidArgument for an unsupported model.
    """
    config = load_config(options.model)
    dtype = dtype_of(options.dtype, options.model)
    store = _store(options, names, config, dtype)
    sizes = config.layers, options.block_size, config.kv_heads, config.head_dim
    page = page_bytes(*sizes, dtype, layout)
    form = quantization_of(options, config)
    weights = weights_bytes(config, dtype.itemsize, form)
    merged = 0
    if options.merging == "out_of_place" and form is None:
        merged = _merged_bytes(config, store.slots.matrices, dtype.itemsize)
    adapters = _costs(store, page)
    adapter_pages = pages_for_adapters(options, page, sum(cost.pages for cost in adapters))
    return Capacity(
        memory_bytes=memory_bytes,
        process_bytes=process_bytes,
        weights_bytes=weights,
        merged_bytes=merged,
        step_bytes=step_bytes(config, options.max_num_batched_tokens, options.max_num_seqs),
        host_bytes=_host_bytes(adapters, adapter_pages, options.adapter_host_bytes),
        page_bytes=page,
        block_tokens=options.block_size,
        context_tokens=options.max_model_len or config.context,
        configured_pages=options.kv_cache_tokens // options.block_size + adapter_pages,
        adapters=adapters,
        others_bytes=others_bytes,
        examples=tuple(
            _example_cost(config, store, rank, label, page)
            for label in EXAMPLE_TARGETS
            for rank in EXAMPLE_RANKS
        ),
    )


def _costs(store: AdapterStore, page: int) -> tuple[AdapterCost, ...]:
    """Return the cost of each adapter of a store, with pages of `page` bytes."""
    handles = (store.handle(name) for name in store.names())
    return tuple(
        _cost(h.name, store.tiers.packed_bytes(h), h.description.host_bytes, page) for h in handles
    )


def _store(
    options: Options, names: Mapping[str, str], config: DecoderConfig, dtype: torch.dtype
) -> AdapterStore:
    """Return a store that has read all adapters and has no pages."""
    limit = options.limits.max_adapter_bytes
    store = AdapterStore(adapter_shape(options.model, config), limit, dtype, host_bytes=0)
    for matrices in lora_groups(config.layers):
        store.slots.group(matrices)
    store.load(find_folders(options.adapters, names))
    return store


def weights_bytes(config: DecoderConfig, itemsize: int, form: Format | None = None) -> int:
    """Return the size in bytes of the decoder's weights. Norms and biases are fp32.

    itemsize: bytes per element of matrices.
    form: format of the target matrices, if they are quantized.
    """
    total = sum(
        math.prod(shape) * (itemsize if len(shape) > 1 else FP32_BYTES)
        for shape in config.weight_shapes.values()
    )
    if form is None:
        return total
    shapes = config.target_shapes
    stored = sum(math.prod(shape) for shape in shapes.values()) * itemsize
    total += config.layers * (sum(padded_bytes(form, group, shapes) for group in GROUPS) - stored)
    head_form, head = lm_head_format(form, config), (config.vocabulary, config.hidden)
    if head_form is not None:
        # If the head is tied, its quantized copy is added; the embedding stays as it is.
        total += head_form.matrix_bytes(*head) - (0 if config.tied else math.prod(head) * itemsize)
    return total


def step_bytes(config: DecoderConfig, rows: int, sequences: int) -> int:
    """Return the bytes of a step's intermediate results, with one row of logits per sequence."""
    logits = 2 * min(rows, sequences) * config.vocabulary
    return workspace_bytes(config, rows) + (rows * config.hidden + logits) * FP32_BYTES


def _host_bytes(adapters: Sequence[AdapterCost], pages: int, budget: int) -> int:
    """Return the maximum bytes of host copies. `budget` limits those that are not resident."""
    resident = 0
    for cost in sorted(adapters, key=lambda cost: cost.pages):
        pages -= cost.pages
        if pages >= 0:
            resident += cost.host_bytes
    return min(sum(cost.host_bytes for cost in adapters), max(budget, resident))


def process_bytes(options: Options) -> int:
    """Return the bytes of this process with the tokenizer: about what an engine needs besides."""
    PromptReader(options.model, load_config(options.model))
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def private_bytes() -> int:
    """Return the bytes that only this process has, the measure of those of small models."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(size) for size in re.findall(r"Private_\w+: +(\d+) kB", rollup)) << 10


def others_bytes(options: Options, private: int) -> int:
    """Return about the bytes of a server's processes besides `lmm`, with a full feature cache.

    private: `private_bytes` of a process after `process_bytes`.
    """
    config, stored = load_config(options.model), 0
    for file in weight_files(options.model):
        opened = open_weights(file)
        shapes = (opened.get_slice(key).get_shape() for key in opened.keys())  # noqa: SIM118
        stored += sum(map(math.prod, shapes))
    decoder = sum(map(math.prod, config.weight_shapes.values()))
    # The tower is stored in float32. In quantized checkpoints, the decoder has fewer elements.
    tower = max(0, stored - decoder) * FP32_BYTES if config.image_token is not None else 0
    return int(OTHER_MODELS * private) + OTHER_BYTES + tower + options.feature_cache_bytes


def replicas_bytes(options: Options, names: Mapping[str, str], replicas: int) -> int:
    """Return about the bytes of several servers with these options, which share their libraries."""
    process = process_bytes(options)
    private = private_bytes()
    others = others_bytes(options, private)
    each = plan(options, names, 0, private, others_bytes=others).configured_bytes
    return process - private + replicas * each


def _cost(name: str, packed_bytes: int, host_bytes: int, page: int) -> AdapterCost:
    return AdapterCost(name, packed_bytes, Run.length(packed_bytes, page), host_bytes)


def _example_cost(
    config: DecoderConfig, store: AdapterStore, rank: int, label: str, page: int
) -> AdapterCost:
    ranks: dict[MatrixId, int] = {
        (layer, target): rank for layer in range(config.layers) for target in EXAMPLE_TARGETS[label]
    }
    shapes = [config.target_shapes[target] for _, target in ranks]
    host = sum(rank * sum(shape) * FP32_BYTES for shape in shapes)
    return _cost(f"rank {rank}, {label}", store.slots.bytes_of(ranks), host, page)


def _merged_bytes(config: DecoderConfig, matrices: Iterable[MatrixId], itemsize: int) -> int:
    """Return the size in bytes of all fused groups that contain one of `matrices`."""
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


def require_engine_memory(options: Options, names: Mapping[str, str], device: Device) -> None:
    """Raise OutOfMemory, with the sizes, if the engine does not fit the memory of its device.

    Merged weights are not counted, because adapters are merged only if memory is left. A device
    that commits memory only at its first use, such as the CPU, is not checked.
    """
    left = device.available_bytes()
    if device.commits_lazily or left is None:
        return
    capacity = plan(options, names, left, layout=device.page_layout)
    pool = capacity.configured_pages * capacity.page_bytes
    sampled = min(options.max_num_batched_tokens, options.max_num_seqs)
    logits = sampled * load_config(options.model).vocabulary * LOGIT_BYTES
    require_memory(
        device,
        {
            "weights": capacity.weights_bytes,
            "pages for keys, values and adapters": pool,
            # Adapters in the pool are copied for a step, which needs this memory again.
            "adapters": min(capacity.adapter_pages * capacity.page_bytes, pool),
            "the largest step": capacity.step_bytes + logits,
        },
        "raise 'engine_memory_share', or reduce 'kv_cache_tokens', 'adapter_pool_bytes' or"
        " 'max_num_batched_tokens'",
    )


def merge_factor_bytes(adapters: AdapterStore) -> int:
    """Return the maximum size in bytes of A and B of MAX_PREPARED adapters on the GPU."""
    sizes = (adapters.handle(name).description.host_bytes for name in adapters.names())
    return sum(sorted(sizes)[-MAX_PREPARED:])
