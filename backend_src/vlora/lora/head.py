"""Vision task heads (§4.2.2 of the paper): linear layers that replace the LM head.

A head is applied to the hidden state of the last prompt token after the final norm. The request
then ends without a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlora.atmm.types import HeadMatrix
from vlora.lora.peft_config import ErrorFactory, is_names
from vlora.lora.weights_file import WeightsFile


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
