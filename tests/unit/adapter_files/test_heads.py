"""Tests that the vision task heads of adapters are read, checked and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.small_adapter import (
    HIDDEN,
    edit_config,
)
from vlora.adapters.files import describe_adapter, load_adapter
from vlora.adapters.model_shape import ModelShape
from vlora.errors import InvalidArgument


def test_a_head_counts_toward_the_size_of_an_adapter(folder: Path, model: ModelShape) -> None:
    lora = describe_adapter("x", folder, model).host_bytes
    labels = [f"label {i}" for i in range(100)]
    declared = {"head": {"labels": labels, "tasks": ["classify"]}}
    (folder / "vlora.json").write_text(json.dumps(declared))
    tensors = {"weight": torch.zeros(100, HIDDEN), "bias": torch.zeros(100)}
    save_file(tensors, folder / "head.safetensors")
    size = lora + 4 * 100 * (HIDDEN + 1)
    assert describe_adapter("x", folder, model, size).host_bytes == size
    with pytest.raises(InvalidArgument, match=rf"head\.safetensors declares .* {size} bytes"):
        describe_adapter("x", folder, model, size - 1)


def test_an_activated_adapter_has_no_task_head(folder: Path, model: ModelShape) -> None:
    with_head(folder, ["a", "b"], ["classify"], weight=torch.ones(2, HIDDEN), bias=torch.ones(2))
    edit_config(folder, alora_invocation_tokens=[1])
    with pytest.raises(InvalidArgument, match="cannot be used with a vision task head"):
        load_adapter("x", folder, model)


def with_head(folder: Path, labels: list[str], tasks: list[str], **tensors: torch.Tensor) -> None:
    head = {"labels": labels, "tasks": tasks}
    (folder / "vlora.json").write_text(json.dumps({"tasks": tasks, "head": head}))
    save_file(tensors, folder / "head.safetensors")


def test_a_head_is_read_with_its_labels(folder: Path, model: ModelShape) -> None:
    weight, bias = torch.randn(2, HIDDEN), torch.randn(2)
    with_head(folder, ["yes", "no"], ["classify"], weight=weight, bias=bias)
    adapter = load_adapter("x", folder, model)
    assert adapter.head is not None
    assert (adapter.info.head_labels, adapter.info.head_tasks) == (("yes", "no"), ("classify",))
    assert torch.equal(adapter.head.weight, weight)
    assert torch.equal(adapter.head.bias, bias)


@pytest.mark.parametrize(
    ("labels", "tensors", "reason"),
    [
        (["a"], {"weight": (2, HIDDEN), "bias": (2,)}, "must be"),
        (["a", "b"], {"weight": (2, HIDDEN)}, "'weight' and 'bias'"),
        (["a", "a"], {"weight": (2, HIDDEN), "bias": (2,)}, "different names"),
        ([], {"weight": (2, HIDDEN), "bias": (2,)}, "head.labels"),
    ],
)
def test_a_head_that_does_not_fit_is_rejected(
    folder: Path,
    model: ModelShape,
    labels: list[str],
    tensors: dict[str, tuple[int, ...]],
    reason: str,
) -> None:
    random = {name: torch.randn(shape) for name, shape in tensors.items()}
    with_head(folder, labels, ["classify"], **random)
    with pytest.raises(InvalidArgument, match="adapter 'x'") as caught:
        load_adapter("x", folder, model)
    assert reason in str(caught.value)
