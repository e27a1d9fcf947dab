"""Construction of an engine: loads the model and the adapters, and connects the parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from vlora import backends
from vlora.config import Options
from vlora.engine.admission import Admission
from vlora.engine.calibration import AdapterSizes
from vlora.engine.checks import served_context
from vlora.engine.cost import CostModel, guess
from vlora.engine.memory import EngineMemory
from vlora.engine.policies.registry import make_policy
from vlora.engine.scheduler import Budgets, Scheduler
from vlora.errors import InvalidArgument
from vlora.lora.folders import FolderFinder, FolderWatch, find_folders
from vlora.lora.slab import WeightSlab
from vlora.lora.store import AdapterStore
from vlora.lora.switcher import Switcher
from vlora.memory.available import available_bytes
from vlora.model.decoder_config import DecoderConfig, dtype_of, load_config
from vlora.model.inputs import PromptReader
from vlora.model.loader import adapter_shape, load_weights
from vlora.model.runner import Runner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """Everything that an engine is made of.

    sizes: sizes of adapters by slot.
    max_model_len: context that is served, in tokens.
    merge_is_lossy: whether merged weights are rounded, which is the case below float32.
    """

    config: DecoderConfig
    slab: WeightSlab
    adapters: AdapterStore
    watch: FolderWatch
    memory: EngineMemory
    switcher: Switcher
    runner: Runner
    sizes: AdapterSizes
    costs: CostModel
    scheduler: Scheduler
    admission: Admission
    max_model_len: int
    merge_is_lossy: bool


def load_parts(options: Options, adapter_names: Mapping[str, str]) -> EngineParts:
    """Load the checkpoint and the adapters.

    adapter_names: name → folder, in addition to the folders in `options.adapters`.
    Raises InvalidArgument for a checkpoint or options that cannot be served.
    """
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise InvalidArgument(
            f"'max_num_batched_tokens' = {options.max_num_batched_tokens} must be at least"
            f" 'max_num_seqs' = {options.max_num_seqs}: each running request needs a row a step"
        )
    backends.backend_of("kernels")  # An unknown name must fail here, not in each step.
    config = load_config(options.model)
    dtype = dtype_of(options.dtype, options.model)
    merge_is_lossy = dtype != torch.float32
    weights = load_weights(options.model, config, dtype)
    adapters = AdapterStore(
        adapter_shape(options.model, config, weights.lm_head),
        options.limits.max_adapter_bytes,
        dtype,
        options.adapter_host_bytes,
    )
    adapters.load(find_folders(options.adapters, adapter_names), make_resident=False)
    finder = FolderFinder(options.adapters, adapter_names)
    watch = FolderWatch(finder, adapters.update, retry=adapters.retry)
    pool_tokens = options.kv_cache_tokens // options.block_size * options.block_size
    max_model_len = served_context(options, config.context, pool_tokens)
    memory = EngineMemory(options, config, dtype, adapters, max_model_len)
    switcher = Switcher(weights.slab, adapters, options.merging)
    runner = Runner(config, weights, adapters, switcher, memory.kv_cache)
    memory.attach()
    _limit_merging(options, switcher, memory)
    sizes = AdapterSizes(adapters)
    costs = CostModel(
        guess(weights.slab.base.numel(), dtype.itemsize, weights.lm_head.numel()),
        sizes,
        merged_slot=lambda: switcher.merged,
        can_merge=lambda slot: not options.deterministic and switcher.can_merge(slot),
        in_place=options.merging == "in_place",
    )
    scheduler = Scheduler(
        Budgets(options.max_num_seqs, options.max_num_batched_tokens),
        make_policy(options, costs),
        protect=partial(setattr, adapters, "protected_slot"),
    )
    memory.pool.movers.append(lambda moves: memory.move(scheduler.running, moves))
    reader = PromptReader(options.model, config)
    return EngineParts(
        config=config,
        slab=weights.slab,
        adapters=adapters,
        watch=watch,
        memory=memory,
        switcher=switcher,
        runner=runner,
        sizes=sizes,
        costs=costs,
        scheduler=scheduler,
        admission=Admission(
            config, reader, adapters, memory, options.limits, max_model_len, merge_is_lossy
        ),
        max_model_len=max_model_len,
        merge_is_lossy=merge_is_lossy,
    )


def _limit_merging(options: Options, switcher: Switcher, memory: EngineMemory) -> None:
    """Set the memory for merged weights, and log if it suffices for none."""
    switcher.memory = options.merged_weights_bytes
    if switcher.memory is None and (left := available_bytes()) is not None:
        # The pages' memory is only taken from the system as the pages are first used.
        switcher.memory = max(0, left - memory.kv_cache.cache.nbytes)
    if options.merging != "off" and (reason := switcher.refusal(0)) is not None:
        log.warning("no adapter is merged: %s ('merged_weights_bytes')", reason)
