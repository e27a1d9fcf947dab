"""An adapter store over small adapters, without a model. Its pages are plain bytes."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vlora.adapters.catalog import find_folders, stamp_of
from vlora.adapters.handle import AdapterHandle
from vlora.adapters.model_shape import ModelShape
from vlora.adapters.store import AdapterStore
from vlora.adapters.tensors import WeightsReader
from vlora.memory.pool import PagePool

HIDDEN, RANK, PAGE = 32, 4, 4096
MATRIX = (0, "q_proj")
STEM = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
ADAPTER_BYTES = 2 * RANK * HIDDEN * 4
"""Size of an adapter in host memory."""


class Memory:
    page_bytes = PAGE

    def __init__(self, pages: int) -> None:
        raw = torch.zeros((pages + 1) * PAGE, dtype=torch.uint8)
        self.bytes = raw[-raw.data_ptr() % 64 :][: pages * PAGE].view(pages, PAGE)

    def address(self, page: int) -> int:
        return self.bytes.data_ptr() + page * PAGE

    def clear(self, pages: range) -> None:
        self.bytes[list(pages)] = 0


def write_adapter(folder: Path, seed: int) -> None:
    """Write an adapter with random weights, or replace the weights of the one in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((RANK, HIDDEN), (HIDDEN, RANK)))
    save_file({f"{STEM}A.weight": a, f"{STEM}B.weight": b}, folder / "new")
    (folder / "new").rename(folder / "adapter_model.safetensors")


def small_model() -> ModelShape:
    shapes = {"q_proj": (HIDDEN, HIDDEN)}
    return ModelShape(1, HIDDEN, 8, shapes, "model.", lambda: torch.zeros(0), tuple)


class Harness:
    """A store over `root` with `pages` pages. Each adapter takes one page."""

    def __init__(
        self,
        model: ModelShape,
        root: Path,
        pages: int,
        host: int | None,
        pinned: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.store = AdapterStore(model, host_bytes=host, pinned=pinned)
        self.group = self.store.slots.group([MATRIX])
        self.store.load(find_folders(root, {}))
        self.pool, self.memory = PagePool(pages), Memory(pages)
        self.store.attach(self.pool, self.memory, 0)

    def handle(self, index: int) -> AdapterHandle:
        return self.store.handle(f"a{index}")

    def request(self, *indices: int) -> AdapterHandle | None:
        """Request adapters, and advance until nothing is loaded or packed. Return the adapter for
        which there were too few pages, or None."""
        blocking = None
        for _ in range(3):
            blocking = self.store.advance([self.handle(i) for i in indices])
            self.store.finish()
        self.pool.check_integrity()
        self.store.check_integrity()
        return blocking

    def reread(self) -> None:
        """Read the folders that have changed, as the watching thread does, and apply the result."""
        root = self.root
        self.store.folders.update(
            {path.name: (path, stamp_of(path)) for path in sorted(root.iterdir())}
        )
        self.store.apply()

    def resident(self) -> set[str]:
        return {handle.name for handle in self.store.resident.values()}


def load_and_pack(store: AdapterStore, folders: Mapping[str, Path], pages: int = 64) -> None:
    """Load adapters and pack those that can be used. All groups must have been created."""
    store.load(folders)
    store.attach(PagePool(pages), Memory(pages), pages)


class BlockedReads:
    """Reads of weights that wait until `allow` is set. `reads` lists the adapters' names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[str] = []
        self.allow = threading.Event()
        read = WeightsReader.read

        def wait_and_read(reader: WeightsReader, path: Path, invalid: Any) -> Any:
            self.reads.append(path.parent.name)
            assert self.allow.wait(60)
            return read(reader, path, invalid)

        monkeypatch.setattr(WeightsReader, "read", wait_and_read)


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Make every attempt to open a file fail with EMFILE while the context is open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
