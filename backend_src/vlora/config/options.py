"""The options of the server, and their valid values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

MODEL_VARIABLE = "VLORA_MODEL"
"""Environment variable that overrides `model` in `model.json`. `vlora serve --model` sets it."""
ADAPTERS_VARIABLE = "VLORA_ADAPTERS"
"""Environment variable that overrides `adapters` in `model.json`. `vlora serve --adapters` sets it.
"""

AUTO: Final = "auto"
DTYPES = ("float32", "bfloat16", "float16", AUTO)
DEVICE = re.compile(r"cpu|auto|cuda(:\d{1,3})?")
"""Pattern of the valid values of `device`."""

POLICIES: dict[str, str] = {
    path.stem: f"vlora.engine.policies.{path.stem}:make"
    for path in sorted((Path(__file__).parents[1] / "engine" / "policies").glob("[!_]*.py"))
    if path.stem not in ("base", "registry")
}
"""Values of `policy`, each with the function that creates it ("module:function").

They are found by their files, without importing them, because that would import torch.
`vlora.engine.policies.registry.register_policy` adds others.
"""

MERGING = ("out_of_place", "in_place", "off")
QUANTIZATIONS = ("int8", "int4")
QUANTIZATION_GROUPS = (32, 64, 128)
IntOrAuto = int | Literal["auto"]


@dataclass(frozen=True)
class Limits:
    """Limits of one request or one adapter. An error about a limit states the value and the limit.

    docs/operations.md has one row on each.
    """

    max_prompt_bytes: int = 1024 * 1024
    # The largest message that gRPC clients receive by default.
    max_answer_bytes: int = 4 * 1024 * 1024
    max_image_megapixels: float = 40.0
    # A decoded pixel takes 3 bytes.
    max_request_megapixels: float = 640.0
    # Does not count the images of the request that is being decoded. So the encoder's decoded
    # images have at most the sum of this limit and `max_request_megapixels`.
    max_batch_megapixels: float = 160.0
    # That of Qwen-VL. Without it, a processor that scales the shorter edge to a fixed length would
    # make a huge image of a long strip.
    max_aspect_ratio: float = 200.0
    max_image_bytes: int = 64 * 1024 * 1024
    max_decode_seconds: float = 10.0
    max_decode_bytes: int = 1024**3
    max_images: int = 64
    max_in_flight_bytes: int = 4 * 1024**3
    max_json_bytes: int = 64 * 1024
    max_metadata_bytes: int = 1024 * 1024
    max_adapter_bytes: int = 4 * 1024**3
    max_choices: int = 256
    max_choices_bytes: int = 16 * 1024
    max_grammar_bytes: int = 64 * 1024
    max_grammar_seconds: float = 2.0
    max_mask_seconds: float = 10.0
    max_grammar_memory: int = 128 * 1024**2
    max_grammars: int = 64


@dataclass(frozen=True)
class Options:
    """Options of the engine and the vision encoder: the keys of `model.json`.

    docs/operations.md has one row on each.

    notes: sentences to log about keys in the file that have no effect. This field is not a key.
    """

    model: Path = Path()
    adapters: Path | None = None
    # Sums, norms, softmax, logits and sampling always use float32.
    dtype: str = "float32"
    device: str = "cpu"
    engine_memory_share: float = 0.8
    encoder_memory_share: float = 0.15
    enforce_eager: bool = False
    quantization: str | None = None
    quantization_group_size: int = 32
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_batch_requests: int | None = None
    policy: str = "unmerge_only"
    theta_min: float = 1.0
    theta_factor: float = 4.0
    max_wait_seconds: float = 30.0
    deterministic: bool = False
    route_adapters: bool = False
    max_num_waiting: int = 1024
    block_size: int = 16
    kv_cache_tokens: int = 32768
    merging: str = "out_of_place"
    # None: the memory that the machine or the container has available at the start, minus pages.
    merged_weights_bytes: int | None = None
    adapter_pool_bytes: IntOrAuto = AUTO
    adapter_host_bytes: int = 4 * 1024**3
    enable_prefix_caching: bool = True
    # "auto": see `cores.split_cores`.
    engine_threads: IntOrAuto = AUTO
    encoder_threads: IntOrAuto = AUTO
    feature_cache_bytes: int = 256 * 1024 * 1024
    disable_log_stats: bool = False
    limits: Limits = field(default_factory=Limits)
    notes: tuple[str, ...] = ()

    @property
    def may_merge(self) -> bool:
        """False if the options alone rule out that an adapter is merged."""
        return self.merging != "off" and not self.deterministic

    @property
    def max_step_requests(self) -> int:
        """Maximum number of requests in a step: the paper's MaxBS."""
        return self.max_batch_requests or self.max_num_seqs
