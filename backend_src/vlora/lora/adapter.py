"""A PEFT folder → checked, packed weights.

Strict, because PEFT itself accepts many broken files silently: what is not served is refused by
name, and every tensor of the file has to find its place. Knows nothing of slots or pools.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from vlora.atmm.types import LoraPair
from vlora.errors import nearest
from vlora.ids import MatrixId
from vlora.lora.head import TaskHead, load_head
from vlora.lora.patterns import suffixes
from vlora.lora.peft_config import (
    PeftConfig,
    Refusal,
    as_text,
    is_names,
    read_config,
    read_json,
)
from vlora.lora.slab import ATTENTION, TARGETS
from vlora.lora.weights_file import WeightsFile
from vlora.lora.weights_reader import WeightsReader

WEIGHTS = "adapter_model.safetensors"
EXTRA_KEYS = ("tasks", "accuracy", "head")
"""Of `vlora.json`."""
MAX_ADAPTER_BYTES = 4 * 1024**3
LM_HEAD = "lm_head"
LAYOUTS = ("model.language_model.", "language_model.model.", "model.", "")
"""Before `layers`: transformers 5, transformers 4, a decoder on its own, and bare."""

_LAYER = re.compile(
    r"^(?:base_model\.model\.)?(?P<path>(?:(?:model|language_model)\.)*"
    r"layers\.(?P<layer>0|[1-9][0-9]{0,4})\.(?:self_attn|mlp)\.(?P<target>\w+))"
    r"\.lora_(?P<which>[AB])(?:\.default)?\.weight$"
)
_HEAD = re.compile(
    r"^(?:base_model\.model\.)?(?P<path>(?:language_model\.)?lm_head)"
    r"\.(?:lora_(?P<which>[AB])(?:\.default)?|base_layer)\.weight$"
)
_ELSEWHERE = re.compile(r"vision_tower|visual|vision_model|multi_modal_projector|merger|connector")


@dataclass(frozen=True)
class AdapterInfo:
    """What a user may know of an adapter. digest: SHA-256 of what changes the language model, ""
    until its weights have been read."""

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

    prefix: before `layers` in the names of transformers' model.
    lm_head: gives the base model's; called only for an adapter that holds a copy of it.
    other_modules: paths of modules beside the decoder's; called only for an adapter that names
    one that the decoder has not.
    """

    layers: int
    hidden: int
    vocabulary: int
    shapes: Mapping[str, tuple[int, int]]
    prefix: str
    lm_head: Callable[[], torch.Tensor]
    other_modules: Callable[[], Iterable[str]]

    @cached_property
    def suffixes(self) -> frozenset[str]:
        """All that names one of these matrices, in any layout that is served."""
        paths = (path for place in self.places for path in paths_of(place, self))
        return frozenset(suffix for path in paths for suffix in suffixes(path))

    @cached_property
    def places(self) -> frozenset[MatrixId]:
        """All matrices that an adapter may change."""
        layers = ((layer, target) for layer in range(self.layers) for target in self.shapes)
        return frozenset([*layers, (-1, LM_HEAD)])

    def shape_of(self, place: MatrixId) -> tuple[int, int]:
        layer, target = place
        return (self.vocabulary, self.hidden) if layer < 0 else self.shapes[target]


@dataclass(frozen=True)
class Adapter:
    """Packed weights, fp32, scale folded into B. `pairs` lacks the places it does not target."""

    info: AdapterInfo
    pairs: Mapping[MatrixId, LoraPair]
    head: TaskHead | None


@dataclass(frozen=True)
class Description:
    """What an adapter's files declare, read without their weights: `info` lacks the digest.
    ranks: of each place that it targets, in their order. host_bytes: of its weights in fp32.
    recipe: how they are read; None for a simulated adapter."""

    info: AdapterInfo
    ranks: Mapping[MatrixId, int]
    host_bytes: int
    recipe: WeightsReader | None = None


@dataclass
class _Halves:
    """Keys of the two matrices of one place. path: of its module, in the file's layout."""

    path: str
    a: str | None = None
    b: str | None = None


class AdapterFiles:
    """An adapter's checked files: what they declare, then, by `read`, their weights."""

    def __init__(
        self, name: str, folder: Path, model: ModelShape, max_bytes: int = MAX_ADAPTER_BYTES
    ) -> None:
        """max_bytes: what the weights may need in fp32. InvalidArgument names adapter, file and
        reason."""
        refuse = Refusal(name)
        self._refuse = refuse.of(WEIGHTS)
        self._folder = folder
        if as_text(name) != name:
            raise refuse.of(str(folder))("has a name that is no UTF-8; rename it")
        config = read_config(folder, refuse)
        if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
            raise self._refuse("is missing; a pickled .bin is never read, save as safetensors")
        file = WeightsFile(folder / WEIGHTS, self._refuse)
        found = _sort(file, model, self._refuse)
        if not found:
            raise self._refuse("holds no LoRA weights")
        _check_names(config, model, refuse.of("adapter_config.json"))
        keys = [key for half in found.values() for key in (half.a, half.b) if key]
        needed = file.require_room(keys, max_bytes)
        scales: dict[MatrixId, float] = {}
        ranks: dict[MatrixId, int] = {}
        halves = sorted(found.items())
        for place, half in halves:
            ranks[place], scales[place] = _check_pair(
                place, half, file, config, model, self._refuse
            )
        extra = _read_extra(folder, refuse)
        self._head = load_head(folder, extra.get("head"), model.hidden, refuse)
        info = AdapterInfo(
            name=name,
            digest="",
            ranks=tuple(sorted(set(ranks.values()))),
            targets=tuple(t for t in (*TARGETS, LM_HEAD) if any(p[1] == t for p in ranks)),
            tasks=tuple(extra.get("tasks", ())),
            accuracy=dict(extra.get("accuracy", {})),
            head_labels=self._head.labels if self._head else (),
            head_tasks=self._head.tasks if self._head else (),
        )
        layout = file.layout
        index = {key: at for at, key in enumerate(layout.keys)}
        named = [*(half.a for _, half in halves), *(half.b for _, half in halves)]
        order = [key for key in named if key is not None]
        recipe = WeightsReader(
            layout,
            ranks,
            tuple(scales.values()),
            tuple(index[key] for key in order),
            tuple((file.shapes[key][0], file.shapes[key][1]) for key in order),
        ).shared()
        self.description = Description(info, recipe.ranks, needed, recipe)

    def read(self) -> Adapter:
        """Raises InvalidArgument where the weights cannot be read, or are not finite."""
        return _read(self._folder, self.description, self._head, self._refuse)


def read_adapter(name: str, folder: Path, description: Description, hidden: int) -> Adapter:
    """The weights of files that have been described, and have not changed since. hidden: of the
    model. Raises InvalidArgument as `AdapterFiles.read`."""
    refuse = Refusal(name)
    head = None
    if description.info.head_labels:
        head = load_head(folder, _read_extra(folder, refuse).get("head"), hidden, refuse)
    return _read(folder, description, head, refuse.of(WEIGHTS))


def _read(
    folder: Path, description: Description, head: TaskHead | None, refuse: Refusal
) -> Adapter:
    assert description.recipe is not None
    pairs, digest = description.recipe.read(folder / WEIGHTS, refuse)
    return Adapter(replace(description.info, digest=digest), pairs, head)


def load_adapter(
    name: str, folder: Path, model: ModelShape, max_bytes: int = MAX_ADAPTER_BYTES
) -> Adapter:
    """The adapter in `folder`. Raises as `AdapterFiles`."""
    return AdapterFiles(name, folder, model, max_bytes).read()


def _check_names(config: PeftConfig, model: ModelShape, refuse: Refusal) -> None:
    """Each name in `target_modules` has to name a module of the model, be it one without weights
    here; a pattern that matches none leaves all weights over."""
    if isinstance(config.target_modules, str):
        return
    unknown = config.target_modules - model.suffixes
    if unknown:
        unknown -= {suffix for path in model.other_modules() for suffix in suffixes(path)}
    if unknown:
        raise refuse(f"has '{min(unknown)}' in target_modules, which names no module of the model")


def paths_of(place: MatrixId, model: ModelShape, own: str | None = None) -> tuple[str, ...]:
    """Paths of a module that patterns of an adapter may mean: its own, as its file's keys have it,
    and the served model's; without `own`, those of all layouts that are served."""
    layer, target = place
    if layer < 0:
        return (LM_HEAD,) if own is None else (own, LM_HEAD)
    block = "self_attn" if target in ATTENTION else "mlp"
    module = f"layers.{layer}.{block}.{target}"
    if own is None:
        return tuple(prefix + module for prefix in LAYOUTS)
    return own, model.prefix + module


def _sort(file: WeightsFile, model: ModelShape, refuse: Refusal) -> dict[MatrixId, _Halves]:
    """Every tensor of the file to its place; what fits nowhere is refused by name."""
    halves: dict[MatrixId, _Halves] = {}
    for key in file.shapes:
        match = _LAYER.match(key) or _HEAD.match(key)
        if match is None:
            raise refuse(f"holds '{key}', {_why_not(key)}")
        if match["which"] is None:
            _check_copy(file, key, model, refuse)
            continue
        place = (-1, LM_HEAD)
        if "layer" in match.groupdict():
            place = (int(match["layer"]), match["target"])
            if place not in model.places:
                raise refuse(f"holds '{key}', which this model does not have")
        half = halves.setdefault(place, _Halves(match["path"]))
        which = match["which"].lower()
        if getattr(half, which) is not None:
            raise refuse(f"holds '{key}' a second time under another name")
        setattr(half, which, key)
    return halves


def _check_copy(file: WeightsFile, key: str, model: ModelShape, refuse: Refusal) -> None:
    """PEFT saves the base model's own lm_head beside an adapter of it."""
    same = file.shapes[key] == (model.vocabulary, model.hidden)
    if same:
        base = model.lm_head()
        same = torch.equal(file.read(key).to(base.dtype), base)
    if not same:
        raise refuse(f"holds '{key}', which differs from the base model's own lm_head")


def _why_not(key: str) -> str:
    if "lora_magnitude_vector" in key:
        return "a DoRA magnitude, which is not supported"
    if "lora_embedding" in key or "embed_tokens" in key:
        return "trained embeddings, which are not supported"
    if _ELSEWHERE.search(key):
        return "weights of the vision tower or connector, which are not supported yet"
    return "which is no LoRA weight of the language model"


def _check_pair(
    place: MatrixId,
    half: _Halves,
    file: WeightsFile,
    config: PeftConfig,
    model: ModelShape,
    refuse: Refusal,
) -> tuple[int, float]:
    """(rank, scale) of one place, whose two matrices have to fit it."""
    where, paths = half.path, paths_of(place, model, half.path)
    if half.a is None or half.b is None:
        missing = "A" if half.a is None else "B"
        raise refuse(f"has no lora_{missing} for {where}")
    if not config.targets(paths):
        raise refuse(
            f"holds '{half.a}', which is left over: adapter_config.json does not target {where}"
        )
    d_out, d_in = model.shape_of(place)
    rank = config.rank_of(paths)
    shapes = file.shapes[half.a], file.shapes[half.b]
    if shapes != ((rank, d_in), (d_out, rank)):
        raise refuse(
            f"has A {shapes[0]} and B {shapes[1]} for {where};"
            f" with rank {rank} they must be ({rank}, {d_in}) and ({d_out}, {rank})"
        )
    return rank, config.scale_of(paths)


def _read_extra(folder: Path, refuse: Refusal) -> dict[str, Any]:
    """`vlora.json`, checked as far as it is not the head's; {} where there is none."""
    path = folder / "vlora.json"
    if not path.is_symlink() and not path.exists():
        return {}
    extra = read_json(path, refuse)
    refuse = refuse.of(path.name)
    unknown = set(extra) - set(EXTRA_KEYS)
    if unknown:
        key = min(unknown)
        hint = nearest(key, EXTRA_KEYS) or "."
        raise refuse(f"has the unknown key '{key}'{hint} Known: {', '.join(EXTRA_KEYS)}")
    tasks = extra.get("tasks", [])
    if not is_names(tasks):
        raise refuse("must give 'tasks' as a list of names")
    accuracy = extra.get("accuracy", {})
    if not isinstance(accuracy, dict) or not all(
        type(value) in (int, float) and -math.inf < value < math.inf for value in accuracy.values()
    ):
        raise refuse("must give 'accuracy' as numbers by task")
    return extra
