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
    """Limits of one request or one adapter.

    An error about a limit states the value and the limit.
    """

    max_prompt_bytes: int = 1024 * 1024
    """Maximum size of a prompt in bytes."""

    max_answer_bytes: int = 4 * 1024 * 1024
    """Maximum size in bytes of an answer that `task_head` reads.

    The default is the largest message that gRPC clients receive by default.
    """

    max_image_megapixels: float = 40.0
    """Maximum size of one image or frame in megapixels."""

    max_request_megapixels: float = 640.0
    """Maximum size in megapixels of all images and frames of a request together. A decoded pixel
    takes 3 bytes.
    """

    max_batch_megapixels: float = 160.0
    """Maximum size in megapixels of the decoded images of several requests that the encoder holds
    at the same time.

    A larger batch is encoded in parts. The limit does not count the images of the request that is
    being decoded. So the encoder's decoded images have at most the sum of this limit and
    `max_request_megapixels`.
    """

    max_aspect_ratio: float = 200.0
    """Maximum ratio of an image's longer edge to its shorter edge; the default is that of Qwen-VL.

    Without this limit, a processor that scales the shorter edge to a fixed length would make a huge
    image of a long strip.
    """

    max_image_bytes: int = 64 * 1024 * 1024
    """Maximum size of an encoded image or clip in bytes."""

    max_decode_seconds: float = 10.0
    """Maximum processor time in seconds for decoding the images and frames of a request."""

    max_decode_bytes: int = 1024**3
    """Maximum memory in bytes for decoding one image or frame, including its encoded bytes."""

    max_images: int = 64
    """Maximum number of images and frames of a request."""

    max_in_flight_bytes: int = 4 * 1024**3
    """Maximum size in bytes of the images and features of all requests that have not ended."""

    max_json_bytes: int = 64 * 1024
    """Maximum size in bytes of an input that is JSON."""

    max_metadata_bytes: int = 1024 * 1024
    """Maximum size in bytes of the metadata of a request."""

    max_adapter_bytes: int = 4 * 1024**3
    """Maximum size in bytes of one adapter's weights, in float32."""

    max_choices: int = 256
    """Maximum number of texts in the sampling key `choices`, one of which is the answer."""

    max_choices_bytes: int = 16 * 1024
    """Maximum size in bytes of all texts in the sampling key `choices`."""

    max_grammar_bytes: int = 64 * 1024
    """Maximum size in bytes of `structured_outputs`."""

    max_grammar_seconds: float = 2.0
    """Maximum processor time in seconds for compiling `structured_outputs`, and for each token
    mask.
    """

    max_mask_seconds: float = 10.0
    """Maximum processor time in seconds for all token masks of an answer."""

    max_grammar_memory: int = 128 * 1024**2
    """Maximum memory in bytes for compiling `structured_outputs` and computing its token masks."""

    max_grammars: int = 64
    """Maximum number of different `structured_outputs` among the requests that have not ended."""


@dataclass(frozen=True)
class Options:
    """Options of the engine and the vision encoder: the keys of `model.json`."""

    model: Path = Path()
    """Folder of the checkpoint. A relative path starts at the folder of `model.json`."""

    adapters: Path | None = None
    """Folder of the adapters. A relative path starts at the folder of `model.json`."""

    dtype: str = "float32"
    """Storage type of weights, KV and the vision tower: "float32", "bfloat16", "float16" or "auto".

    "float16" needs a GPU; the vision tower then stays in float32, because its values may exceed the
    range of float16.
    "auto" is bfloat16 for a checkpoint that is stored in bfloat16, else float32. Sums, norms,
    softmax, logits and sampling always use float32.
    """

    device: str = "cpu"
    """Device of the engine and the encoder: "cpu", "cuda", "cuda:N" or "auto".

    "auto" is the first GPU that can be used, else the CPU. No GPU has run the engine yet.
    Quantized weights need the CPU.
    """

    engine_memory_share: float = 0.8
    """Maximum share of a GPU's memory that the engine may take."""

    encoder_memory_share: float = 0.15
    """Maximum share of a GPU's memory that the encoder may take."""

    enforce_eager: bool = False
    """True to launch each kernel of a decoding step by itself on a GPU, without CUDA graphs."""

    quantization: str | None = None
    """Type to which the decoder's linear layers are quantized at load: "int8" or "int4".

    int8 has one scale per output. int4 has one scale per `quantization_group_size` inputs of an
    output. The LM head becomes int8 with both. A checkpoint that is stored quantized needs no
    option. Adapters are never merged into quantized weights.
    """

    quantization_group_size: int = 32
    """Number of weights that share a scale in int4: 32, 64 or 128."""

    max_model_len: int | None = None
    """Maximum number of tokens of a sequence; None: the checkpoint's maximum."""

    max_num_seqs: int = 64
    """Maximum number of running requests."""

    max_num_batched_tokens: int = 1024
    """Maximum number of tokens that one step computes."""

    max_batch_requests: int | None = None
    """Maximum number of requests in a step (the paper's MaxBS); None: `max_num_seqs`.

    Running requests that are not in a step are paused.
    """

    policy: str = "unmerge_only"
    """Policy that chooses the requests of each step and the adapter to merge into the weights.

    "unmerge_only" takes requests in order of arrival and merges no adapter. "predictive" uses the
    cost model. "credit" is the paper's Algorithm 1 with our changes, "paper" without them.
    """

    theta_min: float = 1.0
    """Lower bound of the threshold θ in seconds, for "credit" and "paper". A request whose credit
    exceeds θ counts as starved.
    """

    theta_factor: float = 4.0
    """Lower bound of the threshold θ as a multiple of the median wait, for "credit"."""

    max_wait_seconds: float = 30.0
    """Seconds of waiting after which a request is scheduled before all others.

    "credit" then counts the request as starved. "paper" has no such limit.
    """

    deterministic: bool = False
    """True to merge no adapters.

    The answer to a request then does not depend on other running requests, even in bfloat16.
    """

    route_adapters: bool = False
    """True to choose an adapter for requests that name none, by task and question.

    A request whose `lora_name` is null then asks for the base model.
    """

    max_num_waiting: int = 1024
    """Maximum length of the queue. Further requests are rejected with UNAVAILABLE."""

    block_size: int = 16
    """Number of tokens per KV page."""

    kv_cache_tokens: int = 32768
    """Size of the page pool for KV, in tokens. KV may also use the adapters' unused pages."""

    merging: str = "out_of_place"
    """Method of merging an adapter into the weights.

    "out_of_place" writes to a second copy of the weights. "in_place", the paper's way, needs no
    copy, but accumulates rounding errors. "off" never merges.
    """

    merged_weights_bytes: int | None = None
    """Maximum size in bytes of merged weights. If they need more, no adapter is merged.

    None: the memory that the machine or the container has available at the start, minus the pages.
    """

    adapter_pool_bytes: IntOrAuto = AUTO
    """Size in bytes of the pages for packed adapters, in addition to `kv_cache_tokens`.

    "auto": the size of all known adapters, at most 1 GiB. Adapters may also use unused pages of KV.
    """

    adapter_host_bytes: int = 4 * 1024**3
    """Maximum size in bytes of adapters in host memory, in float32.

    Adapters in use stay in host memory even if they exceed this size.
    """

    enable_prefix_caching: bool = True
    """True to cache the KV of full blocks for later prompts with the same prefix."""

    engine_threads: IntOrAuto = AUTO
    """Number of threads of the engine's process; "auto": see `cores.split_cores`."""

    encoder_threads: IntOrAuto = AUTO
    """Number of threads of the encoder's process; "auto": see `cores.split_cores`."""

    feature_cache_bytes: int = 256 * 1024 * 1024
    """Maximum size in bytes of the encoder's cache of image features; 0 turns the cache off."""

    disable_log_stats: bool = False
    """True to export only Triton's own metrics."""

    limits: Limits = field(default_factory=Limits)
    """Limits of one request or one adapter."""

    notes: tuple[str, ...] = ()
    """Sentences to log about keys in the file that have no effect. This field is not
    itself a key.
    """

    @property
    def may_merge(self) -> bool:
        """False if the options alone rule out that an adapter is merged."""
        return self.merging != "off" and not self.deterministic

    @property
    def max_step_requests(self) -> int:
        """Maximum number of requests in a step: the paper's MaxBS."""
        return self.max_batch_requests or self.max_num_seqs
