"""Measure a trained checkpoint and its adapters on the held-out set.

Each domain is measured with the base and with its adapter. It is also measured blind: with a grey
picture, which shows how much can be guessed from the question alone.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tools.demo.accuracy import ask_all
from tools.demo.heldout import DOMAINS, Item, adapter_of, is_right, items, png
from tools.demo.scenes import SIDE
from vlora.launcher.server import ServerOptions, TritonServer

GREY = png(np.full((SIDE, SIDE, 3), 128, np.uint8))
ITEMS, BLIND_ITEMS = 200, 100


def measure(url: str, domain: str) -> dict[str, Any]:
    """Return the entry of a domain in accuracy.json. Accuracies are from 0 to 1."""
    asked, adapter = items(domain, ITEMS), adapter_of(domain)
    without = [replace(item, adapter=None) for item in asked]
    grey = [
        replace(item, images=[GREY] * len(item.images), frames=[GREY] * len(item.frames))
        for item in asked[:BLIND_ITEMS]
    ]
    by_kind: dict[str, list[Item]] = defaultdict(list)
    for item in without:
        by_kind[item.kind].append(item)
    return {
        "task": asked[0].task,
        "base": _accuracy(url, without),
        "adapter": _accuracy(url, asked) if adapter else None,
        "blind": _accuracy(url, grey),
        "n": ITEMS,
        "kinds": {kind: _accuracy(url, some) for kind, some in by_kind.items()},
    }


def _accuracy(url: str, asked: Sequence[Item]) -> float:
    answers = ask_all(url, asked)
    hits = [is_right(item, served.text) for item, served in zip(asked, answers, strict=True)]
    return round(sum(hits) / len(hits), 4)


def evaluate(checkpoint: Path, adapters: Path) -> None:
    """Write accuracy.json and the accuracies in each vlora.json. Print the model card's rows."""
    with TritonServer(ServerOptions(model=checkpoint, adapters=adapters)) as server:
        table = {domain: measure(server.grpc_url, domain) for domain in DOMAINS}
    (checkpoint / "accuracy.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    for domain, row in table.items():
        own, name = ("–" if row["adapter"] is None else f"{row['adapter']:.1%}"), adapter_of(domain)
        cells = [domain, row["task"], name or "–", f"{row['base']:.1%}", own, f"{row['blind']:.1%}"]
        print(f"| {' | '.join(cells)} | {ITEMS} |")
        if name is not None:
            about_file = adapters / name / "vlora.json"
            about = json.loads(about_file.read_text(encoding="utf-8"))
            about["accuracy"][domain] = row["adapter"]
            about_file.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
