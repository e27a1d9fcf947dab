"""Uploads: the inputs of a step, packed so that one transfer copies them to a device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from vlora.device.device import Device

ALIGNMENT = 16  # Alignment in bytes of each tensor within an upload.


def packed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the size in bytes of an upload of these tensors."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def upload(
    tensors: Sequence[torch.Tensor], to: torch.device, into: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Copy tensors from host memory to the device `to` in one transfer. Return the copies.

    into: as in `Device.upload`.

    Raises ValueError if `into` is too small.
    """
    sizes = (packed_bytes([tensor]) for tensor in tensors)
    *starts, size = itertools.accumulate(sizes, initial=0)
    if into is not None and size > len(into):
        raise ValueError(f"an upload of {size} bytes does not fit {len(into)} bytes")
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=to.type == "cuda")
    for start, tensor in zip(starts, tensors, strict=True):
        packed[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
    copied = torch.empty(size, dtype=torch.uint8, device=to) if into is None else into
    copied[:size].copy_(packed, non_blocking=True)
    return [
        copied[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


class UploadedPart(Protocol):
    """Part of a step whose inputs are uploaded to the device."""

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors to upload, in host memory."""

    def place(self, uploaded: Sequence[torch.Tensor]) -> None:
        """Store the copies of `inputs` that were made on the device."""


def upload_step(
    device: Device,
    tensors: Sequence[torch.Tensor],
    *parts: UploadedPart,
    into: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Upload `tensors` and the inputs of all parts in one transfer; return the copies of `tensors`.

    The copies of each part's inputs are passed to its `place` method.

    into: as in `Device.upload`.
    """
    inputs = [part.inputs for part in parts]
    uploaded = device.upload([*tensors, *itertools.chain.from_iterable(inputs)], into)
    rest = iter(uploaded[len(tensors) :])
    for part, its_inputs in zip(parts, inputs, strict=True):
        part.place(list(itertools.islice(rest, len(its_inputs))))
    return uploaded[: len(tensors)]
