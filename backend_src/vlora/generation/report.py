"""Reports of a generation run: `report.json` for programs, `report.md` and plots for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlora.generation.fusion import Event, Merge
from vlora.generation.run import Outcome, folder_name


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the content of `report.json`."""
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
                "teacher": outcome.teachers.get(item.name),
                "adapter": holders.get(item.name),
                "kept": item.name not in outcome.missed,
            }
            for item in spec.items
        },
        "left_out": list(outcome.left_out),
        "adapters": {folder_name(spec, adapter): list(adapter.items) for adapter in state.adapters},
        "items_per_adapter": round(len(holders) / len(state.adapters), 2) if state.adapters else 0,
        "attempts": [
            {"item": event.item, "adapter": event.adapter, **_attempt(event)}
            for event in state.events
        ],
        "merges": [
            {"items": list(merge.attempt.scores), **_attempt(merge)} for merge in state.merges
        ],
        "seconds": round(
            sum(event.attempt.seconds for event in state.events)
            + sum(merge.attempt.seconds for merge in state.merges),
            1,
        ),
    }


def _attempt(decision: Event | Merge) -> dict[str, Any]:
    return {
        "validation": dict(decision.attempt.scores),
        "broken": list(decision.broken),
        "steps": decision.attempt.steps,
        "seconds": decision.attempt.seconds,
    }


def write_report(outcome: Outcome, folder: Path) -> Path:
    """Write the reports, and the plots if matplotlib is installed.

    Returns the path of `report.md`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_json(outcome), indent=2)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    plots = _plot(outcome, folder)
    path = folder / "report.md"
    path.write_text("\n".join(_lines(outcome, plots)) + "\n", encoding="utf-8")
    return path


def _lines(outcome: Outcome, plots: list[str]) -> Iterator[str]:
    report = as_json(outcome)
    yield "# Adapters generated from knowledge items"
    yield ""
    minutes = report["seconds"] / 60
    kept = sum(item["kept"] for item in report["items"].values())
    yield (
        f"{len(report['items'])} items in {len(report['adapters'])} adapters"
        f" ({report['items_per_adapter']} items per adapter); {kept} of {len(report['items'])}"
        f" promises kept, after {len(report['attempts'])} attempts. Attempts and merges took"
        f" {minutes:.1f} minutes in all."
    )
    yield ""
    yield "Accuracies are measured on the test split, which neither training nor fusion has used."
    yield ""
    yield "| item | task | metric | required | base | reached | teacher | promise | adapter |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, item in report["items"].items():
        reached, teacher = (
            "-" if item[key] is None else f"{item[key]:.3f}" for key in ("reached", "teacher")
        )
        promise = "kept" if item["kept"] else "**missed**"
        yield (
            f"| {name} | {item['task']} | {item['metric']} | {item['required']:.3f} |"
            f" {item['base']:.3f} | {reached} | {teacher} | {promise} | {item['adapter'] or '-'} |"
        )
    yield ""
    if outcome.left_out:
        yield f"{len(outcome.left_out)} images were left out:"
        yield ""
        for reason in outcome.left_out:
            yield f"- {reason}"
        yield ""
    yield "## Attempts"
    yield ""
    yield "Scores are those of the validation split; a broken promise rolls the weights back."
    yield ""
    yield "| item | onto adapter | broken promises | steps | seconds |"
    yield "|---|---|---|---|---|"
    for event in outcome.state.events:
        yield f"| {event.item} | {event.adapter} | {_result(outcome, event)} |"
    for merge in outcome.state.merges:
        yield f"| merge of {', '.join(merge.attempt.scores)} | - | {_result(outcome, merge)} |"
    for plot in plots:
        yield ""
        yield f"![{plot.removesuffix('.png').replace('_', ' ')}]({plot})"


def _result(outcome: Outcome, decision: Event | Merge) -> str:
    """Return the last cells of an attempt's table row: broken promises, steps and seconds."""
    attempt = decision.attempt
    broken = ", ".join(
        f"{name} ({attempt.scores[name]:.3f} of {outcome.goals[name].accuracy:.3f})"
        for name in decision.broken
    )
    return f"{broken or 'none'} | {attempt.steps} | {attempt.seconds:.0f}"


def _plot(outcome: Outcome, folder: Path) -> list[str]:
    """Write plots like figures 4, 5, 10 and 15 of the paper, and return the names of their files.

    Without matplotlib, nothing is written.
    """
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

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for task, means in _capacity(outcome).items():
        axes.plot(list(means), list(means.values()), marker="o", label=task)
    axes.set_xlabel("items in the adapter")
    axes.set_ylabel("mean validation accuracy, kept or not")
    axes.legend()
    figure.savefig(folder / "capacity.png", dpi=120)
    return ["accuracy.png", "fusion.png", "capacity.png"]


def _capacity(outcome: Outcome) -> dict[str, dict[int, float]]:
    """Return the mean accuracy of all attempts, by task and by number of items in the adapter."""
    found: dict[str, dict[int, list[float]]] = {}
    for event in outcome.state.events:
        for name, score in event.attempt.scores.items():
            of_task = found.setdefault(outcome.spec.item(name).task, {})
            of_task.setdefault(len(event.attempt.scores), []).append(score)
    return {
        task: {count: sum(scores) / len(scores) for count, scores in sorted(of_task.items())}
        for task, of_task in found.items()
    }
