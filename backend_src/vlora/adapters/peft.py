"""PEFT's format: the keys of an adapter's tensors, and the rules of `adapter_config.json`.

The layouts of transformers (`LAYOUTS`) have different paths for the same matrix, which `parse_key`
maps to one matrix id.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from vlora.adapters.errors import ErrorFactory, is_names, read_json
from vlora.adapters.model_shape import HEADS, LAYOUTS, LM_HEAD, ModelShape, suffixes, vision_path
from vlora.adapters.patterns import MAX_PATTERNS, PatternMatcher
from vlora.errors import nearest, shown
from vlora.ids import VISION, MatrixId
from vlora.weights.slab import TARGETS

# Role of a tensor: a factor of the LoRA, the magnitudes of DoRA, or a whole weight.
Part = Literal["A", "B", "magnitude", "weight"]

EMBEDDINGS = "embed_tokens"
_PATH = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+?)"
    r"(?:\.lora_(?P<factor>[AB])(?:\.default)?\.weight"
    r"|\.lora_(?P<magnitude>magnitude_vector)(?:\.default)?(?:\.weight)?"
    r"|(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.weight)"
)
_MODULE = re.compile(
    r"(?P<prefix>.*?)layers\.(?P<layer>0|[1-9][0-9]{0,4})\.(?:self_attn|mlp)\.(?P<target>\w+)"
)
_OWN_MODULE = re.compile(r"(?:transformer\.)?h\.(?P<layer>0|[1-9][0-9]{0,4})\.(?P<module>[\w.]+)")
_VISION = re.compile(r"vision_tower|visual|vision_model|multi_modal_projector|merger|connector")

# Command that error messages recommend.
CONVERT = "`vlora adapters convert FOLDER OUT --model CHECKPOINT`"


@dataclass(frozen=True)
class TensorKey:
    """Meaning of one key.

    path: path of the module, as the file spells it.
    matrix: matrix that the tensor belongs to; None for the input embeddings.
    """

    path: str
    matrix: MatrixId | None
    part: Part


class UnknownKey(ValueError):
    """Raised for a key that belongs to no tensor of a LoRA on this model. The message says why."""


def parse_key(key: str, model: ModelShape) -> TensorKey:
    """Return the meaning of a key. Raises UnknownKey if the model has no such tensor."""
    match = _PATH.fullmatch(key)
    if match is None or "lora_" in match["path"]:
        raise UnknownKey(_reason(key))
    path = match["path"]
    part: Part = "A" if match["factor"] == "A" else "B" if match["factor"] else "weight"
    if match["magnitude"]:
        part = "magnitude"
    if path in HEADS:
        return TensorKey(path, (-1, LM_HEAD), part)
    if path.removesuffix(EMBEDDINGS) in LAYOUTS and path.endswith(EMBEDDINGS) and part == "weight":
        return TensorKey(path, None, part)
    return TensorKey(path, _matrix_at(path, key, model), part)


def _matrix_at(path: str, key: str, model: ModelShape) -> MatrixId:
    in_tower = vision_path(path)
    if in_tower is not None:
        if in_tower not in model.vision():
            raise UnknownKey(_reason(key))
        return VISION, in_tower
    own = _OWN_MODULE.fullmatch(path)
    if own is not None and own["module"] in model.modules:
        matrix = (int(own["layer"]), model.modules[own["module"]])
    else:
        module = _MODULE.fullmatch(path)
        if module is None or module["prefix"] not in LAYOUTS or model.modules:
            raise UnknownKey(_reason(key, module["prefix"] if module else None))
        matrix = (int(module["layer"]), module["target"])
    if matrix not in model.matrices:
        raise UnknownKey(_reason_no_matrix(matrix, model))
    return matrix


def _reason(key: str, prefix: str | None = None) -> str:
    if _VISION.search(key):
        return "which is not a linear layer of this model's vision tower or connector"
    if "lora_embedding" in key:
        return "trained embeddings, which are refused; train without the target 'embed_tokens'"
    if prefix is not None:
        known = ", ".join(f"'{layout}layers'" for layout in LAYOUTS)
        return f"whose layers follow '{prefix}', which is not a known layout; known: {known}"
    return "which is not a LoRA weight of the language model"


def _reason_no_matrix(matrix: MatrixId, model: ModelShape) -> str:
    target = matrix[1]
    if target not in {*model.shapes, *model.modules.values()}:
        hint = nearest(target, TARGETS) or ";"
        return f"which this model does not have{hint} targets are {', '.join(model.shapes)}"
    return f"which this model does not have: its layers are 0 to {model.layers - 1}"


REFUSED_WHEN_SET: dict[str, str] = {
    "modules_to_save": "'modules_to_save' (whole replaced modules)",
    "trainable_token_indices": "'trainable_token_indices' (trained embeddings)",
    "use_dora": "DoRA",
    "target_parameters": "'target_parameters'",
    "layer_replication": "'layer_replication'",
    "lora_bias": "'lora_bias'",
    "fan_in_fan_out": "'fan_in_fan_out'",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
# Remedy that the error message names, by option. The options are keys of REFUSED_WHEN_SET. An
# adapter with one of these options can be converted.
CONVERTIBLE: dict[str, str] = {
    "use_dora": f"make it a plain LoRA with {CONVERT}",
    "modules_to_save": f"if they are the base model's own, {CONVERT} drops them",
}

# Values of `init_lora_weights` that leave the base model unchanged.
PLAIN = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
# Values of `init_lora_weights` that change the base model by an amount that can be computed from
# its weights.
KNOWN_CHANGES = ("pissa", "olora")
# Beginnings of the values of `init_lora_weights` that change the base model. An adapter with such a
# value fits only the changed model, unless PEFT converts it. PEFT saves a converted adapter with
# the value `true`.
CHANGES_THE_BASE = (*KNOWN_CHANGES, "corda", "lora_ga", "loftq")

USED = frozenset(
    {
        "alora_invocation_tokens",
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
# Keys of `adapter_config.json` that change nothing at inference.
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


def _option_fault(config: Mapping[str, Any]) -> str | None:
    fault = _initialisation_fault(config.get("init_lora_weights"))
    if fault is not None:
        return fault
    for key, value in config.items():
        if key not in USED and key not in HARMLESS and value:
            what = REFUSED_WHEN_SET.get(key, f"'{key}'")
            remedy = f"; {CONVERTIBLE[key]}" if key in CONVERTIBLE else ""
            return f"asks for {what}, which is not supported{remedy}"
    return None


def _initialisation_fault(kind: Any) -> str | None:
    if kind is None or isinstance(kind, bool):
        return None
    name = kind.lower() if isinstance(kind, str) else ""
    if name.startswith(CHANGES_THE_BASE):
        remedy = (
            "save it with PEFT's save_pretrained(OUT, path_initial_model_for_weight_conversion="
            "INITIAL), where INITIAL holds the adapter as it was before training"
        )
        if kind in KNOWN_CHANGES:
            remedy = f"make it a plain LoRA with {CONVERT}"
        elif name.startswith("loftq"):
            remedy = "train on the base model itself: PEFT cannot convert it"
        effect = "which changes the base model, so it does not fit the unchanged one"
        return f"was initialised with {shown(kind)}, {effect}; {remedy}"
    if name not in PLAIN:
        known = ", ".join((*PLAIN, *CHANGES_THE_BASE))
        return f"has init_lora_weights = {shown(kind)}; known: {known}"
    return None


MAX_INVOCATION = 256  # Maximum number of invocation tokens. Each prompt is searched for them.

# Pattern by which PEFT finds the layer of a module if `layers_pattern` is empty.
ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."

T = TypeVar("T")


@dataclass(frozen=True)
class PeftConfig:
    """The parts of a LoRA's config that decide what is computed.

    The argument `paths` of the methods lists the paths of one module: first as the adapter's
    weights file spells it, then in the served model. All methods raise InvalidArgument for a
    pattern that is invalid or takes too long.
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
    invocation: tuple[int, ...]
    matcher: PatternMatcher
    base: Any = None  # Name of the base model that the adapter was trained for, for messages.

    def rank_of(self, paths: Sequence[str]) -> int:
        return self._by_pattern(self.rank_pattern, paths, self.rank)

    def scale_of(self, paths: Sequence[str]) -> float:
        """Return the scale of a module's LoRA: alpha / rank, or alpha / √rank for rsLoRA."""
        rank = self.rank_of(paths)
        alpha = self._by_pattern(self.alpha_pattern, paths, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def targets(self, paths: Sequence[str]) -> bool:
        """Return whether PEFT would add a LoRA to the module under any of its paths."""
        return any(self._targets(path) for path in paths)

    def _by_pattern(self, patterns: Mapping[str, T], paths: Sequence[str], default: T) -> T:
        for path in paths:
            for pattern, value in patterns.items():
                if self.matcher.ends(pattern, path):
                    return value
        return default

    def _targets(self, path: str) -> bool:
        """Return the result of PEFT's `check_target_module_exists`."""
        if self.exclude_modules and self._named(self.exclude_modules, path):
            return False
        if isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear":
            return not path.endswith("lm_head")  # PEFT excludes the output embeddings.
        if not self._named(self.target_modules, path):
            return False
        if not self.layers_to_transform or path in self.target_modules:
            return True
        prefixed = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in self.layers_pattern]
        numbers = (self.matcher.layer(pattern, path) for pattern in prefixed or [ANY_LAYER])
        return next((n for n in numbers if n is not None), None) in self.layers_to_transform

    def _named(self, names: str | frozenset[str], path: str) -> bool:
        if isinstance(names, str):
            return self.matcher.fullmatch(names, path)
        return any(suffix in names for suffix in suffixes(path))


def read_config(folder: Path, invalid: ErrorFactory) -> PeftConfig:
    """Return the content of the folder's `adapter_config.json`. Raises InvalidArgument."""
    config = read_json(folder / "adapter_config.json", invalid)
    invalid = invalid.in_file("adapter_config.json")
    _check_options(config, invalid)
    rslora = config.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise invalid(f"has use_rslora = {rslora!r}; it must be true or false")
    targets = _modules(config.get("target_modules") or None, config, "target_modules", invalid)
    layers, layers_pattern = _layers(config, targets, invalid)
    return PeftConfig(
        rank=_rank(config.get("r"), "r", invalid),
        alpha=_alpha(config.get("lora_alpha"), "lora_alpha", invalid),
        rslora=rslora,
        rank_pattern=_patterns(config, "rank_pattern", _rank, invalid),
        alpha_pattern=_patterns(config, "alpha_pattern", _alpha, invalid),
        target_modules=targets,
        exclude_modules=_modules(
            config.get("exclude_modules") or [], config, "exclude_modules", invalid
        ),
        layers_to_transform=layers,
        layers_pattern=layers_pattern,
        invocation=_invocation(config.get("alora_invocation_tokens"), invalid),
        matcher=PatternMatcher(invalid),
        base=config.get("base_model_name_or_path"),
    )


def _check_options(config: Mapping[str, Any], invalid: ErrorFactory) -> None:
    if config.get("peft_type") != "LORA":
        remedy = f"{CONVERT} converts the types that change the weights of linear layers"
        found = shown(config.get("peft_type"))
        raise invalid(f"has peft_type {found}; only 'LORA' is served. {remedy}")
    if config.get("bias", "none") != "none":
        raise invalid(f"has bias {config['bias']!r}; only 'none' is served")
    fault = _option_fault(config)
    if fault is not None:
        raise invalid(fault)


def _layers(
    config: Mapping[str, Any], targets: str | frozenset[str], invalid: ErrorFactory
) -> tuple[frozenset[int], tuple[str, ...]]:
    layers, pattern = config.get("layers_to_transform"), config.get("layers_pattern") or ()
    numbers = [layers] if isinstance(layers, int) else layers or []
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        wrong = f"has layers_to_transform = {layers!r}"
        raise invalid(f"{wrong}; it must be the number of a layer, or a list of numbers")
    if not isinstance(pattern, str) and pattern and not is_names(pattern):
        wrong = f"has layers_pattern = {pattern!r}"
        raise invalid(f"{wrong}; it must be a pattern, or a list of patterns")
    if isinstance(targets, str) and (layers is not None or pattern):
        both = "'layers_to_transform' or 'layers_pattern' with a 'target_modules' that is a pattern"
        raise invalid(f"has {both}, which PEFT does not allow")
    if pattern and layers is None:
        raise invalid("has 'layers_pattern' without 'layers_to_transform'")
    return frozenset(numbers), (pattern,) if isinstance(pattern, str) else tuple(pattern)


def _modules(
    value: Any, config: Mapping[str, Any], key: str, invalid: ErrorFactory
) -> str | frozenset[str]:
    if not isinstance(value, str) and not is_names(value):
        wrong = f"has {key} = {config.get(key)!r}"
        raise invalid(f"{wrong}; it must be names of modules, or a regular expression")
    return value if isinstance(value, str) else frozenset(value)


def _invocation(tokens: Any, invalid: ErrorFactory) -> tuple[int, ...]:
    if tokens is None:
        return ()
    is_list = isinstance(tokens, list) and 0 < len(tokens) <= MAX_INVOCATION
    if not is_list or not all(type(token) is int and token >= 0 for token in tokens):
        wrong = f"has alora_invocation_tokens = {shown(tokens)}"
        raise invalid(f"{wrong}; it must be a list of 1 to {MAX_INVOCATION} token ids")
    return tuple(tokens)


def _rank(value: Any, what: str, invalid: ErrorFactory) -> int:
    if type(value) is not int or value < 1:
        raise invalid(f"has {what} = {value!r}; it must be a positive whole number")
    return value


def _alpha(value: Any, what: str, invalid: ErrorFactory) -> float:
    try:
        alpha = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        alpha = math.inf
    if not 0 < alpha < math.inf:
        raise invalid(f"has {what} = {value!r}; it must be a positive number")
    return alpha


def _patterns(
    config: Mapping[str, Any],
    key: str,
    read: Callable[[Any, str, ErrorFactory], T],
    invalid: ErrorFactory,
) -> dict[str, T]:
    patterns = config.get(key)
    if patterns is None:
        return {}
    if not isinstance(patterns, dict):
        raise invalid(f"has {key} = {patterns!r}; it must be an object of patterns")
    if len(patterns) > MAX_PATTERNS:
        raise invalid(f"has {len(patterns)} patterns in {key}; at most {MAX_PATTERNS} are served")
    return {one: read(value, f"{key}[{one!r}]", invalid) for one, value in patterns.items()}
