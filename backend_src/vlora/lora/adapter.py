"""A PEFT folder → checked, packed weights.

Strict, because PEFT itself accepts many broken files silently: what is not served is refused by
name, and every tensor of the file has to find its place. Knows nothing of slots or pools.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vlora.atmm.types import LoraPair
from vlora.errors import InvalidArgument
from vlora.lora.head import Head, load_head
from vlora.lora.slab import TARGETS

LM_HEAD = "lm_head"
Place = tuple[int, str]
"""(layer, target), or (-1, "lm_head")."""

_LAYER = re.compile(
    r"^(?:base_model\.model\.)?(?P<path>(?:(?:model|language_model)\.)*"
    r"layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<target>\w+))"
    r"\.lora_(?P<which>[AB])(?:\.default)?\.weight$"
)
_HEAD = re.compile(
    r"^(?:base_model\.model\.)?(?P<path>(?:language_model\.)?lm_head)"
    r"\.(?:lora_(?P<which>[AB])(?:\.default)?|base_layer)\.weight$"
)
_ELSEWHERE = re.compile(r"vision_tower|visual|vision_model|multi_modal_projector|merger|connector")

REFUSED_WHEN_SET: dict[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "'modules_to_save' (whole replaced modules)",
    "trainable_token_indices": "'trainable_token_indices' (trained embeddings)",
    "target_parameters": "'target_parameters'",
    "layer_replication": "'layer_replication'",
    "lora_bias": "'lora_bias'",
    "fan_in_fan_out": "'fan_in_fan_out'",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "alora_invocation_tokens": "activated LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations whose adapters only fit a base they have changed themselves."""

HARMLESS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
"""Keys of `adapter_config.json` that are either used below or change nothing at inference."""


@dataclass(frozen=True)
class AdapterInfo:
    """What a user may know of an adapter. digest: SHA-256 of what changes the language model."""

    name: str
    digest: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    tasks: tuple[str, ...]
    accuracy: Mapping[str, float]
    head_labels: tuple[str, ...]
    head_tasks: tuple[str, ...]


@dataclass(frozen=True)
class ModelShape:
    """What an adapter has to fit: target → (d_out, d_in), the same in every layer.

    lm_head: gives the base model's; called only for an adapter that holds a copy of it.
    """

    layers: int
    hidden: int
    vocabulary: int
    shapes: Mapping[str, tuple[int, int]]
    lm_head: Callable[[], torch.Tensor]

    def shape_of(self, place: Place) -> tuple[int, int]:
        layer, target = place
        return (self.vocabulary, self.hidden) if layer < 0 else self.shapes[target]


@dataclass(frozen=True)
class Adapter:
    """Packed weights, fp32, scale folded into B. `pairs` lacks the places it does not target."""

    info: AdapterInfo
    pairs: Mapping[Place, LoraPair]
    head: Head | None


@dataclass
class _Halves:
    path: str
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    names: list[str] = field(default_factory=list)


def load_adapter(name: str, folder: Path, model: ModelShape) -> Adapter:
    """The adapter in `folder`; InvalidArgument names adapter, file and reason."""
    refuse = _Refusal(name)
    config = _read_json(folder / "adapter_config.json", refuse)
    _check_config(config, refuse.of("adapter_config.json"))
    weights_file = "adapter_model.safetensors"
    refuse_weights = refuse.of(weights_file)
    if not (folder / weights_file).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        raise refuse_weights(
            "is missing" + ("; a pickled .bin is never read, save as safetensors" * pickled)
        )
    try:
        tensors = load_file(folder / weights_file)
    except (SafetensorError, OSError, ValueError) as error:
        raise refuse_weights(f"cannot be read: {error}") from error
    halves = _sort(tensors, model, refuse_weights)
    pairs: dict[Place, LoraPair] = {}
    for place, half in sorted(halves.items()):
        pairs[place] = _pair(place, half, config, model, refuse_weights)
    if not pairs:
        raise refuse_weights("holds no LoRA weights")
    extra = _read_extra(folder, refuse)
    head = load_head(folder, extra.get("head"), model.hidden, refuse)
    return Adapter(
        AdapterInfo(
            name=name,
            digest=_digest(pairs),
            ranks=tuple(sorted({pair.rank for pair in pairs.values()})),
            targets=tuple(t for t in (*TARGETS, LM_HEAD) if any(p[1] == t for p in pairs)),
            tasks=tuple(extra.get("tasks", ())),
            accuracy=dict(extra.get("accuracy", {})),
            head_labels=head.labels if head else (),
            head_tasks=head.tasks if head else (),
        ),
        pairs,
        head,
    )


class _Refusal:
    """Makes errors that name the adapter and the file."""

    def __init__(self, name: str, file: str = "") -> None:
        self._name = name
        self._file = file

    def of(self, file: str) -> _Refusal:
        return _Refusal(self._name, file)

    def __call__(self, reason: str) -> InvalidArgument:
        return InvalidArgument(f"adapter '{self._name}': {self._file} {reason}")


def _read_json(path: Path, refuse: _Refusal) -> dict[str, Any]:
    refuse = refuse.of(path.name)
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise refuse("is missing") from None
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise refuse("must hold a JSON object")
    return value


def _check_config(config: Mapping[str, Any], refuse: _Refusal) -> None:
    if config.get("peft_type") != "LORA":
        raise refuse(f"has peft_type {config.get('peft_type')!r}; only 'LORA' is served")
    if config.get("bias", "none") != "none":
        raise refuse(f"has bias {config['bias']!r}; only 'none' is served")
    initialisation = config.get("init_lora_weights", True)
    if isinstance(initialisation, str) and initialisation.lower().startswith(CHANGES_THE_BASE):
        raise refuse(
            f"was initialised with '{initialisation}', which changes the base model;"
            " convert it to a plain LoRA when saving"
        )
    for key, value in config.items():
        if key in HARMLESS or not value:
            continue
        what = REFUSED_WHEN_SET.get(key, f"'{key}'")
        raise refuse(f"asks for {what}, which is not supported")
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise refuse(f"has {key} = {value!r}; it must be a positive number")


def _sort(
    tensors: Mapping[str, torch.Tensor], model: ModelShape, refuse: _Refusal
) -> dict[Place, _Halves]:
    """Every tensor of the file to its place; what fits nowhere is refused by name."""
    halves: dict[Place, _Halves] = {}
    for key, tensor in tensors.items():
        match = _LAYER.match(key) or _HEAD.match(key)
        if match is None:
            raise refuse(f"holds '{key}', {_why_not(key)}")
        which = match["which"]
        if which is None:
            base = model.lm_head()
            if tensor.shape != base.shape or not torch.equal(tensor.to(base.dtype), base):
                raise refuse(f"holds '{key}', which differs from the base model's own lm_head")
            continue
        place = (-1, LM_HEAD)
        if "layer" in match.groupdict():
            place = (int(match["layer"]), match["target"])
            if place[1] not in model.shapes or place[0] >= model.layers:
                raise refuse(f"holds '{key}', which this model does not have")
        half = halves.setdefault(place, _Halves(match["path"]))
        if (half.a if which == "A" else half.b) is not None:
            raise refuse(f"holds '{key}' a second time under another name")
        if which == "A":
            half.a = tensor
        else:
            half.b = tensor
        half.names.append(key)
    return halves


def _why_not(key: str) -> str:
    if "lora_magnitude_vector" in key:
        return "a DoRA magnitude, which is not supported"
    if "lora_embedding" in key or "embed_tokens" in key:
        return "trained embeddings, which are not supported"
    if _ELSEWHERE.search(key):
        return "weights of the vision tower or connector, which are not supported yet"
    return "which is no LoRA weight of the language model"


def _pair(
    place: Place, half: _Halves, config: Mapping[str, Any], model: ModelShape, refuse: _Refusal
) -> LoraPair:
    """A and B of one place, fp32, with the scale folded into B."""
    where = half.path
    if half.a is None or half.b is None:
        missing = "A" if half.a is None else "B"
        raise refuse(f"has no lora_{missing} for {where}")
    a, b = half.a, half.b
    d_out, d_in = model.shape_of(place)
    rank = _by_pattern(config.get("rank_pattern"), where, config["r"])
    if a.shape != (rank, d_in) or b.shape != (d_out, rank):
        raise refuse(
            f"has A {tuple(a.shape)} and B {tuple(b.shape)} for {where};"
            f" with rank {rank} they must be ({rank}, {d_in}) and ({d_out}, {rank})"
        )
    for letter, tensor in (("A", a), ("B", b)):
        if not tensor.is_floating_point():
            raise refuse(f"has lora_{letter} of {where} as {tensor.dtype}, not a float type")
        if not bool(torch.isfinite(tensor).all()):
            raise refuse(f"has NaN or Inf in lora_{letter} of {where}")
    alpha = _by_pattern(config.get("alpha_pattern"), where, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraPair(a.float().contiguous(), (b.float() * scale).contiguous())


def _by_pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """PEFT's rule: a pattern is a regular expression for the end of the module's path."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def _digest(pairs: Mapping[Place, LoraPair]) -> str:
    """SHA-256 over places, shapes and packed values (which the config's scale is part of)."""
    state = hashlib.sha256()
    for place, pair in sorted(pairs.items()):
        state.update(repr((place, tuple(pair.a.shape), tuple(pair.b.shape))).encode())
        state.update(pair.a.numpy().tobytes())
        state.update(pair.b.numpy().tobytes())
    return state.hexdigest()


def _read_extra(folder: Path, refuse: _Refusal) -> dict[str, Any]:
    """`vlora.json`, checked as far as it is not the head's; {} where there is none."""
    path = folder / "vlora.json"
    if not path.exists():
        return {}
    extra = _read_json(path, refuse)
    refuse = refuse.of(path.name)
    unknown = set(extra) - {"tasks", "accuracy", "head"}
    if unknown:
        raise refuse(f"has the unknown key '{sorted(unknown)[0]}'")
    tasks = extra.get("tasks", [])
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise refuse("must give 'tasks' as a list of names")
    accuracy = extra.get("accuracy", {})
    if not isinstance(accuracy, dict) or not all(
        isinstance(value, int | float) for value in accuracy.values()
    ):
        raise refuse("must give 'accuracy' as numbers by task")
    return extra
