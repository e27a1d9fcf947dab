"""Loading of adapters: a PEFT folder → checked, packed weights.

The checks are strict, because PEFT itself silently accepts many broken files: unsupported options
are rejected by name, and each tensor of the file must belong to a matrix of the model. This module
knows no slots or pools.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlora.atmm.types import LoraPair
from vlora.errors import nearest
from vlora.ids import MatrixId
from vlora.lora.head import TaskHead, load_head
from vlora.lora.model_shape import LM_HEAD, ModelShape, paths_of
from vlora.lora.patterns import suffixes
from vlora.lora.peft_config import (
    ErrorFactory,
    PeftConfig,
    as_text,
    is_names,
    read_config,
    read_json,
)
from vlora.lora.slab import TARGETS
from vlora.lora.weights_file import WeightsFile
from vlora.lora.weights_reader import WeightsReader

WEIGHTS = "adapter_model.safetensors"
EXTRA_KEYS = ("tasks", "accuracy", "head")
"""Known keys of `vlora.json`."""
MAX_ADAPTER_BYTES = 4 * 1024**3
"""Default maximum size of an adapter's weights in fp32."""
_LAYER = re.compile(
    r"^(?:base_model\.model\.)?(?P<path>(?:(?:model|language_model)\.)*"
    r"layers\.(?P<layer>0|[1-9][0-9]{0,4})\.(?:self_attn|mlp)\.(?P<target>\w+))"
    r"\.lora_(?P<which>[AB])(?:\.default)?\.weight$"
)
_HEAD = re.compile(
    r"^(?:base_model\.model\.)?(?P<path>(?:language_model\.)?lm_head)"
    r"\.(?:lora_(?P<which>[AB])(?:\.default)?|base_layer)\.weight$"
)
_VISION = re.compile(r"vision_tower|visual|vision_model|multi_modal_projector|merger|connector")


@dataclass(frozen=True)
class AdapterInfo:
    """Description of an adapter for users.

    digest: SHA-256 of everything that changes the language model; "" until the weights are read.
    """

    name: str
    digest: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    tasks: tuple[str, ...]
    accuracy: Mapping[str, float]
    head_labels: tuple[str, ...]
    head_tasks: tuple[str, ...]


@dataclass(frozen=True)
class Adapter:
    """Packed weights in fp32, with the scale folded into B. `pairs` contains only the targeted
    matrices."""

    info: AdapterInfo
    pairs: Mapping[MatrixId, LoraPair]
    head: TaskHead | None


@dataclass(frozen=True)
class Description:
    """Declarations of an adapter's files, made without reading the weights.

    info: lacks the digest.
    ranks: of each targeted matrix, in the order of the matrices.
    host_bytes: size of the weights in fp32, those of the head included.
    reader: reads the weights; None for a simulated adapter.
    """

    info: AdapterInfo
    ranks: Mapping[MatrixId, int]
    host_bytes: int
    reader: WeightsReader | None = None


@dataclass
class _PairKeys:
    """Keys in the file of one matrix's A and B. path: of the module, in the file's layout."""

    path: str
    a: str | None = None
    b: str | None = None


class AdapterFiles:
    """Checked files of an adapter: their declarations, and their weights by `read`."""

    def __init__(
        self, name: str, folder: Path, model: ModelShape, max_bytes: int = MAX_ADAPTER_BYTES
    ) -> None:
        """Check the files. Raise InvalidArgument, which names adapter, file and reason.

        max_bytes: maximum size of the weights in fp32.
        """
        invalid = ErrorFactory(name)
        self._invalid = invalid.in_file(WEIGHTS)
        self._folder = folder
        if as_text(name) != name:
            raise invalid.in_file(str(folder))("has a name that is no UTF-8; rename it")
        config = read_config(folder, invalid)
        if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
            raise self._invalid("is missing; a pickled .bin is never read, save as safetensors")
        file = WeightsFile(folder / WEIGHTS, self._invalid)
        keys = _assign_tensors(file, model, self._invalid)
        if not keys:
            raise self._invalid("holds no LoRA weights")
        _check_names(config, model, invalid.in_file("adapter_config.json"))
        host_bytes = file.require_fits(
            [key for pair in keys.values() for key in (pair.a, pair.b) if key], max_bytes
        )
        scales: dict[MatrixId, float] = {}
        ranks: dict[MatrixId, int] = {}
        for matrix, pair in sorted(keys.items()):
            ranks[matrix], scales[matrix] = _check_pair(
                matrix, pair, file, config, model, self._invalid
            )
        extra = _read_extra(folder, invalid)
        self._head = load_head(
            folder, extra.get("head"), model.hidden, invalid, max_bytes, host_bytes
        )
        host_bytes += self._head.nbytes if self._head else 0
        info = AdapterInfo(
            name=name,
            digest="",
            ranks=tuple(sorted(set(ranks.values()))),
            targets=tuple(t for t in (*TARGETS, LM_HEAD) if any(m[1] == t for m in ranks)),
            tasks=tuple(extra.get("tasks", ())),
            accuracy=dict(extra.get("accuracy", {})),
            head_labels=self._head.labels if self._head else (),
            head_tasks=self._head.tasks if self._head else (),
        )
        reader = _reader(file, keys, ranks, scales)
        self.description = Description(info, reader.ranks, host_bytes, reader)

    def read(self) -> Adapter:
        """Return the adapter. Raise InvalidArgument if the weights cannot be read or are not
        finite."""
        return _read(self._folder, self.description, self._head, self._invalid)


def _reader(
    file: WeightsFile,
    keys: Mapping[MatrixId, _PairKeys],
    ranks: Mapping[MatrixId, int],
    scales: Mapping[MatrixId, float],
) -> WeightsReader:
    """Return the reader of the file's A of all matrices, then B of all, in the order of `ranks`."""
    layout = file.layout
    index = {key: number for number, key in enumerate(layout.keys)}
    both = [*(keys[matrix].a for matrix in ranks), *(keys[matrix].b for matrix in ranks)]
    order = [key for key in both if key is not None]
    return WeightsReader(
        layout,
        ranks,
        tuple(scales.values()),
        tuple(index[key] for key in order),
        tuple((file.shapes[key][0], file.shapes[key][1]) for key in order),
    ).shared()


def read_adapter(name: str, folder: Path, description: Description, hidden: int) -> Adapter:
    """Read the weights of an adapter whose files have been checked before.

    description: result of that check; the weights file must not have changed since.
    hidden: width of the model.

    Raises InvalidArgument as `AdapterFiles.read` does.
    """
    invalid = ErrorFactory(name)
    head = None
    if description.info.head_labels:
        declared = _read_extra(folder, invalid).get("head")
        head = load_head(folder, declared, hidden, invalid, description.host_bytes)
    return _read(folder, description, head, invalid.in_file(WEIGHTS))


def _read(
    folder: Path, description: Description, head: TaskHead | None, invalid: ErrorFactory
) -> Adapter:
    assert description.reader is not None
    pairs, digest = description.reader.read(folder / WEIGHTS, invalid)
    return Adapter(replace(description.info, digest=digest), pairs, head)


def load_adapter(
    name: str, folder: Path, model: ModelShape, max_bytes: int = MAX_ADAPTER_BYTES
) -> Adapter:
    """Return the adapter in `folder`. Raise as `AdapterFiles` does."""
    return AdapterFiles(name, folder, model, max_bytes).read()


def _check_names(config: PeftConfig, model: ModelShape, invalid: ErrorFactory) -> None:
    """Check that each name in `target_modules` names a module of the model, even one that
    adapters cannot change. A pattern needs no check: if it matches nothing, all weights are left
    over."""
    if isinstance(config.target_modules, str):
        return
    unknown = config.target_modules - model.suffixes
    if unknown:
        unknown -= {suffix for path in model.other_modules() for suffix in suffixes(path)}
    if unknown:
        raise invalid(f"has '{min(unknown)}' in target_modules, which names no module of the model")


def _assign_tensors(
    file: WeightsFile, model: ModelShape, invalid: ErrorFactory
) -> dict[MatrixId, _PairKeys]:
    """Return the keys of each matrix's A and B; reject a tensor that belongs to none, by name."""
    keys: dict[MatrixId, _PairKeys] = {}
    for key in file.shapes:
        match = _LAYER.match(key) or _HEAD.match(key)
        if match is None:
            raise invalid(f"holds '{key}', {_reason_unknown(key)}")
        if match["which"] is None:
            _check_copy(file, key, model, invalid)
            continue
        matrix = (-1, LM_HEAD)
        if "layer" in match.groupdict():
            matrix = (int(match["layer"]), match["target"])
            if matrix not in model.matrices:
                raise invalid(f"holds '{key}', which this model does not have")
        pair = keys.setdefault(matrix, _PairKeys(match["path"]))
        which = match["which"].lower()
        if getattr(pair, which) is not None:
            raise invalid(f"holds '{key}' a second time under another name")
        setattr(pair, which, key)
    return keys


def _check_copy(file: WeightsFile, key: str, model: ModelShape, invalid: ErrorFactory) -> None:
    """Check that a tensor equals the base model's lm_head, which PEFT saves with an adapter of
    it."""
    expected = (model.vocabulary, model.hidden)
    if file.shapes[key] != expected or not file.equals(key, model.lm_head()):
        raise invalid(f"holds '{key}', which differs from the base model's own lm_head")


def _reason_unknown(key: str) -> str:
    """Return why a tensor with this key is not supported."""
    if "lora_magnitude_vector" in key:
        return "a DoRA magnitude, which is not supported"
    if "lora_embedding" in key or "embed_tokens" in key:
        return "trained embeddings, which are not supported"
    if _VISION.search(key):
        return "weights of the vision tower or connector, which are not supported yet"
    return "which is no LoRA weight of the language model"


def _check_pair(
    matrix: MatrixId,
    pair: _PairKeys,
    file: WeightsFile,
    config: PeftConfig,
    model: ModelShape,
    invalid: ErrorFactory,
) -> tuple[int, float]:
    """Return (rank, scale) of a matrix after checking that its A and B fit it."""
    module, paths = pair.path, paths_of(matrix, model, pair.path)
    if pair.a is None or pair.b is None:
        missing = "A" if pair.a is None else "B"
        raise invalid(f"has no lora_{missing} for {module}")
    if not config.targets(paths):
        raise invalid(
            f"holds '{pair.a}', which is left over: adapter_config.json does not target {module}"
        )
    d_out, d_in = model.shape_of(matrix)
    rank = config.rank_of(paths)
    shapes = file.shapes[pair.a], file.shapes[pair.b]
    if shapes != ((rank, d_in), (d_out, rank)):
        raise invalid(
            f"has A {shapes[0]} and B {shapes[1]} for {module};"
            f" with rank {rank} they must be ({rank}, {d_in}) and ({d_out}, {rank})"
        )
    return rank, config.scale_of(paths)


def _read_extra(folder: Path, invalid: ErrorFactory) -> dict[str, Any]:
    """Return `vlora.json`, checked except for the head's part; {} if there is no such file."""
    path = folder / "vlora.json"
    if not path.is_symlink() and not path.exists():
        return {}
    extra = read_json(path, invalid)
    invalid = invalid.in_file(path.name)
    unknown = set(extra) - set(EXTRA_KEYS)
    if unknown:
        key = min(unknown)
        hint = nearest(key, EXTRA_KEYS) or "."
        raise invalid(f"has the unknown key '{key}'{hint} Known: {', '.join(EXTRA_KEYS)}")
    tasks = extra.get("tasks", [])
    if not is_names(tasks):
        raise invalid("must give 'tasks' as a list of names")
    accuracy = extra.get("accuracy", {})
    if not isinstance(accuracy, dict) or not all(
        type(value) in (int, float) and -math.inf < value < math.inf for value in accuracy.values()
    ):
        raise invalid("must give 'accuracy' as numbers by task")
    return extra
