"""Twelve adapters with different weights, and runs of an engine that serves them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.engine_client import request
from vlora.adapters.catalog import stamp_of
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.request import Output, Request

WEIGHTS = "adapter_model.safetensors"


def replace_weights(folder: Path, seed: int) -> None:
    """Replace an adapter's weights by random ones of the same shapes, by an atomic rename."""
    torch.manual_seed(seed)
    weights = {k: torch.randn_like(v) * 0.3 for k, v in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / "new")
    (folder / "new").rename(folder / WEIGHTS)


def update(engine: Engine, root: Path) -> None:
    """Let an engine see the folders of `root` as they are now."""
    engine.adapters.folders.update({p.name: (p, stamp_of(p)) for p in sorted(root.iterdir())})
    engine.adapters.apply()


def engine_of(checkpoint: Path, root: Path, **more: Any) -> Engine:
    """Return an engine with the adapters in `root` and, by default, up to 8 running requests."""
    return Engine(Options(model=checkpoint, adapters=root, **({"max_num_seqs": 8} | more)))


def run_in_order(engine: Engine, *requests: Request) -> dict[str, Output]:
    """Run requests in order of arrival; return the last output of each, with all its tokens."""
    for index, asked in enumerate(requests):
        engine.add(engine.prepare(asked), float(index))
    return finish(engine)


def finish(engine: Engine) -> dict[str, Output]:
    """Step until the engine is idle, waiting for loads; return the last outputs by request id."""
    tokens: dict[str, list[int]] = defaultdict(list)
    last: dict[str, Output] = {}
    for _ in range(3000):
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            last[output.request_id] = output
        if engine.stalled:
            engine.adapters.finish()
        engine.memory.check_integrity(engine.scheduler.running)
        if engine.idle:
            engine.adapters.finish()
            engine.adapters.check_integrity()
            engine.check_integrity()
            return {k: o._replace(token_ids=tuple(tokens[k])) for k, o in last.items()}
    raise AssertionError("not finished")


def burst(engine: Engine) -> list[Request]:
    """Return two requests of each adapter."""
    return [
        request(f"r{i}", adapter=name, prompt=f"<s>what is it, {i % 5}?", max_tokens=6)
        for i, name in enumerate(engine.adapters.names() * 2)
    ]
