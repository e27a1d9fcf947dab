"""Random loads of the engine under every policy, in simulated time and with fixed seeds.

VLORA_DRAWN_LOADS=N runs the first N seeds instead. Each seed is one load, run under each policy.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.baseline_policies import register
from tests.support.drawn_loads import INVOCATION, run_loads
from vlora.config import POLICIES

register()

SEEDS = range(int(os.environ.get("VLORA_DRAWN_LOADS", "12")))


def activated(checkpoint: Path, source: Path, folder: Path) -> Path:
    """Return a copy of an adapter that acts from a word of the drawn prompts on."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokens = tokenizer(f"a {INVOCATION}", add_special_tokens=False)["input_ids"][1:]
    assert len(tokens) == 1
    shutil.copytree(source, folder / "activated")
    path = folder / "activated" / "adapter_config.json"
    config = json.loads(path.read_text()) | {"alora_invocation_tokens": tokens}
    path.write_text(json.dumps(config))
    return folder / "activated"


def test_batches_are_full_waits_are_bounded_and_no_request_is_lost(
    checkpoint: Path, adapters_dir: Path, tmp_path: Path
) -> None:
    """Draw limits, pools, priorities, deadlines, aborts, streams and hot changes of adapters."""
    folders = {path.name: path for path in adapters_dir.iterdir()}
    folders["activated"] = activated(checkpoint, adapters_dir / "attention-r4", tmp_path)
    tally = run_loads(SEEDS, sorted(POLICIES), checkpoint, folders, print)
    print(tally)
    assert tally.ended["answered"] > tally.requests // 3
    assert min(tally.preemptions, tally.evictions, tally.held_back) > 0
