"""Keys of vLLM's configuration that a `model.json` may have."""

from __future__ import annotations

from typing import Any

RENAMED: dict[str, str] = {"tokenizer": "model"}
"""Keys of vLLM that mean the same as one of our keys. If both are set, their values
must be equal.
"""

ACCEPTED: dict[str, tuple[Any, ...]] = {
    "enable_lora": (True,),
    "trust_remote_code": (False,),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "disable_log_requests": (True, False),
    "enable_log_requests": (True, False),
    "enable_chunked_prefill": (True,),
}
"""Keys of vLLM without an equivalent here. Only the listed values are accepted, because they
describe what this server does.
"""

NO_EFFECT: dict[str, str] = {
    "gpu_memory_utilization": "the size of the page pool is 'kv_cache_tokens', and the share of a"
    " GPU's memory is 'engine_memory_share'",
    "max_loras": "the number of resident adapters is limited by 'adapter_pool_bytes'",
    "max_lora_rank": "each adapter has its own rank, without padding",
}
"""Keys of vLLM's tutorials that have no effect here, with the note to log about them."""

REFUSED: dict[str, str] = {
    "kv_cache_memory_bytes": "set the size of the page pool with 'kv_cache_tokens'",
    "num_gpu_blocks_override": "set the size of the page pool with 'kv_cache_tokens'",
    "swap_space": "preempted requests are recomputed",
    "cpu_offload_gb": "all weights are on one device",
    "max_cpu_loras": "set the bytes of adapters in host memory with 'adapter_host_bytes'",
    "lora_modules": "list adapters in multi_lora.json",
    "limit_mm_per_prompt": "use 'limits': {'max_images': …}",
    "max_logprobs": "the maximum is 20",
    "load_format": "only safetensors are loaded",
    "seed": "send 'seed' with the request",
    "tokenizer_mode": "the checkpoint's fast tokenizer is used",
}
"""Keys of vLLM that are rejected, with our equivalent or the reason."""
