"""Check at the start that an engine fits the memory of its GPU."""

from __future__ import annotations

from collections.abc import Mapping

from vlora.capacity import plan
from vlora.config import Options
from vlora.lora.store import AdapterStore
from vlora.lora.switcher import MAX_PREPARED
from vlora.memory.device import Device, require_memory
from vlora.model.decoder_config import load_config

LOGIT_BYTES = 12
"""Bytes per logit in addition to those that `capacity.step_bytes` counts.

Three values take at most 4 bytes each: the output of the LM head in the dtype of the weights, its
fp32 copy in the output buffer of the CUDA graphs, and the id of a candidate token in sampling.
"""


def require_engine_memory(options: Options, names: Mapping[str, str], device: Device) -> None:
    """Raise OutOfMemory if the engine does not fit the memory of its device. The message lists the
    sizes.

    Merged weights are not counted, because adapters are merged only if there is memory left for
    them. A device that commits memory only when it is first used, such as the CPU, is not checked.

    names: name → folder of adapters, in addition to those in `options.adapters`.
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
