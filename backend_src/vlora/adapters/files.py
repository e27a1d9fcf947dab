"""A PEFT folder: its files are read, checked against the model, and described.

Checks are strict, because PEFT itself silently accepts many broken files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlora.adapters.errors import ErrorFactory, as_text, check_tasks, is_names, read_json
from vlora.adapters.model_shape import (
    LM_HEAD,
    ModelShape,
    for_each_matrix,
    paths_of,
    split_pairs,
)
from vlora.adapters.peft import CONVERT, PeftConfig, TensorKey, UnknownKey, parse_key, read_config
from vlora.adapters.routing import Skill, read_skills
from vlora.adapters.tensors import PairTensors, WeightsFile, WeightsReader
from vlora.atmm.types import HeadMatrix, LoraPair
from vlora.errors import nearest, shown
from vlora.ids import VISION, MatrixId
from vlora.weights.slab import TARGETS

CONFIG = "adapter_config.json"
EXTRA = "vlora.json"
HEAD = "head.safetensors"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
# File in which LLaVA's training code saves a trained connector.
OUTSIDE_LORA = "non_lora_trainables.bin"
EXTRA_KEYS = (
    "tasks",
    "default_task",
    "accuracy",
    "head",
    "skills",
)  # Keys that `vlora.json` may have.
MAX_ACCURACIES, MAX_KEY = 256, 256  # Maximum number of entries of `accuracy`, and length of a key.
# Maximum number of labels of a head. Each of its answers, and each list of models, has them all.
MAX_LABELS = 10_000
MAX_ADAPTER_BYTES = 4 * 1024**3  # Default maximum size of an adapter's weights in fp32, in bytes.


@dataclass(frozen=True)
class AdapterInfo:
    """Description of an adapter for users.

    digest: SHA-256 of all weights but the head's, and of `invocation`; "" until they are read.
    ranks, vision_ranks: different ranks, ascending, in the language model and outside it.
    targets: names of the changed matrices within a layer, such as `q_proj`.
    tasks, accuracy: tasks, and accuracy by task, that its `vlora.json` declares.
    default_task: the one of them for requests that name none; None if it is not declared.
    head_labels, head_tasks: labels and tasks of its vision task head; () without one.
    skills: used to choose an adapter for requests that name none (`adapters/routing.py`).
    invocation: token ids that activate an activated LoRA, which changes only the tokens from their
        last occurrence in the prompt on. () for an adapter that changes all tokens.
    """

    name: str
    digest: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    tasks: tuple[str, ...]
    accuracy: Mapping[str, float]
    head_labels: tuple[str, ...]
    head_tasks: tuple[str, ...]
    skills: tuple[Skill, ...] = ()
    invocation: tuple[int, ...] = ()
    vision_ranks: tuple[int, ...] = ()
    default_task: str | None = None

    @property
    def own_task(self) -> str | None:
        """Task of requests that name none: the declared one or the only one."""
        if self.default_task is None and len(self.tasks) == 1:
            return self.tasks[0]
        return self.default_task


@dataclass(frozen=True)
class Adapter:
    """Weights of an adapter in fp32, with the scale folded into B.

    pairs: A and B of each matrix of the language model that it changes.
    head: vision task head (§4.2.2 of the paper), a linear layer that replaces the LM head, or None.
        It is applied to the last prompt token after the final norm, instead of decoding.
    """

    info: AdapterInfo
    pairs: Mapping[MatrixId, LoraPair]
    head: HeadMatrix | None


@dataclass(frozen=True)
class AdapterDescription:
    """Everything that an adapter's files declare, known without keeping the weights.

    info: description for users, without the digest.
    ranks: rank of each matrix of the language model that it changes, ascending by id.
    host_bytes: size in bytes of the weights of these matrices and of the head, in fp32.
    reader: reads the weights of these matrices; None for a simulated adapter.
    vision: reads the weights of the vision tower and the connector; None if there are none.
    hidden: width of the model, and so of the head.
    """

    info: AdapterInfo
    ranks: Mapping[MatrixId, int]
    host_bytes: int
    reader: WeightsReader | None = None
    vision: WeightsReader | None = None
    hidden: int = 0


def describe_adapter(
    name: str, folder: Path, model: ModelShape, max_bytes: int = MAX_ADAPTER_BYTES
) -> AdapterDescription:
    """Read and check the files of an adapter, and plan how its weights are read.

    max_bytes: maximum size of the weights in fp32. Raises InvalidArgument.
    """
    files = _read_files(name, folder)
    return _plan(files, _check(files, model, max_bytes), model.hidden)


def read_adapter(folder: Path, description: AdapterDescription) -> Adapter:
    """Return an adapter with its weights. Raises InvalidArgument if they are not finite or cannot
    be read. Its files must not have changed since `describe_adapter`.
    """
    info, invalid = description.info, ErrorFactory(description.info.name)
    head = None
    if info.head_labels:
        shape = len(info.head_labels), description.hidden
        head = _read_head(folder, shape, invalid, description.host_bytes)
    assert description.reader is not None
    invalid = invalid.in_file(WEIGHTS)
    pairs, digest = description.reader.read(folder / WEIGHTS, invalid)
    if description.vision is not None:
        _, of_vision = description.vision.read(folder / WEIGHTS, invalid)
        digest = hashlib.sha256(f"{digest} {of_vision}".encode()).hexdigest()
    if info.invocation:
        digest = hashlib.sha256(f"{digest} {info.invocation}".encode()).hexdigest()
    return Adapter(replace(info, digest=digest), split_pairs(pairs), head)


def load_adapter(
    name: str, folder: Path, model: ModelShape, max_bytes: int = MAX_ADAPTER_BYTES
) -> Adapter:
    return read_adapter(folder, describe_adapter(name, folder, model, max_bytes))


# -- read ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """Content of an adapter's folder, of which only the syntax has been checked, without `head` and
    `skills`.
    """

    name: str
    folder: Path
    config: PeftConfig
    weights: WeightsFile
    extra: Mapping[str, Any]
    invalid: ErrorFactory


def _read_files(name: str, folder: Path) -> _Files:
    invalid = ErrorFactory(name)
    if as_text(name) != name:
        raise invalid.in_file(str(folder))("has a name that is not UTF-8; rename it")
    config = read_config(folder, invalid)
    _check_no_pickles(folder, invalid)
    weights = WeightsFile(folder / WEIGHTS, invalid.in_file(WEIGHTS))
    return _Files(name, folder, config, weights, _read_extra(folder, invalid), invalid)


def _check_no_pickles(folder: Path, invalid: ErrorFactory) -> None:
    # Loading a pickle can run any code.
    if not (folder / WEIGHTS).exists() and (folder / PICKLED).exists():
        reason = f"is a pickle, which is never read; convert it to {WEIGHTS} with {CONVERT}"
        raise invalid.in_file(PICKLED)(reason)
    if (folder / OUTSIDE_LORA).exists():
        what = "holds weights that were trained besides the LoRA, such as those of the connector"
        remedy = "store them in the checkpoint, then remove this file"
        raise invalid.in_file(OUTSIDE_LORA)(f"{what}; {remedy}")


def _read_extra(folder: Path, invalid: ErrorFactory) -> dict[str, Any]:
    path = folder / EXTRA
    if not path.is_symlink() and not path.exists():
        return {}
    extra = read_json(path, invalid)
    invalid = invalid.in_file(EXTRA)
    unknown = set(extra) - set(EXTRA_KEYS)
    if unknown:
        key = min(unknown)
        hint = nearest(key, EXTRA_KEYS) or "."
        raise invalid(f"has the unknown key '{key}'{hint} Known: {', '.join(EXTRA_KEYS)}")
    check_tasks("'tasks'", extra.get("tasks", []), invalid)
    default = extra.get("default_task")
    if default is not None and default not in extra.get("tasks", []):
        raise invalid("must give 'default_task' as one of the names in 'tasks'")
    accuracy = extra.get("accuracy", {})
    if not isinstance(accuracy, dict) or not all(
        type(value) in (int, float) and -math.inf < value < math.inf for value in accuracy.values()
    ):
        raise invalid("must give 'accuracy' as an object of finite numbers by task")
    # Clients often ask for the description of all adapters.
    if len(accuracy) > MAX_ACCURACIES or any(len(key) > MAX_KEY for key in accuracy):
        limits = f"{MAX_ACCURACIES} entries, with keys of at most {MAX_KEY} characters"
        raise invalid(f"must give 'accuracy' as at most {limits}")
    return extra


# -- check -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Checked:
    """Parts of an adapter's files that have passed the checks. Matrices are in ascending order."""

    pairs: Mapping[MatrixId, PairTensors]
    head_labels: tuple[str, ...]
    head_tasks: tuple[str, ...]
    head_bytes: int
    skills: tuple[Skill, ...]


def _check(files: _Files, model: ModelShape, max_bytes: int) -> _Checked:
    config, invalid = files.config, files.invalid
    in_weights = invalid.in_file(WEIGHTS)
    pairs = _assign_tensors(files.weights, model, _base_of(config), in_weights)
    if not pairs:
        raise in_weights("holds no LoRA weights")
    present = [key for pair in pairs.values() for key in (pair.a, pair.b) if key]
    lora_bytes = files.weights.require_fits(present, max_bytes)
    pairs = {matrix: pairs[matrix] for matrix in sorted(pairs)}
    for matrix, pair in pairs.items():
        _check_pair(matrix, pair, files, model)
    labels, tasks = _head_declaration(files)
    head_bytes = 0
    if labels:
        head = _read_head(files.folder, (len(labels), model.hidden), invalid, max_bytes, lora_bytes)
        head_bytes = head.weight.nbytes + head.bias.nbytes
    _check_invocation(config, bool(labels), model, invalid.in_file(CONFIG))
    if any(layer == VISION for layer, _ in pairs):
        _check_vision(config, files.extra, invalid)
    skills = read_skills(files.extra.get("skills", []), invalid.in_file(EXTRA))
    return _Checked(pairs, labels, tasks, head_bytes, skills)


def _base_of(config: PeftConfig) -> str:
    """Return the end of a message about weights that do not fit the model, which may be another."""
    return f"; {CONFIG} names the base model {shown(config.base)}" if config.base else ""


def _assign_tensors(
    file: WeightsFile, model: ModelShape, base: str, invalid: ErrorFactory
) -> dict[MatrixId, PairTensors]:
    keys: dict[MatrixId, PairTensors] = {}
    # PEFT stores a copy of the embeddings beside their LoRA, which is the fault to report.
    for key in sorted(file.shapes, key=lambda key: "lora_embedding" not in key):
        try:
            parsed = parse_key(key, model)
        except UnknownKey as reason:
            raise invalid(f"holds '{key}', {reason}{base}") from None
        if parsed.part == "magnitude":
            raise invalid(f"holds '{key}', a DoRA magnitude; make it a plain LoRA with {CONVERT}")
        if parsed.part == "weight":
            _check_copy(file, key, parsed, model, invalid)
            continue
        assert parsed.matrix is not None
        pair = keys.setdefault(parsed.matrix, PairTensors(parsed.path))
        if pair.path != parsed.path:
            raise invalid(f"holds '{key}', but other keys name the same module '{pair.path}'")
        which = parsed.part.lower()
        if other := getattr(pair, which):
            raise invalid(f"holds '{key}' a second time under another name, '{other}'")
        setattr(pair, which, key)
    return keys


def _check_copy(
    file: WeightsFile, key: str, parsed: TensorKey, model: ModelShape, invalid: ErrorFactory
) -> None:
    # PEFT stores an unchanged copy of the LM head with an adapter of the LM head.
    if parsed.matrix != (-1, LM_HEAD):
        what = "embeddings" if parsed.matrix is None else "a whole weight"
        remedy = f"if the tensor equals that of the base model, {CONVERT} drops it"
        raise invalid(f"holds '{key}', {what} besides the LoRA; {remedy}")
    expected = (model.vocabulary, model.hidden)
    if file.shapes[key] != expected or not file.equals(key, model.lm_head()):
        what = f"holds '{key}', which differs from the base model's own lm_head"
        raise invalid(f"{what}; train the LM head as a LoRA target")


def _check_pair(matrix: MatrixId, pair: PairTensors, files: _Files, model: ModelShape) -> None:
    config, invalid = files.config, files.invalid.in_file(WEIGHTS)
    module, paths = pair.path, paths_of(matrix, model, pair.path)
    if not pair.a or not pair.b:
        raise invalid(f"has no lora_{'B' if pair.a else 'A'} for {module}")
    if not config.targets(paths):
        raise invalid(f"holds '{pair.a}', but adapter_config.json does not target {module}")
    d_out, d_in = model.shape_of(matrix)
    pair.rank = rank = config.rank_of(paths)
    a, b = files.weights.shapes[pair.a], files.weights.shapes[pair.b]
    if (a, b) != ((rank, d_in), (d_out, rank)):
        expected = f"with rank {rank} they must be ({rank}, {d_in}) and ({d_out}, {rank})"
        raise invalid(f"has A {a} and B {b} for {module}; {expected}{_base_of(config)}")
    pair.scale = config.scale_of(paths)


def _check_invocation(
    config: PeftConfig, has_head: bool, model: ModelShape, invalid: ErrorFactory
) -> None:
    unknown = [token for token in config.invocation if token >= model.vocabulary]
    if unknown:
        ids = f"ids run from 0 to {model.vocabulary - 1}"
        raise invalid(f"has {unknown[0]} in alora_invocation_tokens; {ids}")
    if config.invocation and has_head:
        # If a prompt lacked the invocation, its request would reach the head without the adapter.
        raise invalid("has alora_invocation_tokens, which cannot be used with a vision task head")


def _check_vision(config: PeftConfig, extra: Mapping[str, Any], invalid: ErrorFactory) -> None:
    # Images are encoded before the engine reads the prompt.
    if config.invocation:
        raise invalid.in_file(CONFIG)(
            "has alora_invocation_tokens, which cannot be used with weights of the vision tower or"
            " connector: an image may stand before the invocation"
        )
    if extra.get("skills"):
        raise invalid.in_file(EXTRA)(
            "has 'skills', which cannot be used with weights of the vision tower or connector:"
            " images are encoded before an adapter is chosen by its skills"
        )


def _head_declaration(files: _Files) -> tuple[tuple[str, ...], tuple[str, ...]]:
    declared, invalid = files.extra.get("head"), files.invalid.in_file(EXTRA)
    if declared is None:
        if (files.folder / HEAD).exists():
            raise invalid("declares no 'head', though head.safetensors exists")
        return (), ()
    if not isinstance(declared, dict) or set(declared) != {"labels", "tasks"}:
        raise invalid('must give \'head\' as {"labels": [...], "tasks": [...]}')
    for key, value in declared.items():
        if not value or not is_names(value) or len(set(value)) != len(value):
            raise invalid(f"must give head.{key} as a list of different names")
    labels = declared["labels"]
    if len(labels) > MAX_LABELS or any(len(label) > MAX_KEY for label in labels):
        limits = f"{MAX_LABELS} labels of at most {MAX_KEY} characters"
        raise invalid(f"must give head.labels as at most {limits}")
    check_tasks("head.tasks", declared["tasks"], invalid)
    return tuple(labels), tuple(declared["tasks"])


def _read_head(
    folder: Path, shape: tuple[int, int], invalid: ErrorFactory, max_bytes: int, lora_bytes: int = 0
) -> HeadMatrix:
    invalid = invalid.in_file(HEAD)
    file = WeightsFile(folder / HEAD, invalid)
    expected = {"weight": shape, "bias": shape[:1]}
    if set(file.shapes) != set(expected):
        raise invalid(f"must hold 'weight' and 'bias', not {sorted(file.shapes)}")
    for name, wanted in expected.items():
        if file.shapes[name] != wanted:
            raise invalid(f"has '{name}' {file.shapes[name]}; it must be {wanted}")
    file.require_fits(expected, max_bytes, lora_bytes)
    return HeadMatrix(file.read("weight"), file.read("bias"))


# -- plan ------------------------------------------------------------------------------------------


def _plan(files: _Files, checked: _Checked, hidden: int) -> AdapterDescription:
    pairs = {matrix: pair for matrix, pair in checked.pairs.items() if matrix[0] != VISION}
    in_vision = {matrix: pair for matrix, pair in checked.pairs.items() if matrix[0] == VISION}
    reader = files.weights.reader(pairs)
    vision = files.weights.reader(in_vision) if in_vision else None
    changed = for_each_matrix(reader.ranks)
    targets = {target for _, target in changed}
    info = AdapterInfo(
        name=files.name,
        digest="",
        ranks=_ranks(pairs),
        targets=tuple(target for target in (*TARGETS, LM_HEAD) if target in targets),
        tasks=tuple(files.extra.get("tasks", ())),
        accuracy=dict(files.extra.get("accuracy", {})),
        head_labels=checked.head_labels,
        head_tasks=checked.head_tasks,
        skills=checked.skills,
        invocation=files.config.invocation,
        vision_ranks=_ranks(in_vision),
        default_task=files.extra.get("default_task"),
    )
    host_bytes = reader.nbytes + checked.head_bytes
    return AdapterDescription(info, changed, host_bytes, reader, vision, hidden)


def _ranks(pairs: Mapping[MatrixId, PairTensors]) -> tuple[int, ...]:
    return tuple(sorted({pair.rank for pair in pairs.values()}))
