"""Measure which adapter the server chooses for requests that name none.

usage: python -m tools.generation.routing [--questions 100]

The adapters are those of the demo. Their skills are made as `vlora adapters generate` makes them,
but from questions that are not asked. No server or model is needed: the choice depends
only on tasks and questions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tools.demo.heldout import ADAPTER_DOMAINS, DOMAINS, Item, items
from vlora import paths
from vlora.adapters.routing import Router, Skill, usual_words
from vlora.cli.common import run_command

ADAPTERS = paths.root() / "tools" / "demo" / "adapters"
BASE = "base model"


@dataclass(frozen=True)
class Choices:
    """The adapters chosen for the requests of one domain.

    wanted: adapter that was trained for the domain, or BASE.
    chosen: number of requests by adapter.
    """

    domain: str
    task: str
    wanted: str
    chosen: Counter[str]

    @property
    def right(self) -> float:
        """Share of the requests that get the wanted adapter."""
        return self.chosen[self.wanted] / self.chosen.total()


def skills_of(adapter: str, questions: list[Item], folder: Path = ADAPTERS) -> list[Skill]:
    """Return the skills of a demo adapter, one for each domain, with the words of `questions`."""
    about = json.loads((folder / adapter / "vlora.json").read_text(encoding="utf-8"))
    skills = []
    for domain, accuracy in about["accuracy"].items():
        if own := [one for one in questions if one.domain == domain]:
            words = frozenset(usual_words([one.text for one in own]))
            skills.append(Skill(domain, own[0].task, accuracy, words))
    return skills


def measure(count: int) -> Iterator[Choices]:
    """Yield the choices for `count` questions of each domain; as many others make the skills."""
    learned = [one for domain in ADAPTER_DOMAINS for one in items(domain, count, start=count)]
    names = {one.adapter for one in learned if one.adapter is not None}
    router = Router({name: skills_of(name, learned) for name in sorted(names)})
    for domain in DOMAINS:
        asked = items(domain, count)
        chosen = Counter(
            router.choose(one.task, one.text, lambda _: False) or BASE for one in asked
        )
        yield Choices(domain, asked[0].task, asked[0].adapter or BASE, chosen)


def main(
    questions: Annotated[int, typer.Option(help="Number of questions per domain.", min=1)] = 100,
) -> None:
    """Print a table of the chosen adapters."""
    table = Table("domain", "task", "wanted", "chosen rightly", "other choices")
    for one in measure(questions):
        others = {name: number for name, number in one.chosen.items() if name != one.wanted}
        table.add_row(
            one.domain, one.task, one.wanted, f"{one.right:.3f}",
            ", ".join(f"{name} {number}" for name, number in others.items()) or "-",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
