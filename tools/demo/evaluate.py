"""Accuracy of the stored weights on the held-out set, measured with the oracle.

Each domain is measured with the base and with its adapter. It is also measured blind: with a grey
picture, which shows how much can be guessed from the question alone.
"""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.support.oracle import Oracle
from tools.demo.heldout import DOMAINS, Item, adapter_of, is_right, items, png
from tools.demo.scenes import SIDE

GREY = png(np.full((SIDE, SIDE, 3), 128, np.uint8))
ITEMS = 200
BLIND_ITEMS = 100


@dataclass(frozen=True)
class Measured:
    """Accuracies (0 to 1) of one domain over `n` items.

    kinds: accuracy of the base model by kind of question.
    """

    domain: str
    task: str
    base: float
    adapter: float | None
    blind: float
    n: int
    kinds: dict[str, float]


def blinded(item: Item) -> Item:
    """Return the same question about grey pictures."""
    return replace(item, images=[GREY for _ in item.images], frames=[GREY for _ in item.frames])


def accuracy(oracle: Oracle, asked: list[Item], adapter: str | None) -> dict[str, list[bool]]:
    """Return whether each answer is right, in one list for each kind of question."""
    right: dict[str, list[bool]] = defaultdict(list)
    for item in track(asked, f"{asked[0].domain} by {adapter or 'base'}", transient=True):
        right[item.kind].append(is_right(item, oracle.answer(item, adapter).text))
    return dict(right)


def measure(oracle: Oracle, domain: str, n: int = ITEMS) -> Measured:
    """Return the accuracies of one domain: base and adapter on `n` items, blind on at most
    BLIND_ITEMS.
    """
    asked = items(domain, n)
    adapter = adapter_of(domain)
    base = accuracy(oracle, asked, None)
    own = accuracy(oracle, asked, adapter) if adapter else None
    few = [blinded(item) for item in asked[: min(n, BLIND_ITEMS)]]
    blind = accuracy(oracle, few, adapter)
    return Measured(
        domain=domain,
        task=asked[0].task,
        base=_mean(base),
        adapter=_mean(own) if own else None,
        blind=_mean(blind),
        n=n,
        kinds={kind: _mean({kind: hits}) for kind, hits in base.items()},
    )


def _mean(right: dict[str, list[bool]]) -> float:
    every = [hit for hits in right.values() for hit in hits]
    return round(sum(every) / len(every), 4)


def evaluate(
    checkpoint: Path, adapters: Path, n: int = ITEMS, domains: tuple[str, ...] = DOMAINS
) -> list[Measured]:
    """Measure domains and write accuracy.json and each vlora.json.

    Entries of accuracy.json for other domains stay as they are.
    """
    oracle = Oracle(checkpoint, adapters)
    known = read_accuracy(checkpoint)
    for domain in domains:
        name = adapter_of(domain)
        if name is None or (adapters / name / "vlora.json").is_file():
            known[domain] = measure(oracle, domain, n)
            print_table([known[domain]])
            _write_accuracy(checkpoint, adapters, known)
    measured = [known[domain] for domain in DOMAINS if domain in known]
    print_table(measured)
    return measured


def read_accuracy(checkpoint: Path) -> dict[str, Measured]:
    """Return the contents of accuracy.json by domain; empty if the file is missing."""
    file = checkpoint / "accuracy.json"
    if not file.is_file():
        return {}
    table = json.loads(file.read_text(encoding="utf-8"))
    return {domain: Measured(domain=domain, **row) for domain, row in table.items()}


def _write_accuracy(checkpoint: Path, adapters: Path, known: dict[str, Measured]) -> None:
    table = {}
    for domain in (domain for domain in DOMAINS if domain in known):
        row = asdict(known[domain])
        row.pop("domain")
        table[domain] = row
    target = checkpoint / "accuracy.json"
    target.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    for name in {adapter_of(domain) for domain in table} - {None}:
        about_file = adapters / str(name) / "vlora.json"
        about = json.loads(about_file.read_text(encoding="utf-8"))
        own = [domain for domain in table if adapter_of(domain) == name]
        about["accuracy"] = {domain: table[domain]["adapter"] for domain in own}
        about_file.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def print_table(measured: list[Measured]) -> None:
    table = Table("domain", "task", "base", "adapter", "blind", "n")
    for one in measured:
        own = "" if one.adapter is None else f"{one.adapter:.3f}"
        table.add_row(one.domain, one.task, f"{one.base:.3f}", own, f"{one.blind:.3f}", str(one.n))
    Console().print(table)
