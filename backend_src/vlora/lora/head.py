"""Vision task heads (§4.2.2): a linear layer that answers in place of the LM head.

Applied to the final-norm hidden state of the last prompt token; the request then ends, with no
decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vlora.atmm.types import Head as Linear
from vlora.errors import InvalidArgument


@dataclass(frozen=True)
class Head:
    """linear: weight [classes, hidden] and bias [classes], fp32; one label a class."""

    linear: Linear
    labels: tuple[str, ...]
    tasks: tuple[str, ...]


class Refuse(Protocol):
    def of(self, file: str) -> Refuse: ...
    def __call__(self, reason: str) -> InvalidArgument: ...


def load_head(folder: Path, declared: Any, hidden: int, refuse: Refuse) -> Head | None:
    """The head that `vlora.json` declares and `head.safetensors` holds; None where neither does."""
    path = folder / "head.safetensors"
    if declared is None and not path.exists():
        return None
    labels, tasks = _declaration(declared, refuse.of("vlora.json"))
    refuse = refuse.of(path.name)
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise refuse("is missing, though vlora.json declares a head") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise refuse(f"cannot be read: {error}") from error
    expected = {"weight": (len(labels), hidden), "bias": (len(labels),)}
    if set(tensors) != set(expected):
        raise refuse(f"must hold 'weight' and 'bias', not {sorted(tensors)}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise refuse(f"has '{name}' {tuple(tensors[name].shape)}; it must be {shape}")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise refuse(f"has NaN or Inf in '{name}'")
    linear = Linear(tensors["weight"].float(), tensors["bias"].float())
    return Head(linear, labels, tasks)


def _declaration(declared: Any, refuse: Refuse) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(labels, tasks) of vlora.json's "head"."""
    if declared is None:
        raise refuse("declares no 'head', though head.safetensors exists")
    if not isinstance(declared, dict) or set(declared) != {"labels", "tasks"}:
        raise refuse('must give \'head\' as {"labels": [...], "tasks": [...]}')
    for key, value in declared.items():
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(item, str) and item for item in value)
            or len(set(value)) != len(value)
        ):
            raise refuse(f"must give head.{key} as a list of different names")
    return tuple(declared["labels"]), tuple(declared["tasks"])
