"""Raw clips in shared memory of the system: the server reads the pixels without a copy.

A slot of the region holds one clip while its request is in flight. The server must run on the same
machine with `--allow-shared-memory`.

**Invariant:** `close` unregisters and removes the region, even after Ctrl-C or an error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpcclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from clients.common import ClientError, explain
from clients.frames import Pixels


class SharedFrames:
    """A registered region of `slots` slots, each with space for a clip of `clip_bytes` bytes."""

    def __init__(self, client: Any, slots: int, clip_bytes: int) -> None:
        self._client = client
        self._clip_bytes = clip_bytes
        self._name = f"vlora_frames_{os.getpid()}_{id(self):x}"
        self._region: Any = None
        self._registered = False
        self._size = slots * clip_bytes
        self._free = list(range(slots))

    async def open(self) -> None:
        """Create the region and register it with the server. Raises ClientError."""
        key = f"/{self._name}"
        try:
            self._region = shm.create_shared_memory_region(
                self._name, key, self._size, create_only=True
            )
        except shm.SharedMemoryException as error:
            raise ClientError(
                f"cannot create {self._size / 1e6:.1f} MB of shared memory: {error.__cause__}"
            ) from None
        try:
            await self._client.register_system_shared_memory(self._name, key, self._size)
        except InferenceServerException as error:
            closed = "restricted" in str(error.message())
            reason = "it is closed to clients" if closed else explain(error)
            raise ClientError(
                f"the server refused shared memory: {reason}; start it with"
                " `vlora serve --allow-shared-memory`, or send encoded frames with --send jpeg"
            ) from None
        self._registered = True

    def acquire(self, frames: Sequence[Pixels]) -> tuple[int, Any]:
        """Copy a clip into a free slot. Return the slot and the input `frames_raw` for it."""
        shapes = {frame.shape for frame in frames}
        if len(shapes) > 1:
            raise ClientError(f"raw frames of a clip must have the same size, not {sorted(shapes)}")
        clip = np.stack(frames)
        if clip.nbytes > self._clip_bytes:
            raise ClientError(
                f"a clip of {clip.nbytes} bytes does not fit into a slot of {self._clip_bytes}, the"
                " size of the first clip: all frames must have the same size"
            )
        slot = self._free.pop()
        offset = slot * self._clip_bytes
        shm.set_shared_memory_region(self._region, [clip], offset)
        tensor = grpcclient.InferInput("frames_raw", list(clip.shape), "UINT8")
        tensor.set_shared_memory(self._name, clip.nbytes, offset)
        return slot, tensor

    def release(self, slot: int) -> None:
        """Free a slot whose request has been answered."""
        self._free.append(slot)

    async def close(self) -> None:
        """Unregister and remove the region."""
        if self._registered:
            self._registered = False
            with suppress(InferenceServerException):
                await self._client.unregister_system_shared_memory(self._name)
        region, self._region = self._region, None
        if region is not None:
            shm.destroy_shared_memory_region(region)
