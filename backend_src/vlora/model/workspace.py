"""Memory for the intermediate results of a forward pass, which every layer and step reuses.

Without this reuse, page faults of new tensors took a third of the time of a prefill of 1024 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlora.device.device import HOST, Device
from vlora.model.decoder_config import DecoderConfig

FP32_BYTES = 4


@dataclass(frozen=True)
class StepBuffers:
    """Intermediate results of a step, each [T, width], contiguous, not initialized.

    `hidden`, the residual stream, is fp32. The others are fp32 on the CPU, and have the type of the
    weights on a GPU. qkv and gate_up share their memory, and so do normed, attended and gated: each
    is read for the last time before the next one is written.
    """

    qkv: torch.Tensor
    gate_up: torch.Tensor
    normed: torch.Tensor
    attended: torch.Tensor
    gated: torch.Tensor
    delta: torch.Tensor
    hidden: torch.Tensor


def _groups(config: DecoderConfig) -> tuple[dict[str, int], ...]:
    """Return the widths of the buffers by name, in groups that share their memory."""
    attended, inner = config.heads * config.head_dim, config.intermediate
    return (
        {"qkv": attended + 2 * config.kv_heads * config.head_dim, "gate_up": 2 * inner},
        {"normed": config.hidden, "attended": attended, "gated": inner},
        {"delta": config.hidden},
        {"hidden": config.hidden},
    )


def workspace_bytes(config: DecoderConfig, rows: int) -> int:
    """Return the size in bytes of the buffers of a step with this number of rows."""
    return sum(max(group.values()) * rows * FP32_BYTES for group in _groups(config))


class Workspace:
    """Buffers of one forward pass. Their memory has the size of the largest step so far. `weights`
    is the type of the decoder's weights, which the buffers have on a GPU.
    """

    def __init__(
        self, config: DecoderConfig, device: Device = HOST, weights: torch.dtype = torch.float32
    ) -> None:
        self._device = device
        self._row_dtype = device.row_dtype(weights)
        self._groups = _groups(config)
        self._memory: list[torch.Tensor] = []
        self._max_rows = -1
        self._buffers: StepBuffers | None = None

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the memory. They change when a step has more rows than every earlier one."""
        return tuple(memory.data_ptr() for memory in self._memory)

    def buffers(self, rows: int) -> StepBuffers:
        """Return buffers of `rows` rows; the contents of earlier buffers are lost."""
        if self._buffers is not None and len(self._buffers.delta) == rows:
            return self._buffers
        if rows > self._max_rows:
            self._memory = [
                self._device.zeros(
                    max(1, rows),
                    max(group.values()),
                    dtype=torch.float32 if "hidden" in group else self._row_dtype,
                )
                for group in self._groups
            ]
            self._max_rows = rows
        self._buffers = StepBuffers(
            **{
                name: memory.view(-1)[: rows * width].view(rows, width)
                for group, memory in zip(self._groups, self._memory, strict=True)
                for name, width in group.items()
            }
        )
        return self._buffers
