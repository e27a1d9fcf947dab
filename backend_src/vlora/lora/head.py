"""Vision task heads (§4.2.2): a linear layer that answers in place of the LM head.

Applied to the final-norm hidden state of the last prompt token; the request then ends, with no
decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlora.atmm.types import Head
from vlora.lora.peft_config import Refusal, is_names
from vlora.lora.weights_file import WeightsFile


@dataclass(frozen=True)
class TaskHead:
    """linear: weight [classes, hidden] and bias [classes], fp32; one label a class."""

    linear: Head
    labels: tuple[str, ...]
    tasks: tuple[str, ...]


def load_head(folder: Path, declared: Any, hidden: int, refuse: Refusal) -> TaskHead | None:
    """The head that `vlora.json` declares and `head.safetensors` holds; None where neither does."""
    path = folder / "head.safetensors"
    if declared is None and not path.exists():
        return None
    labels, tasks = _declaration(declared, refuse.of("vlora.json"))
    refuse = refuse.of(path.name)
    file = WeightsFile(path, refuse)
    expected = {"weight": (len(labels), hidden), "bias": (len(labels),)}
    if set(file.shapes) != set(expected):
        raise refuse(f"must hold 'weight' and 'bias', not {sorted(file.shapes)}")
    for name, shape in expected.items():
        if file.shapes[name] != shape:
            raise refuse(f"has '{name}' {file.shapes[name]}; it must be {shape}")
    return TaskHead(Head(file.read("weight"), file.read("bias")), labels, tasks)


def _declaration(declared: Any, refuse: Refusal) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(labels, tasks) of vlora.json's "head"."""
    if declared is None:
        raise refuse("declares no 'head', though head.safetensors exists")
    if not isinstance(declared, dict) or set(declared) != {"labels", "tasks"}:
        raise refuse('must give \'head\' as {"labels": [...], "tasks": [...]}')
    for key, value in declared.items():
        if not value or not is_names(value) or len(set(value)) != len(value):
            raise refuse(f"must give head.{key} as a list of different names")
    return tuple(declared["labels"]), tuple(declared["tasks"])
