"""Memory of one process that loads a checkpoint: the weights it holds, and its peak."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

MIB = 1 << 20


def footprints(folder: Path, dtypes: Sequence[str]) -> list[dict[str, int]]:
    """MiB for each type, in a fresh process: `weights` held, `before` loading and at its `peak`."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as processes:
        return list(processes.map(_load, [folder] * len(dtypes), dtypes))


def _load(folder: Path, dtype: str) -> dict[str, int]:
    from vlora.model.decoder_config import dtype_of, load_config
    from vlora.model.loader import load_weights

    config = load_config(folder)
    before = _status("VmRSS")
    weights = load_weights(folder, config, dtype_of(dtype, folder))
    tensors = [weights.slab.base, weights.embedding, weights.lm_head, weights.final_norm]
    tensors += [*weights.norms.values(), *weights.biases.values()]
    held = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    return {
        "weights": sum(held.values()) // MIB,
        "before": before // MIB,
        "peak": _status("VmHWM") // MIB,
    }


def _status(key: str) -> int:
    """Bytes, from the kernel's account of this process."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
