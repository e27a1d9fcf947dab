"""Options of the server, read once from `lmm/1/model.json` and then frozen.

Strict: an unknown key is an error that names it and its nearest known key, and vLLM's keys are
mapped to ours or refused by name with our equivalent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, get_type_hints

from vlora.errors import InvalidArgument, nearest
from vlora.strict_json import load_object

MODEL_VARIABLE = "VLORA_MODEL"
ADAPTERS_VARIABLE = "VLORA_ADAPTERS"
"""Environment variables by which `vlora serve --model/--adapters` overrides `model.json`."""

AUTO: Final = "auto"
DTYPES = ("float32", "bfloat16", AUTO)
POLICIES: dict[str, str] = {
    "predictive": "vlora.engine.policies.predictive:make",
    "credit": "vlora.engine.policies.credit:make_credit",
    "paper": "vlora.engine.policies.credit:make_paper",
    "unmerge_only": "vlora.engine.policies.unmerge_only:make",
}
"""Values of `policy`, with the function that makes each one ("module:function"). Others are added
by `vlora.engine.policies.registry.register_policy`."""
MERGING = ("out_of_place", "in_place", "off")
Threads = int | Literal["auto"]


@dataclass(frozen=True)
class Limits:
    """What one request may carry; an error that hits one gives the value and the limit.

    max_adapter_bytes: of one adapter's weights, in float32.
    max_request_megapixels: of all its images and frames together, 3 bytes a pixel once decoded.
    max_batch_megapixels: of the requests that the encoder holds decoded beside the one that it
        decodes; a batch with more is encoded in parts. Its memory is bounded by the two together.
    max_aspect_ratio: longer over shorter edge; a processor that fixes the short edge would blow a
        long strip up (200 is the bound of Qwen-VL's).
    """

    max_prompt_bytes: int = 1024 * 1024
    max_image_megapixels: float = 40.0
    max_request_megapixels: float = 640.0
    max_batch_megapixels: float = 160.0
    max_aspect_ratio: float = 200.0
    max_image_bytes: int = 64 * 1024 * 1024
    max_images: int = 64
    max_json_bytes: int = 64 * 1024
    max_metadata_bytes: int = 1024 * 1024
    max_adapter_bytes: int = 4 * 1024**3
    max_choices: int = 256
    max_choices_bytes: int = 16 * 1024


@dataclass(frozen=True)
class Options:
    """Engine and encoder options.

    model, adapters: folders; a relative path is taken from the file's own folder.
    dtype: in which weights, KV and the vision tower are stored: "float32", "bfloat16", or "auto",
        bfloat16 for a checkpoint that is stored so and float32 for all others. Sums, norms,
        softmax, logits and sampling are float32 always.
    max_model_len: context in tokens; None takes the checkpoint's.
    max_num_seqs: requests running at once. max_num_batched_tokens: rows of one step.
    max_batch_requests: requests of one step (the paper's MaxBS); None takes max_num_seqs. Those
        that run and are not among them are paused.
    policy: who runs next and which adapter is merged into the weights: "unmerge_only" goes by
        arrival and merges none; "predictive" asks the cost model; "credit" is the paper's Algorithm
        1 with our departures, "paper" without.
    theta_min, theta_factor: of "credit" (and the first of "paper"): a request starves beyond a
        credit of so many seconds, and of so many times the median wait.
    max_wait_seconds: whoever has been ready so long without being computed goes first.
    deterministic: no adapter is ever merged, so that in bfloat16 too an answer does not depend on
        what else runs.
    max_num_waiting: queue length at which requests are refused with UNAVAILABLE.
    merging: how an adapter comes into the weights (merged and mixture mode): "out_of_place", beside
        the base weights; "in_place", as the paper does it, with half the memory and a drift by
        rounding; "off", never.
    merged_weights_bytes: memory for the merged weights; where they need more, nothing is merged.
        None: what the machine and the container have left at the start.
    block_size: tokens per KV page. kv_cache_tokens: keys and values that the page pool has room
        for, in tokens. adapter_pool_bytes: room that it has for packed adapters besides; "auto" is
        what all that are known need, up to 1 GiB. Each may take of the other's where that is idle.
    adapter_host_bytes: of adapters kept in host memory, in float32; what is in use stays beyond it.
    enable_prefix_caching: keys and values of whole blocks are kept for prompts that begin alike.
    engine_threads, encoder_threads: threads of the two processes; "auto" shares out the cores that
        this process may use (`cores.split_cores`).
    feature_cache_bytes: budget of the encoder's image feature cache; 0 turns it off.
    disable_log_stats: no metrics beside Triton's own.
    notes: what the file says that has no effect here, a sentence each.
    """

    model: Path = Path()
    adapters: Path | None = None
    dtype: str = "float32"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_batch_requests: int | None = None
    policy: str = "unmerge_only"
    theta_min: float = 1.0
    theta_factor: float = 4.0
    max_wait_seconds: float = 30.0
    deterministic: bool = False
    max_num_waiting: int = 1024
    block_size: int = 16
    kv_cache_tokens: int = 32768
    merging: str = "out_of_place"
    merged_weights_bytes: int | None = None
    adapter_pool_bytes: Threads = AUTO
    adapter_host_bytes: int = 4 * 1024**3
    enable_prefix_caching: bool = True
    engine_threads: Threads = AUTO
    encoder_threads: Threads = AUTO
    feature_cache_bytes: int = 256 * 1024 * 1024
    disable_log_stats: bool = False
    limits: Limits = field(default_factory=Limits)
    notes: tuple[str, ...] = ()

    @property
    def max_step_requests(self) -> int:
        """Maximum number of requests of one step: the paper's MaxBS."""
        return self.max_batch_requests or self.max_num_seqs


RENAMED: dict[str, str] = {"tokenizer": "model"}
"""vLLM keys that say what one of ours says; accepted only where the values agree."""

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
"""vLLM keys without an option of ours, with the values that describe what we do anyway."""

NO_EFFECT: dict[str, str] = {
    "gpu_memory_utilization": "the page pool's size is 'kv_cache_tokens'",
    "max_loras": "as many adapters at once as 'adapter_pool_bytes' has room for",
    "max_lora_rank": "each adapter keeps its own rank; nothing is padded",
}
"""vLLM keys that its tutorials' files have and that change nothing here: accepted, with a note."""

REFUSED: dict[str, str] = {
    "kv_cache_memory_bytes": "give the pool's size as 'kv_cache_tokens'",
    "num_gpu_blocks_override": "give the pool's size as 'kv_cache_tokens'",
    "swap_space": "a preempted request is recomputed",
    "cpu_offload_gb": "weights stay on one device",
    "max_cpu_loras": "give their bytes as 'adapter_host_bytes'",
    "lora_modules": "list adapters in multi_lora.json",
    "limit_mm_per_prompt": "use 'limits': {'max_images': …}",
    "max_logprobs": "it is 20",
    "quantization": "weights are served as stored",
    "load_format": "safetensors only",
    "seed": "give 'seed' with the request",
    "tokenizer_mode": "the checkpoint's fast tokenizer is used",
}


def load_options(
    path: Path,
    environment: Mapping[str, str] | None = None,
    replacing: Mapping[str, Any] | None = None,
) -> Options:
    """Options from a `model.json`, with the keys of `replacing` instead of its own and the
    environment's overrides, checked.

    Raises InvalidArgument naming the file, the key and what would be right.
    """
    given = read_keys(path) | dict(replacing or {})
    options = parse_options(given, where=str(path), folder=path.parent)
    environment = os.environ if environment is None else environment
    if environment.get(MODEL_VARIABLE):
        options = replace(options, model=Path(environment[MODEL_VARIABLE]).resolve())
    if environment.get(ADAPTERS_VARIABLE):
        options = replace(options, adapters=Path(environment[ADAPTERS_VARIABLE]).resolve())
    return options


def load_adapter_names(path: Path) -> dict[str, str]:
    """`multi_lora.json`, name → folder relative to the adapter root; empty without the file."""
    if not path.is_file():
        return {}
    given = read_keys(path)
    if not all(isinstance(value, str) for value in given.values()):
        raise InvalidArgument(f"{path} must hold a JSON object of adapter name → folder")
    return given


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a JSON file, unchecked; InvalidArgument where it holds no JSON object."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {path}: {error}") from error
    return load_object(text, str(path))


def parse_options(given: Mapping[str, Any], where: str, folder: Path) -> Options:
    """Options from a JSON object; relative paths are resolved against `folder`."""
    values: dict[str, Any] = {}
    notes = []
    for key, value in given.items():
        if key in REFUSED:
            raise InvalidArgument(f"{where}: '{key}' is not used here: {REFUSED[key]}")
        if key in NO_EFFECT:
            notes.append(f"{where}: '{key}' has no effect here: {NO_EFFECT[key]}")
            continue
        if key in ACCEPTED:
            if _boolean(value) not in ACCEPTED[key]:
                right = " or ".join(json.dumps(v) for v in ACCEPTED[key])
                raise InvalidArgument(
                    f"{where}: '{key}' = {json.dumps(value)} is not supported; it may be {right}"
                )
            continue
        if key in RENAMED:
            if value != given.get(RENAMED[key]):
                raise InvalidArgument(
                    f"{where}: '{key}' must equal '{RENAMED[key]}': both come from one folder"
                )
            continue
        values[key] = value
    if "model" not in values:
        raise InvalidArgument(f"{where}: 'model' is missing: the checkpoint's folder")
    if isinstance(values.get("limits"), dict):
        values["limits"] = Limits(**_checked(Limits, values["limits"], f"{where}: limits"))
    options = Options(**_checked(Options, values, where))
    if options.dtype not in DTYPES:
        raise InvalidArgument(
            f"{where}: 'dtype' = '{options.dtype}' is not served; it may be {', '.join(DTYPES)}"
        )
    if options.merging not in MERGING:
        raise InvalidArgument(
            f"{where}: 'merging' = '{options.merging}' is unknown; it may be {', '.join(MERGING)}"
        )
    check_policy(options.policy, f"{where}: ")
    adapters = options.adapters
    return replace(
        options,
        notes=tuple(notes),
        model=(folder / options.model).resolve(),
        adapters=None if adapters is None else (folder / adapters).resolve(),
    )


def check_policy(name: str, prefix: str = "") -> None:
    """Raise InvalidArgument, listing the valid names, unless a policy of this name is registered.

    prefix: beginning of the message, e.g. the file that holds the option.
    """
    if name not in POLICIES:
        raise InvalidArgument(
            f"{prefix}'policy' = '{name}' is unknown{nearest(name, POLICIES)}"
            f" It may be {', '.join(POLICIES)}"
        )


def _boolean(value: Any) -> Any:
    """`value`, or the boolean that it spells: vLLM's tutorials write them as strings."""
    spelt = {"true": True, "false": False}
    return spelt.get(value.lower(), value) if isinstance(value, str) else value


def _checked(kind: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {f.name for f in fields(kind)} - {"notes"}
    hints = get_type_hints(kind)
    result: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise InvalidArgument(f"{where}: unknown key '{key}'{nearest(key, known)}")
        result[key] = _cast(value, hints[key], f"{where}: '{key}'")
    return result


def _cast(value: Any, hint: Any, what: str) -> Any:
    """`value` as the field's type; numbers must be positive (budgets may be 0)."""
    if hint in (Path, Path | None) and isinstance(value, str) and value:
        return Path(value)
    if hint == Limits and isinstance(value, Limits):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint is bool and isinstance(_boolean(value), bool):
        return _boolean(value)
    if hint == Threads and value == AUTO:
        return AUTO
    if (
        hint in (int, int | None, Threads)
        and isinstance(value, int)
        and not isinstance(value, bool)
    ):
        least = 0 if what.endswith("bytes'") else 1
        if value >= least:
            return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number and value > 0:
        return float(value)
    if value is None and hint in (Path | None, int | None):
        return None
    names: dict[Any, str] = {
        int: "a positive whole number",
        float: "a positive number",
        str: "a string",
        bool: "true or false",
    }
    names |= {Threads: 'a positive whole number or "auto"'}
    names |= {Path: "a folder's path", Limits: "an object", int | None: "a positive whole number"}
    raise InvalidArgument(f"{what} must be {names.get(hint, str(hint))}, not {json.dumps(value)}")
