"""Keys of vLLM's configuration that a `model.json` may have."""

from __future__ import annotations

from typing import Any

RENAMED: dict[str, str] = {"tokenizer": "model"}
"""vLLM keys that mean the same as one of ours; they are accepted if both have the same value."""

ACCEPTED: dict[str, tuple[Any, ...]] = {
    "enable_lora": (True,),
    "trust_remote_code": (False,),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "enforce_eager": (True, False),
    "disable_log_requests": (True, False),
    "enable_log_requests": (True, False),
    "enable_chunked_prefill": (True,),
}
"""vLLM keys without an equivalent, with the values that describe what this server does anyway."""

NO_EFFECT: dict[str, str] = {
    "gpu_memory_utilization": "the size of the page pool is 'kv_cache_tokens'",
    "max_loras": "the number of resident adapters is limited by 'adapter_pool_bytes'",
    "max_lora_rank": "each adapter has its own rank, without padding",
}
"""vLLM keys of its tutorials that have no effect here; they are accepted with this note."""

REFUSED: dict[str, str] = {
    "kv_cache_memory_bytes": "set the size of the page pool with 'kv_cache_tokens'",
    "num_gpu_blocks_override": "set the size of the page pool with 'kv_cache_tokens'",
    "swap_space": "preempted requests are recomputed",
    "cpu_offload_gb": "all weights are on one device",
    "max_cpu_loras": "set the bytes of adapters in host memory with 'adapter_host_bytes'",
    "lora_modules": "list adapters in multi_lora.json",
    "limit_mm_per_prompt": "use 'limits': {'max_images': …}",
    "max_logprobs": "the maximum is 20",
    "quantization": "weights are served as they are stored",
    "load_format": "only safetensors are loaded",
    "seed": "send 'seed' with the request",
    "tokenizer_mode": "the checkpoint's fast tokenizer is used",
}
"""vLLM keys that are rejected, with the equivalent or the reason."""
