"""Construction of an engine from its options."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from vlora import backends
from vlora.adapters.catalog import FolderFinder, FolderWatch, find_folders
from vlora.adapters.errors import as_text
from vlora.adapters.store import AdapterStore
from vlora.atmm.cuda import operator
from vlora.config import AUTO, Options
from vlora.device.cuda import open_device
from vlora.device.device import HOST, Device, require_dtype
from vlora.engine.calibration import AdapterSizes
from vlora.engine.capacity import merge_factor_bytes, require_engine_memory
from vlora.engine.checks import served_context
from vlora.engine.cost import CostModel, guess
from vlora.engine.memory import EngineMemory
from vlora.engine.policies.base import make_policy
from vlora.engine.requests import Admission
from vlora.engine.scheduler import Budgets, Scheduler
from vlora.errors import InvalidArgument
from vlora.model.decoder_config import DecoderConfig, dtype_of, load_config, quantization_of
from vlora.model.inputs import PromptReader
from vlora.model.loader import DecoderWeights, adapter_shape, load_weights
from vlora.model.runner import Runner, StepSizes
from vlora.model.switcher import Switcher
from vlora.weights.quantized_slab import QuantizedSlab
from vlora.weights.slab import WeightSlab

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """The components of an engine.

    merge_is_lossy: whether merged weights are rounded to a type of 16 bits.
    """

    config: DecoderConfig
    slab: WeightSlab | QuantizedSlab
    adapters: AdapterStore
    watch: FolderWatch
    memory: EngineMemory
    switcher: Switcher
    runner: Runner
    costs: CostModel
    scheduler: Scheduler
    admission: Admission
    max_model_len: int
    merge_is_lossy: bool


def load_parts(options: Options, adapter_names: Mapping[str, str]) -> EngineParts:
    """Load the checkpoint and the adapters, and return the connected parts of the engine.

    adapter_names: name → folder, in addition to the folders in `options.adapters`.

    Raises InvalidArgument for a checkpoint or options that cannot be served.
    """
    config = load_config(options.model)
    dtype = dtype_of(options.dtype, options.model)
    merge_is_lossy = dtype != torch.float32
    device, weights = _load_weights(options, adapter_names, config, dtype)
    shape = adapter_shape(options.model, config, weights)
    limit = options.limits.max_adapter_bytes
    adapters = AdapterStore(
        shape, limit, dtype, options.adapter_host_bytes, device, options.pinned_adapters
    )
    watch = _load_adapters(options, adapter_names, adapters)
    pool_tokens = options.kv_cache_tokens // options.block_size * options.block_size
    max_model_len = served_context(options, config.context, pool_tokens)
    memory = EngineMemory(options, config, dtype, adapters, max_model_len, device)
    switcher = Switcher(weights.slab, adapters.slots, options.merging)
    sizes = StepSizes(options.max_num_batched_tokens, options.max_num_seqs, max_model_len)
    graph_sizes = None if options.enforce_eager else sizes
    runner = Runner(config, weights, adapters.slots, switcher, memory.kv_cache, graph_sizes)
    memory.attach()
    costs = _cost_model(options, weights, dtype, adapters, switcher)
    scheduler = _scheduler(options, costs, adapters)
    may_merge = options.may_merge and scheduler.policy.merges
    _limit_merging(options, switcher, memory, adapters, device, reserve=may_merge)
    memory.pool.movers.append(lambda moves: memory.move(scheduler.running, moves))
    reader = PromptReader(options.model, config, options.video_pruning_rate)
    admission = Admission(
        config, reader, adapters, memory, options.limits, max_model_len, merge_is_lossy
    )
    return EngineParts(
        config,
        weights.slab,
        adapters,
        watch,
        memory,
        switcher,
        runner,
        costs,
        scheduler,
        admission,
        max_model_len,
        merge_is_lossy,
    )


def _scheduler(options: Options, costs: CostModel, adapters: AdapterStore) -> Scheduler:
    return Scheduler(
        Budgets(options.max_num_seqs, options.max_num_batched_tokens),
        make_policy(options, costs),
        protect=partial(setattr, adapters.tiers.residents, "protected_slot"),
    )


def engine_device(options: Options, *, quantized: bool = False) -> Device:
    """Return the device that `device` selects; for quantized weights, "auto" selects the CPU.

    Raises InvalidArgument if the GPU cannot be used, or the weights are quantized.
    """
    device = open_device(options.device, options.engine_memory_share)
    if quantized and device is not HOST:
        reason = "quantized weights are only served on the CPU so far"
        if options.device != AUTO:
            raise InvalidArgument(f"'device' = '{options.device}', but {reason}; use \"cpu\"")
        log.warning("the GPU '%s' is not used: %s", device.name, reason)
        device = HOST
    log.info("device: %s", device.name)
    return device


def _load_weights(
    options: Options, adapter_names: Mapping[str, str], config: DecoderConfig, dtype: torch.dtype
) -> tuple[Device, DecoderWeights]:
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise InvalidArgument(
            f"'max_num_batched_tokens' = {options.max_num_batched_tokens} must be at least"
            f" 'max_num_seqs' = {options.max_num_seqs}: each running request needs one row per step"
        )
    quantization = quantization_of(options, config)
    device = engine_device(options, quantized=quantization is not None)
    # A backend that cannot be used must fail at the start, not in each step.
    backends.backend_of("kernels", device.torch_device.type)
    backends.backend_of("atmm", device.torch_device.type, operator.current)
    require_dtype(device, dtype)
    require_engine_memory(options, adapter_names, device)
    return device, load_weights(options.model, config, dtype, quantization, device)


def _load_adapters(
    options: Options, names: Mapping[str, str], adapters: AdapterStore
) -> FolderWatch:
    adapters.load(find_folders(options.adapters, names))
    if missing := sorted(set(options.pinned_adapters) - set(adapters.names())):
        listed = ", ".join(map(as_text, missing))
        log.warning("'pinned_adapters' has names without an adapter yet: %s", listed)
    finder = FolderFinder(options.adapters, names)
    return FolderWatch(finder, adapters.folders.update, retry=adapters.folders.retry)


def _cost_model(
    options: Options,
    weights: DecoderWeights,
    dtype: torch.dtype,
    adapters: AdapterStore,
    switcher: Switcher,
) -> CostModel:
    slab, head = weights.slab, math.prod(weights.lm_head.shape)
    return CostModel(
        guess(slab.elements, dtype.itemsize, head, stored=slab.nbytes),
        AdapterSizes(adapters.slots),
        merged_slot=lambda: switcher.merged,
        can_merge=lambda slot: options.may_merge and switcher.can_merge(slot),
        in_place=options.merging == "in_place",
    )


def _limit_merging(
    options: Options,
    switcher: Switcher,
    memory: EngineMemory,
    adapters: AdapterStore,
    device: Device,
    *,
    reserve: bool,
) -> None:
    """Set the limit of memory for merged weights, which are allocated now if `reserve`."""
    switcher.memory = options.merged_weights_bytes
    if switcher.memory is None and (left := device.available_bytes()) is not None:
        # Pages and factors are going to be used but still count as available.
        pages = memory.kv_cache.cache.nbytes if device.commits_lazily else 0
        factors = 0 if device.in_host_memory else merge_factor_bytes(adapters)
        switcher.memory = max(0, left - pages - factors)
    if options.merging != "off" and (reason := switcher.refusal_of_all()) is not None:
        # Quantized weights cannot be merged, so this is not a mistake in the options.
        if isinstance(switcher.stored, QuantizedSlab):
            log.info("no adapter is merged: %s", reason)
        else:
            log.warning("no adapter is merged: %s ('merged_weights_bytes')", reason)
    elif reserve and not device.commits_lazily:
        switcher.reserve()
