"""Generate adapters from a few items with each option changed, and compare the runs.

usage: python -m tools.generation.variants OUT [--only NAME]...

Each run differs from the run `default` in one setting, except `paper`, which follows the paper in
all settings. A run that was stopped continues if the script is started again. Runs that pack items
into adapters alike, and only merge the adapters differently, continue a copy of `merge-none`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from tools.generation.__main__ import export
from vlora.cli.common import run_command
from vlora.generation.report import write_report
from vlora.generation.run import STATE, generate
from vlora.generation.spec import PAPER, PackingOptions, read_spec

REQUIRED = {"digits": 0.35, "textures": 0.75, "glyphs": 0.55, "inspection": 0.85}
"""Items of the runs, and the accuracy that each must reach. The items need no package beyond those
of the extra `train`."""
EXAMPLES = 400
"""Maximum number of pictures per item."""
TRAINING = {"rank": 4, "batch_size": 8, "max_steps": 100, "evaluate_every": 25, "patience": 2}


@dataclass(frozen=True)
class Variant:
    """Settings of a run: `options` and `training` of the specification, and whether items that have
    a vision task head keep it.
    """

    options: PackingOptions = field(default_factory=PackingOptions)
    training: dict[str, Any] = field(default_factory=dict)
    heads: bool = True

    @property
    def only_merges_differ(self) -> bool:
        """Return whether the run packs its items as the run `default` does."""
        usual = PackingOptions()
        merges = {"merge": usual.merge, "merge_training": usual.merge_training}
        return replace(self, options=self.options.model_copy(update=merges)) == Variant()


VARIANTS = {
    "merge-none": Variant(PackingOptions(merge="none")),
    "default": Variant(),
    "merge-without-training": Variant(PackingOptions(merge_training=False)),
    "merge-ties": Variant(PackingOptions(merge="ties_svd")),
    "merge-dare": Variant(PackingOptions(merge="dare_ties_svd")),
    "replay-0": Variant(PackingOptions(replay=0.0)),
    "order-random": Variant(PackingOptions(order="random")),
    "paper": Variant(PAPER),
    "focus-0": Variant(PackingOptions(focus=0.0)),
    "lm-heads": Variant(heads=False),
    "order-given": Variant(PackingOptions(order="given")),
    "margin-0": Variant(training={"margin": 0.0}),
    "fit-last": Variant(PackingOptions(fit="last")),
    "restarts-0": Variant(training={"restarts": 0}),
}
"""Runs by their names, in the order in which they run. `merge-none` must be the first."""


def write_spec(plain: Path, name: str, variant: Variant) -> Path:
    """Write the specification of a run next to `plain`, on which it is based. Return its path."""
    spec = yaml.safe_load(plain.read_text(encoding="utf-8"))
    spec["training"] |= TRAINING | variant.training
    spec["options"] = variant.options.model_dump()
    for item in spec["items"]:
        item["required"] = REQUIRED[item["name"]]
        if not variant.heads:
            item.pop("head", None)
    path = plain.with_name(f"{name}.yaml")
    path.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    return path


def continue_packing(source: Path, target: Path, options: PackingOptions) -> None:
    """Copy the state of a run that merged nothing, so that a run with other merges continues it."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    journal = json.loads((part / STATE).read_text(encoding="utf-8"))
    journal["settings"]["options"] = options.model_dump()
    journal["written"] = []
    (part / STATE).write_text(json.dumps(journal), encoding="utf-8")
    part.rename(target)


def print_table(folders: Sequence[Path]) -> None:
    """Print a Markdown table of finished runs, from their report.json."""
    typer.echo(
        "| run | items | promises kept | adapters | items per adapter | mean gain over the base |"
        " attempts and merges (rolled back) | steps |\n|---|---|---|---|---|---|---|---|"
    )
    for folder in folders:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        items = report["items"].values()
        attempts = [*report["attempts"], *report["merges"]]
        gains = [item["reached"] - item["base"] for item in items if item["reached"] is not None]
        typer.echo(
            f"| {folder.name} | {len(items)} | {sum(item['kept'] for item in items)} |"
            f" {len(report['adapters'])} | {report['items_per_adapter']} |"
            f" {sum(gains) / max(1, len(gains)):+.3f} |"
            f" {len(attempts)} ({sum(bool(attempt['broken']) for attempt in attempts)}) |"
            f" {sum(attempt['steps'] for attempt in attempts)} |"
        )


def main(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Data and runs.")],
    only: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Name of a run. Default: all.")
    ] = None,
) -> None:
    """Run all variants and print a table of them."""
    names = only or list(VARIANTS)
    if unknown := set(names) - set(VARIANTS):
        known = ", ".join(VARIANTS)
        raise typer.BadParameter(f"unknown run '{min(unknown)}'; the runs are {known}")
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    plain = export(data, tuple(REQUIRED), EXAMPLES)
    unmerged = out / "merge-none"
    for name in names:
        started = time.monotonic()
        run, variant = out / name, VARIANTS[name]
        state = run / ".generation"
        if (run / "report.json").exists():
            continue
        packed = (unmerged / "report.json").exists() and not state.exists()
        if packed and run != unmerged and variant.only_merges_differ:
            run.mkdir(exist_ok=True)
            continue_packing(unmerged / ".generation", state, variant.options)
        spec = read_spec(write_spec(plain, name, variant))
        write_report(generate(spec, spec.options, state, run), run)
        typer.echo(f"finished {name} in {time.monotonic() - started:.0f} s", err=True)
    print_table([out / name for name in names])


if __name__ == "__main__":
    run_command(main)
