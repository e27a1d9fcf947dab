"""`adapter_config.json` → which modules an adapter targets, their ranks and scales, as PEFT does.

What is not served is refused by name. Knows no weights.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vlora.errors import InvalidArgument
from vlora.lora.patterns import MAX_PATTERNS, Matcher, suffixes

MAX_JSON_BYTES = 1024 * 1024
MAX_REASON_CHARACTERS = 500

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

USED = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Keys of `adapter_config.json` that change nothing at inference."""

ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."
"""PEFT's way to find a module's layer where `layers_pattern` names none."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character: JSON can hold one, UTF-8 cannot."""

T = TypeVar("T")


def as_text(name: str) -> str:
    """`name` as UTF-8 can hold it: a folder's name may be any bytes, JSON may hold surrogates."""
    return name.encode(errors="backslashreplace").decode()


class Refusal:
    """Makes errors that name the adapter and the file; whatever these hold, they can be told."""

    def __init__(self, name: str, file: str = "") -> None:
        self._name = name
        self._file = file

    def of(self, file: str) -> Refusal:
        return Refusal(self._name, file)

    def __call__(self, reason: str) -> InvalidArgument:
        if len(reason) > MAX_REASON_CHARACTERS:
            reason = reason[: MAX_REASON_CHARACTERS - 1] + "…"
        return InvalidArgument(as_text(f"adapter '{self._name}': {self._file} {reason}"))


@dataclass(frozen=True)
class PeftConfig:
    """The parts of a LoRA's config that decide what is computed.

    Paths are those of modules, as PEFT sees them: in the layout of the adapter's own weights
    first, then in that of the served model. All methods raise InvalidArgument for a pattern that
    is none, or takes too long.
    """

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | frozenset[str]
    exclude_modules: str | frozenset[str]
    layers_to_transform: frozenset[int]
    layers_pattern: tuple[str, ...]
    matcher: Matcher

    def rank_of(self, paths: Sequence[str]) -> int:
        return self._by_pattern(self.rank_pattern, paths, self.rank)

    def scale_of(self, paths: Sequence[str]) -> float:
        """alpha / rank, or alpha / √rank for rsLoRA."""
        rank = self.rank_of(paths)
        alpha = self._by_pattern(self.alpha_pattern, paths, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def targets(self, paths: Sequence[str]) -> bool:
        """Whether PEFT would give this module a LoRA."""
        return any(self._targets(path) for path in paths)

    def _by_pattern(self, patterns: Mapping[str, T], paths: Sequence[str], default: T) -> T:
        """PEFT's rule: a pattern is a regular expression for the end of the module's path."""
        for path in paths:
            for pattern, value in patterns.items():
                if self.matcher.ends(pattern, path):
                    return value
        return default

    def _targets(self, path: str) -> bool:
        """PEFT's `check_target_module_exists`."""
        if self.exclude_modules and self._named(self.exclude_modules, path):
            return False
        if isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear":
            return not path.endswith("lm_head")  # PEFT leaves the output embeddings out
        if not self._named(self.target_modules, path):
            return False
        if not self.layers_to_transform or path in self.target_modules:
            return True
        prefixed = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in self.layers_pattern]
        found = (self.matcher.layer(pattern, path) for pattern in prefixed or [ANY_LAYER])
        return next((x for x in found if x is not None), None) in self.layers_to_transform

    def _named(self, names: str | frozenset[str], path: str) -> bool:
        if isinstance(names, str):
            return self.matcher.fullmatch(names, path)
        return any(suffix in names for suffix in suffixes(path))


def read_config(folder: Path, refuse: Refusal) -> PeftConfig:
    """The folder's `adapter_config.json`, checked key by key."""
    given = read_json(folder / "adapter_config.json", refuse)
    refuse = refuse.of("adapter_config.json")
    if given.get("peft_type") != "LORA":
        raise refuse(f"has peft_type {given.get('peft_type')!r}; only 'LORA' is served")
    if given.get("bias", "none") != "none":
        raise refuse(f"has bias {given['bias']!r}; only 'none' is served")
    initialisation = given.get("init_lora_weights", True)
    if isinstance(initialisation, str) and initialisation.lower().startswith(CHANGES_THE_BASE):
        raise refuse(
            f"was initialised with '{initialisation}', which changes the base model;"
            " convert it to a plain LoRA when saving"
        )
    for key, value in given.items():
        if key not in USED and key not in HARMLESS and value:
            what = REFUSED_WHEN_SET.get(key, f"'{key}'")
            raise refuse(f"asks for {what}, which is not supported")
    rslora = given.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise refuse(f"has use_rslora = {rslora!r}; it must be true or false")
    return PeftConfig(
        matcher=Matcher(refuse),
        rank=_rank(given.get("r"), "r", refuse),
        alpha=_alpha(given.get("lora_alpha"), "lora_alpha", refuse),
        rslora=rslora,
        rank_pattern=_patterns(given, "rank_pattern", _rank, refuse),
        alpha_pattern=_patterns(given, "alpha_pattern", _alpha, refuse),
        **_chosen_modules(given, refuse),
    )


def _chosen_modules(given: Mapping[str, Any], refuse: Refusal) -> dict[str, Any]:
    """The keys that say which modules get a LoRA, with PEFT's rules of what goes together."""
    names = given.get("target_modules")
    if not names or not _names_or_pattern(names):
        raise refuse(
            f"has target_modules = {names!r}; it must be names of modules, or a regular expression"
        )
    excluded = given.get("exclude_modules") or ()
    if not _names_or_pattern(excluded):
        raise refuse(f"has exclude_modules = {excluded!r}; it must be names, or a pattern")
    layers, pattern = given.get("layers_to_transform"), given.get("layers_pattern") or ()
    numbers = [layers] if isinstance(layers, int) else layers or []
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise refuse(f"has layers_to_transform = {layers!r}; it must be numbers of layers")
    if not _names_or_pattern(pattern):
        raise refuse(f"has layers_pattern = {pattern!r}; it must be patterns")
    if isinstance(names, str) and (layers is not None or pattern):
        raise refuse(
            "has 'layers_to_transform' or 'layers_pattern' beside a 'target_modules' that"
            " is a pattern, as PEFT does not"
        )
    if pattern and layers is None:
        raise refuse("has 'layers_pattern' without 'layers_to_transform'")
    return {
        "target_modules": names if isinstance(names, str) else frozenset(names),
        "exclude_modules": excluded if isinstance(excluded, str) else frozenset(excluded),
        "layers_to_transform": frozenset(numbers),
        "layers_pattern": (pattern,) if isinstance(pattern, str) else tuple(pattern),
    }


def _names_or_pattern(value: Any) -> bool:
    return isinstance(value, str) or value == () or is_names(value)


def is_names(value: Any) -> bool:
    """Whether `value` is a list of names, each of them text that can be sent."""
    return isinstance(value, list) and all(
        isinstance(name, str) and name and not _SURROGATE.search(name) for name in value
    )


def _rank(value: Any, what: str, refuse: Refusal) -> int:
    if type(value) is not int or value < 1:
        raise refuse(f"has {what} = {value!r}; it must be a positive whole number")
    return value


def _alpha(value: Any, what: str, refuse: Refusal) -> float:
    try:
        alpha = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        alpha = math.inf
    if not 0 < alpha < math.inf:
        raise refuse(f"has {what} = {value!r}; it must be a positive number")
    return alpha


def _patterns(
    given: Mapping[str, Any], key: str, read: Callable[[Any, str, Refusal], T], refuse: Refusal
) -> dict[str, T]:
    patterns = given.get(key)
    if patterns is None:
        return {}
    if isinstance(patterns, dict) and len(patterns) > MAX_PATTERNS:
        raise refuse(f"has {len(patterns)} patterns in {key}; at most {MAX_PATTERNS} are served")
    if not isinstance(patterns, dict):
        raise refuse(f"has {key} = {patterns!r}; it must be an object of patterns")
    return {
        pattern: read(value, f"{key}[{pattern!r}]", refuse) for pattern, value in patterns.items()
    }


def read_json(path: Path, refuse: Refusal) -> dict[str, Any]:
    """The JSON object in a file of the adapter's folder."""
    refuse = refuse.of(path.name)
    require_file(path, refuse)
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise refuse(f"has more than {MAX_JSON_BYTES} bytes")
        value = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise refuse("must hold a JSON object")
    return value


def require_file(path: Path, refuse: Refusal) -> None:
    """Refuses what is not there, and what would never end to be read: folders, pipes, devices."""
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise refuse("is missing") from None
    except OSError as error:
        raise refuse(f"cannot be read: {error}") from error
    if not stat.S_ISREG(kind):
        raise refuse("is no file")
