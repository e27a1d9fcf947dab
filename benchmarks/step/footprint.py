"""Memory of a process that loads a checkpoint: the weights it holds, and its peak size."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

MIB = 1 << 20


def footprints(folder: Path, dtypes: Sequence[str]) -> list[dict[str, int]]:
    """Load the checkpoint once with each storage type, each time in a new process.

    Return MiB by name: `weights` held, resident `before` loading, and resident at the `peak`.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as processes:
        return list(processes.map(footprint, [folder] * len(dtypes), dtypes))


def footprint(folder: Path, dtype: str) -> dict[str, int]:
    """Load the checkpoint in this process. Return the figures of `footprints` for one type."""
    from vlora.lora.slab import WeightSlab
    from vlora.model.decoder_config import dtype_of, load_config
    from vlora.model.loader import load_weights

    config = load_config(folder)
    before = _process_status("VmRSS")
    weights = load_weights(folder, config, dtype_of(dtype, folder))
    assert isinstance(weights.slab, WeightSlab)
    tensors = [weights.slab.base, weights.embedding, weights.lm_head, weights.final_norm]
    tensors += [*weights.norms.values(), *weights.biases.values()]
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    return {
        "weights": sum(sizes.values()) // MIB,
        "before": before // MIB,
        "peak": _process_status("VmHWM") // MIB,
    }


def _process_status(key: str) -> int:
    """Return a value in bytes from the kernel's status of this process."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
