"""Reports of a generation run: `report.json` for programs, `report.md` and plots for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlora.generation.fusion import Event, required_score
from vlora.generation.run import Outcome, folder_name


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the contents of `report.json`."""
    spec, state = outcome.spec, outcome.state
    holders = outcome.holders
    return {
        "options": outcome.options.model_dump(),
        "seed": spec.seed,
        "items": {
            item.name: {
                "task": item.task,
                "metric": item.metric,
                "required": item.required,
                "base": outcome.base[item.name],
                "reached": outcome.reached.get(item.name),
                "adapter": holders.get(item.name),
                "kept": item.name not in outcome.missed,
            }
            for item in spec.items
        },
        "adapters": {folder_name(spec, adapter): list(adapter.items) for adapter in state.adapters},
        "items_per_adapter": round(len(holders) / len(state.adapters), 2) if state.adapters else 0,
        "attempts": [_attempt(event) for event in state.events],
        "seconds": round(sum(event.attempt.seconds for event in state.events), 1),
    }


def _attempt(event: Event) -> dict[str, Any]:
    return {
        "item": event.item,
        "adapter": event.adapter,
        "validation": dict(event.attempt.scores),
        "broken": list(event.broken),
        "steps": event.attempt.steps,
        "seconds": event.attempt.seconds,
    }


def write_report(outcome: Outcome, folder: Path) -> Path:
    """Write the reports, and the plots if matplotlib is installed. Return `report.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_json(outcome), indent=2)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    plots = _plot(outcome, folder)
    path = folder / "report.md"
    path.write_text("\n".join(_lines(outcome, plots)) + "\n", encoding="utf-8")
    return path


def _lines(outcome: Outcome, plots: list[str]) -> Iterator[str]:
    """Yield the lines of `report.md`."""
    report = as_json(outcome)
    yield "# Adapters generated from knowledge items"
    yield ""
    minutes = report["seconds"] / 60
    kept = sum(item["kept"] for item in report["items"].values())
    yield (
        f"{len(report['items'])} items in {len(report['adapters'])} adapters"
        f" ({report['items_per_adapter']} items per adapter); {kept} of {len(report['items'])}"
        f" promises kept, after {len(report['attempts'])} attempts of {minutes:.1f} minutes in all."
    )
    yield ""
    yield "Accuracies are measured on the test split, which neither training nor fusion has used."
    yield ""
    yield "| item | task | metric | required | base | reached | promise | adapter |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, item in report["items"].items():
        reached = "-" if item["reached"] is None else f"{item['reached']:.3f}"
        promise = "kept" if item["kept"] else "**missed**"
        yield (
            f"| {name} | {item['task']} | {item['metric']} | {item['required']:.3f} |"
            f" {item['base']:.3f} | {reached} | {promise} | {item['adapter'] or '-'} |"
        )
    yield ""
    yield "## Attempts"
    yield ""
    yield "Scores are those of the validation split; a broken promise rolls the weights back."
    yield ""
    yield "| item | onto adapter | broken promises | steps | seconds |"
    yield "|---|---|---|---|---|"
    for event in outcome.state.events:
        broken = ", ".join(
            f"{name} ({event.attempt.scores[name]:.3f} of"
            f" {required_score(outcome.spec, outcome.spec.item(name)):.3f})"
            for name in event.broken
        )
        yield (
            f"| {event.item} | {event.adapter} | {broken or 'none'} | {event.attempt.steps} |"
            f" {event.attempt.seconds:.0f} |"
        )
    for plot in plots:
        yield ""
        yield f"![{plot.removesuffix('.png').replace('_', ' ')}]({plot})"


def _plot(outcome: Outcome, folder: Path) -> list[str]:
    """Write the plots of figures 10 and 15 of the paper and return their names; none without
    matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    names = [item.name for item in outcome.spec.items]
    figure = Figure(figsize=(max(6, len(names) * 0.8), 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(names))
    axes.bar([place - 0.2 for place in places], [outcome.base[name] for name in names], 0.4)
    axes.bar([place + 0.2 for place in places], [outcome.reached.get(n, 0.0) for n in names], 0.4)
    required = [outcome.spec.item(name).required for name in names]
    axes.hlines(required, [p - 0.45 for p in places], [p + 0.45 for p in places], "black")
    axes.set_xticks(list(places), names, rotation=30, ha="right")
    axes.set_ylabel("accuracy on the test split")
    axes.legend(["required", "base", "adapter"])
    figure.savefig(folder / "accuracy.png", dpi=120)

    figure = Figure(figsize=(max(6, len(outcome.state.events) * 0.5), 4), layout="constrained")
    axes = figure.subplots()
    for name in names:
        points = [
            (number, event.attempt.scores[name])
            for number, event in enumerate(outcome.state.events, 1)
            if name in event.attempt.scores
        ]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    for number, event in enumerate(outcome.state.events, 1):
        if event.broken:
            axes.axvline(number, color="red", alpha=0.3)
    axes.set_xlabel("attempt (red: rolled back)")
    axes.set_ylabel("validation accuracy")
    axes.legend(fontsize=7)
    figure.savefig(folder / "fusion.png", dpi=120)
    return ["accuracy.png", "fusion.png"]
