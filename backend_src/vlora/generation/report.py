"""Reports of a generation run: `report.json` for programs, `report.md` and plots for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlora.generation.fusion import Event, Merge
from vlora.generation.run import Outcome, folder_name

MARKERS = "osD^vP*X<>hp"
WIDTH_PER_ITEM = 0.8  # Width in inches of an item's bars.
WIDTH_PER_ATTEMPT = 0.4


def write_plots(outcome: Outcome, folder: Path) -> list[str]:
    """Write plots like figures 4, 5, 10 and 15 of the paper, and return the names of their files.

    Without matplotlib, nothing is written.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    plots = {"accuracy.png": _accuracy, "fusion.png": _fusion, "capacity.png": _capacity}
    for name, draw in plots.items():
        draw(outcome).savefig(folder / name, dpi=120)
    return list(plots)


def _new_figure(width: float, title: str, ylabel: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.5, width), 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_ylabel(ylabel)
    axes.set_ylim(0, 1.08)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _accuracy(outcome: Outcome) -> Any:
    names = [item.name for item in outcome.spec.items]
    figure, axes = _new_figure(
        len(names) * WIDTH_PER_ITEM, "Accuracy of each item", "accuracy on the test split"
    )
    places = range(len(names))
    base = [outcome.base[name] for name in names]
    bars = axes.bar([place - 0.2 for place in places], base, 0.4, label="base model")
    axes.bar_label(bars, fmt="%.2f", fontsize=7)
    reached = [outcome.reached.get(name, 0.0) for name in names]
    bars = axes.bar([place + 0.2 for place in places], reached, 0.4, label="adapter")
    texts = [f"{outcome.reached[n]:.2f}" if n in outcome.reached else "none" for n in names]
    axes.bar_label(bars, texts, fontsize=7)
    required = [item.required for item in outcome.spec.items]
    left, right = ([place + side for place in places] for side in (-0.45, 0.45))
    axes.hlines(required, left, right, "black", label="required")
    axes.set_xticks(list(places), names, rotation=30, ha="right")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _fusion(outcome: Outcome) -> Any:
    from matplotlib import colormaps

    state = outcome.state
    steps = state.decisions
    texts = [f"{event.item}\nto adapter {event.adapter}" for event in state.events]
    texts += ["merge"] * len(state.merges)
    figure, axes = _new_figure(
        2 + len(steps) * WIDTH_PER_ATTEMPT, "Attempts to add an item", "accuracy (validation)"
    )
    axes.set_prop_cycle(color=[colormaps["tab20"](index) for index in range(20)])
    for index, item in enumerate(outcome.spec.items):
        points = {
            number: step.attempt.scores[item.name]
            for number, step in enumerate(steps, 1)
            if item.name in step.attempt.scores
        }
        marker = MARKERS[index % len(MARKERS)]
        numbers, scores = list(points), list(points.values())
        axes.plot(numbers, scores, marker=marker, label=item.name, alpha=0.8, lw=1)
    undone = [number for number, step in enumerate(steps, 1) if step.broken]
    for number in undone:
        label = "undone: a promise broke" if number == undone[0] else None
        axes.axvspan(number - 0.4, number + 0.4, color="red", alpha=0.12, lw=0, label=label)
    axes.set_xticks(range(1, len(steps) + 1), texts, rotation=60, ha="right", size=7)
    axes.set_xlim(0.5, len(steps) + 0.5)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


def _capacity(outcome: Outcome) -> Any:
    figure, axes = _new_figure(
        6.5, "Accuracy by number of items in the adapter", "mean accuracy (validation)"
    )
    most = 1
    for index, (task, means) in enumerate(capacity(outcome).items()):
        axes.plot(list(means), list(means.values()), marker=MARKERS[index], label=task)
        most = max(most, *means)
    axes.set_xlabel("items in the adapter, in all attempts, also those that were undone")
    axes.set_xticks(range(1, most + 1))
    axes.set_xlim(0.5, most + 0.5)
    figure.legend(loc="outside right upper")
    return figure


def capacity(outcome: Outcome) -> dict[str, dict[int, float]]:
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


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the content of `report.json`."""
    spec, state = outcome.spec, outcome.state
    holders = outcome.holders
    return {
        "options": outcome.options.model_dump(),
        "seed": spec.seed,
        "items": {
            item.name: {
                **item.model_dump(include={"task", "metric", "required"}),
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
            {"item": one.item, "adapter": one.adapter, **_attempt(one)} for one in state.events
        ],
        "merges": [{"items": list(one.attempt.scores), **_attempt(one)} for one in state.merges],
        "seconds": round(sum(one.attempt.seconds for one in state.decisions), 1),
    }


def _attempt(decision: Event | Merge) -> dict[str, Any]:
    return {
        "validation": dict(decision.attempt.scores),
        "broken": list(decision.broken),
        "steps": decision.attempt.steps,
        "seconds": decision.attempt.seconds,
    }


def write_report(outcome: Outcome, folder: Path) -> Path:
    """Write the reports, and the plots if matplotlib is installed. Return `report.md`'s path."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_json(outcome), indent=2)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    plots = write_plots(outcome, folder)
    path = folder / "report.md"
    path.write_text("\n\n".join(_paragraphs(outcome, plots)) + "\n", encoding="utf-8")
    return path


def _paragraphs(outcome: Outcome, plots: list[str]) -> Iterator[str]:
    report = as_json(outcome)
    yield "# Adapters generated from knowledge items"
    kept = sum(item["kept"] for item in report["items"].values())
    packed = sum(map(len, report["adapters"].values()))
    adapters = len(report["adapters"])
    tried = len(report["attempts"]) + len(report["merges"])
    yield (
        f"{kept} of {len(report['items'])} promises are kept. {packed} items are in {adapters}"
        f" {'adapter' if adapters == 1 else 'adapters'}. The {tried} attempts and merges took"
        f" {report['seconds'] / 60:.1f} minutes."
    )
    yield (
        "Accuracies in this table are measured on the test split, which neither training nor"
        " packing has used."
    )
    yield _table(
        "item | task | metric | required | base | reached | teacher | promise | adapter",
        [_item_row(name, item) for name, item in report["items"].items()],
    )
    if outcome.left_out:
        yield f"{len(outcome.left_out)} images were left out:"
        yield "\n".join(f"- {reason}" for reason in outcome.left_out)
    yield "## Attempts"
    yield (
        "If a promise is broken on the validation split, the attempt is undone. In parentheses are"
        " the accuracy and the goal, which is the required accuracy plus the margin."
    )
    state = outcome.state
    rows = [f"{one.item} | {one.adapter} | {_result(outcome, one)}" for one in state.events]
    for merge in state.merges:
        rows.append(f"merge of {', '.join(merge.attempt.scores)} | - | {_result(outcome, merge)}")
    yield _table("item | to adapter | broken promises | steps | seconds", rows)
    for plot in plots:
        yield f"![{plot.removesuffix('.png').replace('_', ' ')}]({plot})"


def _table(heads: str, rows: list[str]) -> str:
    line = "|" + "---|" * (heads.count("|") + 1)
    return "\n".join([f"| {heads} |", line, *(f"| {row} |" for row in rows)])


def _item_row(name: str, item: Mapping[str, Any]) -> str:
    reached, teacher = (
        "-" if item[key] is None else f"{item[key]:.3f}" for key in ("reached", "teacher")
    )
    promise = "kept" if item["kept"] else "**missed**"
    return (
        f"{name} | {item['task']} | {item['metric']} | {item['required']:.3f} | {item['base']:.3f}"
        f" | {reached} | {teacher} | {promise} | {item['adapter'] or '-'}"
    )


def _result(outcome: Outcome, decision: Event | Merge) -> str:
    """Return the last cells of an attempt's table row: broken promises, steps and seconds."""
    attempt = decision.attempt
    broken = ", ".join(
        f"{name} ({attempt.scores[name]:.3f} of {outcome.goals[name].accuracy:.3f})"
        for name in decision.broken
    )
    return f"{broken or 'none'} | {attempt.steps} | {attempt.seconds:.0f}"
