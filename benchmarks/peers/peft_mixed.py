"""transformers with PEFT's mixed batches: each row of a batch has its adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.engine import PeftMixed
from benchmarks.llava import Checkpoint, Sizes
from benchmarks.loads import LoadRequest
from benchmarks.peers.process import Answer, Prompt, Setup


class System:
    """The unchanged LLaVA with all adapters attached, in the type of a setting."""

    def __init__(self, setup: Setup) -> None:
        folder = Path(setup.llava)
        ranks = tuple(int(name.rpartition("-r")[2]) for name in setup.adapters)
        sizes = Sizes(adapters=len(ranks), ranks=ranks)  # They name the same folders.
        checkpoint = Checkpoint(folder, folder.parent / "adapters", sizes)
        self._model = PeftMixed(checkpoint, getattr(torch, setup.options["dtype"]))

    def run(self, prompts: Sequence[Prompt]) -> Sequence[Answer]:
        times = self._model.run([LoadRequest(p.text, None, p.adapter) for p in prompts])
        rows = zip(times.first, times.end, self._model.generated, strict=True)
        return [Answer(first, end, tokens) for first, end, tokens in rows]

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {}
