"""Run an engine until all of its memory has been used, and compare the memory with the plan.

It needs a process of its own, because it would reuse memory that other tests have freed:
`python -m tests.programs.measure_engine CHECKPOINT DTYPE ADAPTERS FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.adapters import save_adapters
from tests.support.memory import resident_bytes
from vlora.config import Options
from vlora.engine import capacity
from vlora.engine.engine import Engine
from vlora.model.decoder_config import load_config
from vlora.request import Request
from vlora.sampling import SamplingParams

ROWS, WORDS = 2048, 900


def use_all(engine: Engine) -> None:
    """Fill 98 % of the pool with prompts for all adapters, in steps of ROWS rows, and merge."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    names, count = engine.adapters.names(), 0
    while engine.pool.free > engine.pool.total // 50:
        for _ in range(4):
            prompt = f"<s>{count}" + " what" * WORDS
            asked = Request(str(count), prompt, sampling, adapter=names[count % len(names)])
            engine.add(engine.prepare(asked), float(count))
            count += 1
        while not engine.idle:
            engine.step()
            engine.adapters.finish()
    engine.switcher.switch(min(engine.adapters.resident))


def main(checkpoint: str, dtype: str, adapters: str, folder: str) -> None:
    """Print the planned and the measured bytes as JSON."""
    torch.set_num_threads(1)
    save_adapters(Path(folder), load_config(Path(checkpoint)), 16, int(adapters))
    options = Options(
        model=Path(checkpoint),
        adapters=Path(folder),
        dtype=dtype,
        kv_cache_tokens=1 << 14,
        max_num_batched_tokens=ROWS,
        max_num_seqs=16,
    )
    process = capacity.process_bytes(options)
    plan = capacity.plan(options, {}, 0, process)
    before = resident_bytes("RssAnon")
    engine = Engine(options)
    use_all(engine)
    engine.check_integrity()
    figures = {"process": process, "planned": plan.configured_bytes, "measured": resident_bytes()}
    figures["grown"] = resident_bytes("RssAnon") - before
    figures |= {"host": engine.adapters.tiers.host.used_bytes, "planned_host": plan.host_bytes}
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
