"""A fake GPU: CPU tensors that are otherwise treated like those of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from vlora import backends
from vlora.memory.device import Device, PageLayout, upload


class FakeDevice(Device):
    """A device of CPU tensors with the pages, row type and uploads of a GPU.

    uploads: number of times that a step has copied its inputs.
    """

    name = "fake"
    torch_device = torch.device("cpu")
    page_layout: PageLayout = "rows"
    in_host_memory = False

    def __init__(self) -> None:
        self.uploads = 0

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def upload(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.uploads += 1
        return upload(tensors, self.torch_device)

    def seal(self, tensor: torch.Tensor) -> None:
        pass

    def available_bytes(self) -> int | None:
        return None


@contextmanager
def fake_gpu() -> Iterator[FakeDevice]:
    """Yield a fake device. Engines made in this context use it. The interpreted GPU kernels then
    process all CPU tensors."""
    device = FakeDevice()
    place = "vlora.engine.parts.engine_device"
    with backends.override("kernels", "gpu"), patch(place, return_value=device):
        yield device
