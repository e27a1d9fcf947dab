"""The options of the server, and their valid values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

MODEL_VARIABLE = "VLORA_MODEL"
ADAPTERS_VARIABLE = "VLORA_ADAPTERS"
"""Environment variables with which `vlora serve --model/--adapters` overrides `model.json`."""

AUTO: Final = "auto"
DTYPES = ("float32", "bfloat16", AUTO)
POLICIES: dict[str, str] = {
    "predictive": "vlora.engine.policies.predictive:make",
    "credit": "vlora.engine.policies.credit:make_credit",
    "paper": "vlora.engine.policies.credit:make_paper",
    "unmerge_only": "vlora.engine.policies.unmerge_only:make",
}
"""Values of `policy`, each with the function that creates it ("module:function").

`vlora.engine.policies.registry.register_policy` adds further ones.
"""

MERGING = ("out_of_place", "in_place", "off")
IntOrAuto = int | Literal["auto"]


@dataclass(frozen=True)
class Limits:
    """Limits of one request or one adapter. An error for a limit has the value and the limit."""

    max_prompt_bytes: int = 1024 * 1024
    """Maximum size of a prompt."""

    max_answer_bytes: int = 4 * 1024 * 1024
    """Maximum size of an answer that `task_head` reads.

    The default holds what gRPC clients receive by default.
    """

    max_image_megapixels: float = 40.0
    """Maximum size of one image or frame."""

    max_request_megapixels: float = 640.0
    """Maximum size of all images and frames of a request; a decoded pixel takes 3 bytes."""

    max_batch_megapixels: float = 160.0
    """Maximum size of the decoded images of several requests that the encoder holds.

    A larger batch is encoded in parts. The images of the request that is being decoded come on top,
    so the encoder's memory is bounded by the sum of both limits.
    """

    max_aspect_ratio: float = 200.0
    """Maximum ratio of the longer edge of an image to the shorter one, as in Qwen-VL.

    A processor that scales the short edge to a fixed length would enlarge a long strip extremely.
    """

    max_image_bytes: int = 64 * 1024 * 1024
    """Maximum size of an encoded image or clip."""

    max_images: int = 64
    """Maximum number of images and frames of a request."""

    max_json_bytes: int = 64 * 1024
    """Maximum size of an input that is JSON."""

    max_metadata_bytes: int = 1024 * 1024
    """Maximum size of the metadata of a request."""

    max_adapter_bytes: int = 4 * 1024**3
    """Maximum size of one adapter's weights, in float32."""

    max_choices: int = 256
    """Maximum number of choices of a request."""

    max_choices_bytes: int = 16 * 1024
    """Maximum size of all choices of a request."""


@dataclass(frozen=True)
class Options:
    """Options of the engine and the vision encoder: the keys of `model.json`."""

    model: Path = Path()
    """Folder of the checkpoint. A relative path starts at the file's folder."""

    adapters: Path | None = None
    """Folder of the adapters. A relative path starts at the file's folder."""

    dtype: str = "float32"
    """Storage type of weights, KV and the vision tower: "float32", "bfloat16" or "auto".

    "auto" is bfloat16 for a checkpoint that is stored in bfloat16, else float32. Sums, norms,
    softmax, logits and sampling always use float32.
    """

    max_model_len: int | None = None
    """Maximum number of tokens of a sequence; None: the checkpoint's maximum."""

    max_num_seqs: int = 64
    """Maximum number of running requests."""

    max_num_batched_tokens: int = 1024
    """Maximum number of rows of a step."""

    max_batch_requests: int | None = None
    """Maximum number of requests of a step (the paper's MaxBS); None: `max_num_seqs`.

    Running requests that are not in a step are paused.
    """

    policy: str = "unmerge_only"
    """The policy that chooses the next requests and the adapter to merge into the weights.

    "unmerge_only" takes requests in order of arrival and merges no adapter; "predictive" uses the
    cost model; "credit" is the paper's Algorithm 1 with our changes, "paper" without them.
    """

    theta_min: float = 1.0
    """Credit in seconds above which a request starves, for "credit" and "paper"."""

    theta_factor: float = 4.0
    """Multiple of the median wait above which a request starves, for "credit"."""

    max_wait_seconds: float = 30.0
    """Seconds after which a request that is ready but not computed is scheduled first."""

    deterministic: bool = False
    """True to merge no adapters.

    The answer to a request then does not depend on other running requests, even in bfloat16.
    """

    max_num_waiting: int = 1024
    """Maximum length of the queue; further requests are rejected as UNAVAILABLE."""

    block_size: int = 16
    """Number of tokens of a KV page."""

    kv_cache_tokens: int = 32768
    """Size of the page pool for KV, in tokens. KV may also use the adapters' unused pages."""

    merging: str = "out_of_place"
    """Way of merging an adapter into the weights, for the modes merged and mixture.

    "out_of_place" writes to a second copy of the weights; "in_place", the paper's way, needs half
    the memory but accumulates rounding errors; "off" never merges.
    """

    merged_weights_bytes: int | None = None
    """Memory for merged weights; if they need more, adapters are not merged.

    None: the memory that the machine or the container has available at the start.
    """

    adapter_pool_bytes: IntOrAuto = AUTO
    """Size of the page pool for packed adapters, in addition to `kv_cache_tokens`.

    "auto": the size of all known adapters, at most 1 GiB. Adapters may also use the unused pages of
    KV.
    """

    adapter_host_bytes: int = 4 * 1024**3
    """Maximum size of the adapters in host memory, in float32; adapters in use are not limited."""

    enable_prefix_caching: bool = True
    """True to cache the KV of full blocks for later prompts with the same prefix."""

    engine_threads: IntOrAuto = AUTO
    """Number of threads of the engine's process; "auto": see `cores.split_cores`."""

    encoder_threads: IntOrAuto = AUTO
    """Number of threads of the encoder's process; "auto": see `cores.split_cores`."""

    feature_cache_bytes: int = 256 * 1024 * 1024
    """Maximum size of the encoder's image feature cache; 0 turns the cache off."""

    disable_log_stats: bool = False
    """True to export only Triton's own metrics."""

    limits: Limits = field(default_factory=Limits)
    """Limits of one request or one adapter."""

    notes: tuple[str, ...] = ()
    """Sentences about keys of the file that have no effect. This is not a key itself."""

    @property
    def max_step_requests(self) -> int:
        """Maximum number of requests of one step: the paper's MaxBS."""
        return self.max_batch_requests or self.max_num_seqs
