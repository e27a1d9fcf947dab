"""Options of the server, and the strict parsing of `model.json` and `multi_lora.json`.

An unknown key is an error that names the nearest known one. A key of vLLM is accepted if its value
describes this server, noted if it has no effect, and else rejected with the reason.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_type_hints

from vlora.errors import InvalidArgument, nearest
from vlora.file_names import to_path, to_text
from vlora.strict_json import BOOLEANS, load_object

MODEL_VARIABLE = "VLORA_MODEL"  # Environment variable that overrides `model` in `model.json`.
ADAPTERS_VARIABLE = "VLORA_ADAPTERS"  # Environment variable that overrides `adapters`.
AUTO: Final = "auto"
DTYPES = ("float32", "bfloat16", "float16", AUTO)
DEVICE = re.compile(r"cpu|auto|cuda(:\d{1,3})?")

# Values of `policy`, each with the function that creates it ("module:function"). They are found by
# their files, because importing them would import torch.
POLICIES: dict[str, str] = {
    path.stem: f"vlora.engine.policies.{path.stem}:make"
    for path in sorted((Path(__file__).parent / "engine" / "policies").glob("[!_]*.py"))
    if path.stem != "base"
}

MERGING = ("out_of_place", "in_place", "off")
QUANTIZATIONS = ("int8", "int8-dynamic", "int4", "int4-dynamic")
QUANTIZATION_GROUPS = (32, 64, 128)
IntOrAuto = int | Literal["auto"]


@dataclass(frozen=True)
class Limits:
    """Limits of one request or adapter (docs/operations.md). An error states value and limit."""

    max_prompt_bytes: int = 1024 * 1024
    # The largest message that gRPC clients receive by default.
    max_answer_bytes: int = 4 * 1024 * 1024
    max_image_megapixels: float = 40.0
    # A decoded pixel takes 3 bytes.
    max_request_megapixels: float = 640.0
    # One image, or two frames of a clip, may exceed it alone.
    max_batch_megapixels: float = 160.0
    # That of Qwen-VL. Without it, a processor that scales the shorter edge to a fixed length would
    # make a huge image of a long strip.
    max_aspect_ratio: float = 200.0
    max_image_bytes: int = 64 * 1024 * 1024
    max_decode_seconds: float = 10.0
    max_decode_bytes: int = 1024**3
    max_images: int = 64
    # Sampled frames of all video files. transformers has this limit for a file.
    max_video_frames: int = 768
    max_video_bytes: int = 128 * 1024 * 1024
    # Processor time instead of `max_decode_seconds` for a request with video files.
    max_video_seconds: float = 60.0
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
    """Options of the engine and the vision encoder: the keys of `model.json` (docs/operations.md).

    notes: sentences to log about keys in the file that have no effect. This is not a key.
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
    theta_steps: float = 4.0
    max_wait_seconds: float = 30.0
    throughput_loss: float = 0.05
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
    pinned_adapters: tuple[str, ...] = ()
    enable_prefix_caching: bool = True
    # Share of the tokens of a clip to leave out. See `inputs.kept_rows`.
    video_pruning_rate: float = 0.0
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


# Keys of vLLM that mean the same as one of ours; if both are set, they must be equal.
RENAMED: dict[str, str] = {"tokenizer": "model"}

# Other keys of vLLM, and their values that describe what this server does.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "enable_lora": (True,),
    "trust_remote_code": (False,),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "disable_log_requests": (True, False),
    "enable_log_requests": (True, False),
    "enable_chunked_prefill": (True,),
}

# Keys of vLLM's tutorials without effect here, each with the note to log.
NO_EFFECT: dict[str, str] = {
    "gpu_memory_utilization": "the size of the page pool is 'kv_cache_tokens', and the share of a"
    " GPU's memory is 'engine_memory_share'",
    "max_loras": "the number of resident adapters is limited by 'adapter_pool_bytes'",
    "max_lora_rank": "each adapter has its own rank, without padding",
}

# Keys of vLLM that are rejected, each with our equivalent or the reason.
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

EXPECTED: dict[Any, str] = {
    int: "a positive whole number",
    float: "a positive number",
    str: "a string",
    bool: "true or false",
    Path: "a folder's path",
    Limits: "an object",
}
_AUTO_HINT = get_args(IntOrAuto)[1]


def load_options(
    path: Path,
    environment: Mapping[str, str] | None = None,
    replacing: Mapping[str, Any] | None = None,
    replacing_from: object = None,
) -> Options:
    """Return the options in a `model.json`.

    environment: variables that override folders; by default those of this process.
    replacing: keys that replace those in the file.
    replacing_from: their source, such as a file, for messages.

    If the model is overridden, the adapters in the file are not used, because they belong to the
    file's model. Raises InvalidArgument with the file, the key and its valid values.
    """
    replacing = replacing or {}
    keys = replace_keys(read_keys(path), replacing)
    where = str(path) if replacing_from is None else f"{path} with {replacing_from}"
    options = parse_options(keys, where, folder=path.parent)
    environment = os.environ if environment is None else environment
    model, adapters = (environment.get(name) for name in (MODEL_VARIABLE, ADAPTERS_VARIABLE))
    if model:
        kept = options.adapters if "adapters" in replacing else None
        options = replace(options, model=Path(model).resolve(), adapters=kept)
    if adapters:
        options = replace(options, adapters=Path(adapters).resolve())
    return options


def replace_keys(keys: Mapping[str, Any], replacing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `model.json`, updated with those of `replacing`.

    If the model is replaced, the adapters and vLLM's key `tokenizer` are dropped, because they
    belong to the old model.
    """
    dropped = {"adapters", *RENAMED} if "model" in replacing else set()
    return {key: value for key, value in keys.items() if key not in dropped} | dict(replacing)


def resolve_folders(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keys of a `model.json` in `folder`, with folders made absolute."""
    return dict(keys) | {
        key: to_text((folder / to_path(keys[key])).resolve())
        for key in ("model", "adapters", *RENAMED)
        if isinstance(keys.get(key), str) and keys[key]
    }


def load_replacing(path: Path) -> dict[str, Any]:
    """Return the keys in a file that replace those of a `model.json`.

    Relative folders in the file start at the folder that contains it. Raises InvalidArgument, which
    names this file, for an invalid key or value.
    """
    return _checked_replacing(read_keys(path), path.parent, str(path))


def read_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Return the keys in `--set` options (KEY=VALUE) that replace those of a `model.json`.

    A value is JSON if it can be, else text. Relative folders start at the working directory. Raises
    InvalidArgument for an invalid key or value.
    """
    keys: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals):
            raise InvalidArgument(f"--set must have the form KEY=VALUE, not '{setting}'")
        keys[key] = _json_or_text(value)
    return _checked_replacing(keys, Path.cwd(), "--set")


def _json_or_text(value: str) -> Any:
    try:
        (parsed,) = load_object(f'{{"value": {value}}}', "the value").values()
    except (InvalidArgument, ValueError):
        return value
    return parsed


def _checked_replacing(keys: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    keys = resolve_folders(keys, folder)
    alone = keys if "model" in keys else {key: keys[key] for key in keys if key not in RENAMED}
    _read_values(alone, where)
    return keys


def load_adapter_names(path: Path) -> dict[str, str]:
    """Return the adapters in `multi_lora.json`: name → folder, relative to the adapters' folder.

    Without such a file, the result is {}. Raises InvalidArgument if the file is invalid.
    """
    if not path.is_file():
        return {}
    names = read_keys(path)
    if not all(isinstance(value, str) for value in names.values()):
        raise InvalidArgument(f"{path} must be a JSON object of adapter name → folder")
    return names


def read_keys(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises InvalidArgument if there is none; checks no keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"cannot read {path}: {reason}") from error
    return load_object(text, str(path))


def parse_options(keys: Mapping[str, Any], where: str, folder: Path) -> Options:
    """Return the options in a `model.json`. Raises InvalidArgument, which names the key.

    where: name of the file, for messages.
    folder: folder at which relative paths start.
    """
    values, notes = _read_values(keys, where)
    if "model" not in values:
        raise InvalidArgument(f"{where}: 'model' is missing; set it to the checkpoint's folder")
    options = Options(**values)
    _check_shares(options, where)
    if (rate := options.video_pruning_rate) >= 1:
        raise InvalidArgument(
            f"{where}: 'video_pruning_rate' = {rate:g} must be below 1, the share of all tokens"
        )
    size = options.quantization_group_size
    if size != QUANTIZATION_GROUPS[0] and options.quantization not in ("int4", "int4-dynamic"):
        raise InvalidArgument(
            f"{where}: 'quantization_group_size' = {size} has an effect only with"
            f' \'quantization\' = "int4" or "int4-dynamic"; set that, or'
            f" 'quantization_group_size' to"
            f" {QUANTIZATION_GROUPS[0]}, its default"
        )
    if options.quantization is not None and options.merging == "in_place":
        raise InvalidArgument(
            f"{where}: 'merging' = 'in_place' changes the base weights, which is not supported with"
            f" 'quantization' = '{options.quantization}'; set 'merging' = 'off': no adapter is"
            " merged into a quantized base"
        )
    return replace(
        options,
        notes=notes,
        model=(folder / options.model).resolve(),
        adapters=None if options.adapters is None else (folder / options.adapters).resolve(),
    )


def _read_values(keys: Mapping[str, Any], where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of options (unchecked in combination), and notes on keys without effect."""
    values: dict[str, Any] = {}
    notes = []
    for key, value in keys.items():
        if key in REFUSED:
            raise InvalidArgument(f"{where}: '{key}' is not used here: {REFUSED[key]}")
        if key in NO_EFFECT:
            notes.append(f"{where}: '{key}' has no effect here: {NO_EFFECT[key]}")
        elif key in ACCEPTED:
            if _spelled(value) not in ACCEPTED[key]:
                valid = " or ".join(json.dumps(v) for v in ACCEPTED[key])
                raise InvalidArgument(
                    f"{where}: '{key}' = {json.dumps(value)} is not supported; it must be {valid}"
                )
        elif key in RENAMED:
            if value != keys.get(RENAMED[key]):
                raise InvalidArgument(
                    f"{where}: '{key}' must equal '{RENAMED[key]}'; both are read from one folder"
                )
        else:
            values[key] = value
    if isinstance(values.get("limits"), dict):
        values["limits"] = Limits(**_checked(Limits, values["limits"], f"{where}: limits"))
    if (quantization := values.get("quantization")) not in (None, *QUANTIZATIONS):
        raise InvalidArgument(
            f"{where}: 'quantization' = {json.dumps(quantization)} is unknown; it must be"
            f" {_one_of(map(json.dumps, QUANTIZATIONS))}; remove the key to serve the weights as"
            " they are stored, floats or quantized"
        )
    values = _checked(Options, values, where)
    _check_choices(values, where)
    return values, tuple(notes)


def _check_choices(values: Mapping[str, Any], where: str) -> None:
    for key, choices in (("dtype", DTYPES), ("merging", MERGING)):
        if values.get(key, choices[0]) not in choices:
            raise InvalidArgument(
                f"{where}: '{key}' = '{values[key]}' is unknown; it must be {_one_of(choices)}"
            )
    if "device" in values and not DEVICE.fullmatch(values["device"]):
        raise InvalidArgument(
            f"{where}: 'device' = '{values['device']}' is unknown; it must be cpu, cuda, cuda:N"
            " (a GPU's number) or auto"
        )
    size = values.get("quantization_group_size", QUANTIZATION_GROUPS[0])
    if size not in QUANTIZATION_GROUPS:
        raise InvalidArgument(
            f"{where}: 'quantization_group_size' = {size} must be"
            f" {_one_of(map(str, QUANTIZATION_GROUPS))}"
        )
    if "policy" in values:
        check_policy(values["policy"], f"{where}: ")


def _check_shares(options: Options, where: str) -> None:
    engine, encoder = options.engine_memory_share, options.encoder_memory_share
    if engine + encoder > 1 + 1e-9:
        raise InvalidArgument(
            f"{where}: 'engine_memory_share' = {engine:g} and 'encoder_memory_share' = {encoder:g}"
            f" add up to {engine + encoder:g}; the limit is 1, because both processes use the same"
            " GPU"
        )


def check_policy(name: str, prefix: str = "") -> None:
    """Raise InvalidArgument, which begins with `prefix`, unless `name` is a registered policy."""
    if name not in POLICIES:
        raise InvalidArgument(
            f"{prefix}'policy' = '{name}' is unknown{nearest(name, POLICIES) or '.'}"
            f" It must be {_one_of(POLICIES)}"
        )


def _one_of(values: Iterable[str]) -> str:
    *others, last = values
    return f"{', '.join(others)} or {last}"


def _checked(kind: type, keys: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {f.name for f in fields(kind)} - {"notes"}
    hints = get_type_hints(kind)
    result: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in known:
            hint = nearest(key, known) or f"; known keys: {', '.join(sorted(known))}"
            raise InvalidArgument(f"{where}: unknown key '{key}'{hint}")
        result[key] = _cast(value, hints[key], f"{where}: '{key}'")
    return result


def _cast(value: Any, hint: Any, what: str) -> Any:
    """Return `value` as the type `hint`. Numbers must be positive, but sizes in bytes and rates
    may be 0."""
    if hint == tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise InvalidArgument(f"{what} must be a list of names, not {json.dumps(value)}")
        return tuple(value)
    kinds = get_args(hint) or (hint,)
    if bool in kinds:
        value = _spelled(value)
    may_be_zero = what.endswith(("bytes'", "rate'"))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    in_range = is_number and (value > 0 or (may_be_zero and value == 0))
    fits = {
        Path: isinstance(value, str) and bool(value),
        Limits: isinstance(value, Limits),
        str: isinstance(value, str),
        bool: isinstance(value, bool),
        int: in_range and isinstance(value, int),
        float: in_range,
        type(None): value is None,
        _AUTO_HINT: value == AUTO,
    }
    found = next((kind for kind in kinds if fits[kind]), None)
    if found is None:
        auto = ' or "auto"' if _AUTO_HINT in kinds else ""
        raise InvalidArgument(f"{what} must be {EXPECTED[kinds[0]]}{auto}, not {json.dumps(value)}")
    if found is Path:
        return to_path(value)
    return float(value) if found is float else value


def _spelled(value: Any) -> Any:
    """Return the boolean that a text spells, as in vLLM's tutorials; other values unchanged."""
    return BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value
