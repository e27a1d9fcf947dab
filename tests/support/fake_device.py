"""A fake GPU: CPU tensors that are otherwise treated like those of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from vlora import backends
from vlora.memory.device import Device, PageLayout, Readback, upload


class FakeDevice(Device):
    """A device of CPU tensors with the pages, row type and uploads of a GPU.

    events: "upload" for each copy of a step's inputs, "read" when results begin to be copied
        back, and "wait" when the engine waits for them.
    """

    name = "fake"
    torch_device = torch.device("cpu")
    page_layout: PageLayout = "rows"
    in_host_memory = False

    def __init__(self) -> None:
        self.events: list[str] = []

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def upload(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.events.append("upload")
        return upload(tensors, self.torch_device)

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        self.events.append("read")
        copies = [torch.full_like(tensor, -1) for tensor in tensors]

        def wait() -> None:
            # The results arrive no sooner, so that reading them without waiting would fail.
            self.events.append("wait")
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)

        return Readback(copies, wait)

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
