"""Memory of a process that loads a checkpoint: the weights it holds, and its peak size."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.process_status import status_bytes

MIB = 1 << 20


def footprints(folder: Path, dtypes: Sequence[str]) -> list[dict[str, int]]:
    """Load the checkpoint once with each type of MODEL_TYPES, each time in a new process.

    Return sizes in MiB: `weights` of the loaded weights, and the resident memory of the process
    `before` loading and at its `peak`.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as processes:
        return list(processes.map(footprint, [folder] * len(dtypes), dtypes))


def footprint(folder: Path, dtype: str) -> dict[str, int]:
    """Load the checkpoint in this process. Return the figures of `footprints` for one type."""
    from benchmarks.dtypes import DTYPES, MODEL_TYPES
    from vlora.model.decoder_config import load_config
    from vlora.model.loader import load_weights

    config, chosen = load_config(folder), MODEL_TYPES[dtype]
    before = status_bytes("VmRSS")
    weights = load_weights(folder, config, DTYPES[chosen.dtype], chosen.form)
    parts = [weights.slab, weights.embedding, weights.lm_head, weights.final_norm]
    parts += [*weights.norms.values(), *weights.biases.values()]
    sizes = {id(part): part.nbytes for part in parts}
    return {
        "weights": sum(sizes.values()) // MIB,
        "before": before // MIB,
        "peak": status_bytes("VmHWM") // MIB,
    }
