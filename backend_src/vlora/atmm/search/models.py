"""Matrix sizes (d_in, d_out) of a model's LoRA targets, for a search."""

from __future__ import annotations

import json
from pathlib import Path

BENCH = ((1024, 1024), (4096, 4096))  # Matrix sizes of the `kernels` benchmark.


def sides_of(folder: Path) -> tuple[tuple[int, int], ...]:
    """Return the sizes of a checkpoint: input (q, k, v together) and output of attention and MLP.

    Raises ValueError for a config.json without the sizes of a Llama-like decoder.
    """
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        inner = int(config["intermediate_size"])
    except KeyError as missing:
        raise ValueError(f"{folder / 'config.json'} has no {missing}") from None
    head = int(config.get("head_dim") or hidden // heads)
    queries = heads * head
    keys = int(config.get("num_key_value_heads") or heads) * head
    return tuple(
        dict.fromkeys(
            ((hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden))
        )
    )
