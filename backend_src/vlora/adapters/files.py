"""Loading of adapters: a PEFT folder → checked weights in fp32.

Checks are strict, because PEFT itself silently accepts many broken files. Unsupported options are
rejected by name, and each tensor in the file must belong to a matrix of the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlora.adapters.errors import ErrorFactory, as_text, is_names, read_json
from vlora.adapters.model_shape import LM_HEAD, ModelShape, for_each_matrix, split_pairs
from vlora.adapters.patterns import suffixes
from vlora.adapters.peft import CONVERT, PeftConfig, read_config
from vlora.adapters.routing import Skill, read_skills
from vlora.adapters.tensors import (
    WeightsFile,
    WeightsReader,
    assign_tensors,
    check_pair,
    make_reader,
)
from vlora.atmm.types import HeadMatrix, LoraPair
from vlora.errors import nearest
from vlora.ids import VISION, MatrixId
from vlora.weights.slab import TARGETS

# Vision task heads (§4.2.2 of the paper): linear layers that replace the LM head.
#
# A head is applied to the hidden state of the last prompt token after the final norm. The request
# then ends without a decode step.


@dataclass(frozen=True)
class TaskHead:
    """Vision task head of one adapter.

    linear: weight [classes, hidden] and bias [classes], fp32.
    labels: one label per class.
    tasks: tasks that the head serves.
    """

    linear: HeadMatrix
    labels: tuple[str, ...]
    tasks: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.linear)


def load_head(
    folder: Path,
    declared: Any,
    hidden: int,
    invalid: ErrorFactory,
    max_bytes: int,
    others: int = 0,
) -> TaskHead | None:
    """Return the vision task head in an adapter's folder; None if it has none.

    declared: value of "head" in `vlora.json`, which must be given if and only if `head.safetensors`
        exists.
    hidden: width of the model.
    max_bytes: maximum size in bytes of the adapter in fp32.
    others: size in bytes of the adapter's other weights in fp32.

    Raises InvalidArgument if the declaration and the file do not match, or if the head does not fit
    the model.
    """
    path = folder / "head.safetensors"
    if declared is None and not path.exists():
        return None
    labels, tasks = _declaration(declared, invalid.in_file("vlora.json"))
    invalid = invalid.in_file(path.name)
    file = WeightsFile(path, invalid)
    expected = {"weight": (len(labels), hidden), "bias": (len(labels),)}
    if set(file.shapes) != set(expected):
        raise invalid(f"must hold 'weight' and 'bias', not {sorted(file.shapes)}")
    for name, shape in expected.items():
        if file.shapes[name] != shape:
            raise invalid(f"has '{name}' {file.shapes[name]}; it must be {shape}")
    file.require_fits(expected, max_bytes, others)
    return TaskHead(HeadMatrix(file.read("weight"), file.read("bias")), labels, tasks)


def _declaration(declared: Any, invalid: ErrorFactory) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (labels, tasks) of "head" in vlora.json. Raises InvalidArgument."""
    if declared is None:
        raise invalid("declares no 'head', though head.safetensors exists")
    if not isinstance(declared, dict) or set(declared) != {"labels", "tasks"}:
        raise invalid('must give \'head\' as {"labels": [...], "tasks": [...]}')
    for key, value in declared.items():
        if not value or not is_names(value) or len(set(value)) != len(value):
            raise invalid(f"must give head.{key} as a list of different names")
    return tuple(declared["labels"]), tuple(declared["tasks"])


WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
OUTSIDE_LORA = "non_lora_trainables.bin"
"""File in which LLaVA's training code saves a trained connector."""
EXTRA_KEYS = ("tasks", "accuracy", "head", "skills")
"""Keys that `vlora.json` may have."""
MAX_ADAPTER_BYTES = 4 * 1024**3
"""Default maximum size of an adapter's weights in fp32, in bytes."""


@dataclass(frozen=True)
class AdapterInfo:
    """Description of an adapter for users.

    digest: SHA-256 of all weights except the head's, and of `invocation`; "" until the weights are
        read.
    ranks: ranks of the matrices that the adapter changes in the language model, ascending, each
        rank once.
    targets: names of the changed matrices within a layer, such as `q_proj`.
    tasks: tasks that its `vlora.json` declares.
    accuracy: accuracy by task, as its `vlora.json` declares.
    head_labels: labels of its vision task head; () without a head.
    head_tasks: tasks that the head answers.
    skills: used to choose an adapter for requests that name none (`adapters/routing.py`).
    invocation: token ids that activate an activated LoRA. It changes only the tokens from the last
        occurrence of these ids in the prompt on. () for an adapter that changes all tokens.
    vision_ranks: ranks of the adapter's LoRA on linear layers of the vision tower and the
        connector, ascending, each rank once.
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


@dataclass(frozen=True)
class Adapter:
    """Weights of an adapter in fp32, with the scale folded into B.

    pairs: A and B of each matrix of the language model that it changes.
    """

    info: AdapterInfo
    pairs: Mapping[MatrixId, LoraPair]
    head: TaskHead | None


@dataclass(frozen=True)
class AdapterDescription:
    """Everything that an adapter's files declare, known without reading the weights.

    info: description for users, without the digest.
    ranks: rank of each matrix of the language model that it changes, in ascending order of the ids
        of the matrices.
    host_bytes: size in bytes of the weights of these matrices and of the head, in fp32.
    reader: reads the weights of these matrices; None for a simulated adapter.
    vision: reads the weights of the vision tower and the connector; None if there are none.
    """

    info: AdapterInfo
    ranks: Mapping[MatrixId, int]
    host_bytes: int
    reader: WeightsReader | None = None
    vision: WeightsReader | None = None


class AdapterFiles:
    """The files of one adapter. The constructor checks them, and `read` reads the weights.

    Attributes:
        description: what the files declare.
    """

    def __init__(
        self, name: str, folder: Path, model: ModelShape, max_bytes: int = MAX_ADAPTER_BYTES
    ) -> None:
        """Check the files without reading the weights.

        max_bytes: maximum size of the weights in fp32.

        Raises InvalidArgument, which names the adapter, the file and the reason.
        """
        invalid = ErrorFactory(name)
        self._invalid = invalid.in_file(WEIGHTS)
        self._folder = folder
        if as_text(name) != name:
            raise invalid.in_file(str(folder))("has a name that is not UTF-8; rename it")
        config = read_config(folder, invalid)
        _check_no_pickles(folder, invalid)
        file = WeightsFile(folder / WEIGHTS, self._invalid)
        keys = assign_tensors(file, model, self._invalid)
        if not keys:
            raise self._invalid("holds no LoRA weights")
        _check_names(config, model, invalid.in_file("adapter_config.json"))
        all_bytes = file.require_fits(
            [key for pair in keys.values() for key in (pair.a, pair.b) if key], max_bytes
        )
        scales: dict[MatrixId, float] = {}
        ranks: dict[MatrixId, int] = {}
        for matrix, pair in sorted(keys.items()):
            ranks[matrix], scales[matrix] = check_pair(
                matrix, pair, file, config, model, self._invalid
            )
        extra = _read_extra(folder, invalid)
        self._head = load_head(
            folder, extra.get("head"), model.hidden, invalid, max_bytes, all_bytes
        )
        _check_invocation(config, self._head, model, invalid.in_file("adapter_config.json"))
        in_vision = {matrix: rank for matrix, rank in ranks.items() if matrix[0] == VISION}
        ranks = {matrix: rank for matrix, rank in ranks.items() if matrix[0] != VISION}
        if in_vision:
            _check_vision(config, extra, invalid)
        info = AdapterInfo(
            name=name,
            digest="",
            ranks=tuple(sorted(set(ranks.values()))),
            targets=tuple(
                t for t in (*TARGETS, LM_HEAD) if any(m[1] == t for m in for_each_matrix(ranks))
            ),
            tasks=tuple(extra.get("tasks", ())),
            accuracy=dict(extra.get("accuracy", {})),
            head_labels=self._head.labels if self._head else (),
            head_tasks=self._head.tasks if self._head else (),
            skills=read_skills(extra.get("skills", []), invalid.in_file("vlora.json")),
            invocation=config.invocation,
            vision_ranks=tuple(sorted(set(in_vision.values()))),
        )
        reader = make_reader(file, keys, ranks, scales)
        vision = make_reader(file, keys, in_vision, scales) if in_vision else None
        host_bytes = reader.nbytes + (self._head.nbytes if self._head else 0)
        self.description = AdapterDescription(
            info, for_each_matrix(reader.ranks), host_bytes, reader, vision
        )

    def read(self) -> Adapter:
        """Return the adapter. Raise InvalidArgument if weights cannot be read or are not finite."""
        return _read(self._folder, self.description, self._head, self._invalid)


def read_adapter(name: str, folder: Path, description: AdapterDescription, hidden: int) -> Adapter:
    """Return an adapter whose files have been checked, with its weights.

    description: result of the check. The weights file must not have changed since.
    hidden: width of the model.

    Raises the same errors as `AdapterFiles.read`.
    """
    invalid = ErrorFactory(name)
    head = None
    if description.info.head_labels:
        declared = _read_extra(folder, invalid).get("head")
        head = load_head(folder, declared, hidden, invalid, description.host_bytes)
    return _read(folder, description, head, invalid.in_file(WEIGHTS))


def _read(
    folder: Path, description: AdapterDescription, head: TaskHead | None, invalid: ErrorFactory
) -> Adapter:
    assert description.reader is not None
    pairs, digest = description.reader.read(folder / WEIGHTS, invalid)
    if description.vision is not None:
        _, of_vision = description.vision.read(folder / WEIGHTS, invalid)
        digest = hashlib.sha256(f"{digest} {of_vision}".encode()).hexdigest()
    if description.info.invocation:
        digest = hashlib.sha256(f"{digest} {description.info.invocation}".encode()).hexdigest()
    return Adapter(replace(description.info, digest=digest), split_pairs(pairs), head)


def load_adapter(
    name: str, folder: Path, model: ModelShape, max_bytes: int = MAX_ADAPTER_BYTES
) -> Adapter:
    return AdapterFiles(name, folder, model, max_bytes).read()


def _check_no_pickles(folder: Path, invalid: ErrorFactory) -> None:
    """Raise InvalidArgument if weights are in a pickle, because loading one can run any code."""
    if not (folder / WEIGHTS).exists() and (folder / PICKLED).exists():
        raise invalid.in_file(PICKLED)(
            f"is a pickle, which is never read; convert it to {WEIGHTS} with {CONVERT}"
        )
    if (folder / OUTSIDE_LORA).exists():
        raise invalid.in_file(OUTSIDE_LORA)(
            "holds weights that were trained besides the LoRA, such as those of the connector;"
            " store them in the checkpoint, then remove this file"
        )


def _check_invocation(
    config: PeftConfig, head: TaskHead | None, model: ModelShape, invalid: ErrorFactory
) -> None:
    """Raise InvalidArgument for an activated LoRA with invalid tokens or a vision task head.

    If a prompt lacked the invocation, its request would reach the head without the adapter.
    """
    unknown = [token for token in config.invocation if token >= model.vocabulary]
    if unknown:
        raise invalid(
            f"has {unknown[0]} in alora_invocation_tokens; ids run from 0 to {model.vocabulary - 1}"
        )
    if config.invocation and head is not None:
        raise invalid("has alora_invocation_tokens, which cannot be used with a vision task head")


def _check_vision(config: PeftConfig, extra: Mapping[str, Any], invalid: ErrorFactory) -> None:
    """Raise InvalidArgument if an adapter with a vision part has an invocation or skills.

    Images are encoded before the engine reads the prompt. But an activated LoRA must not change
    images that stand before its invocation tokens. With skills (`adapters/routing.py`), the server
    chooses the adapters of requests that name none, but only after the images were encoded.
    """
    if config.invocation:
        raise invalid.in_file("adapter_config.json")(
            "has alora_invocation_tokens, which cannot be used with weights of the vision tower or"
            " connector: an image may stand before the invocation"
        )
    if extra.get("skills"):
        raise invalid.in_file("vlora.json")(
            "has 'skills', which cannot be used with weights of the vision tower or connector:"
            " images are encoded before an adapter is chosen by its skills"
        )


def _check_names(config: PeftConfig, model: ModelShape, invalid: ErrorFactory) -> None:
    """Raise InvalidArgument if a name in `target_modules` names no module of the model.

    A pattern needs no check: if it matches nothing, each tensor of the file is rejected because the
    config does not target its module.
    """
    if isinstance(config.target_modules, str):
        return
    unknown = config.target_modules - model.suffixes
    if unknown:
        unknown -= {suffix for path in model.other_modules() for suffix in suffixes(path)}
    if unknown:
        raise invalid(f"has '{min(unknown)}' in target_modules, which names no module of the model")


def _read_extra(folder: Path, invalid: ErrorFactory) -> dict[str, Any]:
    """Return the content of `vlora.json`; {} if it does not exist.

    "head" and "skills" are not checked here.
    """
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
        raise invalid("must give 'accuracy' as an object of finite numbers by task")
    return extra
