"""Reports of a generation run: `report.json` for programs, `report.md` and plots for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlora.generation.fusion import Attempt, Event, Merge
from vlora.generation.run import Outcome, folder_name

# Plots of a generation run, like figures 4, 5, 10 and 15 of the paper.


MARKERS = "osD^vP*X<>hp"
WIDTH_PER_ITEM = 0.8  # Width in inches of an item's bars.
WIDTH_PER_ATTEMPT = 0.4


def write_plots(outcome: Outcome, folder: Path) -> list[str]:
    """Write the plots and return the names of their files. Without matplotlib, write nothing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    plots = {
        "accuracy.png": _accuracy(outcome),
        "fusion.png": _fusion(outcome),
        "capacity.png": _capacity(outcome),
    }
    for name, figure in plots.items():
        figure.savefig(folder / name, dpi=120)
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
    axes.hlines(
        [item.required for item in outcome.spec.items],
        [place - 0.45 for place in places],
        [place + 0.45 for place in places],
        "black",
        label="required",
    )
    axes.set_xticks(list(places), names, rotation=30, ha="right")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _fusion(outcome: Outcome) -> Any:
    from matplotlib import colormaps

    state = outcome.state
    steps: list[tuple[str, Attempt, tuple[str, ...]]] = [
        (f"{event.item}\nto adapter {event.adapter}", event.attempt, event.broken)
        for event in state.events
    ]
    steps += [("merge", merge.attempt, merge.broken) for merge in state.merges]
    figure, axes = _new_figure(
        2 + len(steps) * WIDTH_PER_ATTEMPT, "Attempts to add an item", "accuracy (validation)"
    )
    axes.set_prop_cycle(color=[colormaps["tab20"](index) for index in range(20)])
    for index, item in enumerate(outcome.spec.items):
        points = {
            number: attempt.scores[item.name]
            for number, (_, attempt, _) in enumerate(steps, 1)
            if item.name in attempt.scores
        }
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(
            list(points), list(points.values()), marker=marker, label=item.name, alpha=0.8, lw=1
        )
    undone = [number for number, (_, _, broken) in enumerate(steps, 1) if broken]
    for number in undone:
        label = "undone: a promise broke" if number == undone[0] else None
        axes.axvspan(number - 0.4, number + 0.4, color="red", alpha=0.12, lw=0, label=label)
    axes.set_xticks(
        range(1, len(steps) + 1), [text for text, _, _ in steps], rotation=60, ha="right", size=7
    )
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
    plots = write_plots(outcome, folder)
    path = folder / "report.md"
    path.write_text("\n".join(_lines(outcome, plots)) + "\n", encoding="utf-8")
    return path


def _lines(outcome: Outcome, plots: list[str]) -> Iterator[str]:
    report = as_json(outcome)
    yield "# Adapters generated from knowledge items"
    yield ""
    minutes = report["seconds"] / 60
    kept = sum(item["kept"] for item in report["items"].values())
    packed = sum(map(len, report["adapters"].values()))
    adapters = len(report["adapters"])
    tried = len(report["attempts"]) + len(report["merges"])
    yield (
        f"{kept} of {len(report['items'])} promises are kept. {packed} items are in {adapters}"
        f" {'adapter' if adapters == 1 else 'adapters'}. The {tried} attempts and merges took"
        f" {minutes:.1f} minutes."
    )
    yield ""
    yield from _item_lines(outcome, report["items"])
    yield "## Attempts"
    yield ""
    yield (
        "If a promise is broken on the validation split, the attempt is undone. In parentheses are"
        " the accuracy and the goal, which is the required accuracy plus the margin."
    )
    yield ""
    yield "| item | to adapter | broken promises | steps | seconds |"
    yield "|---|---|---|---|---|"
    for event in outcome.state.events:
        yield f"| {event.item} | {event.adapter} | {_result(outcome, event)} |"
    for merge in outcome.state.merges:
        yield f"| merge of {', '.join(merge.attempt.scores)} | - | {_result(outcome, merge)} |"
    for plot in plots:
        yield ""
        yield f"![{plot.removesuffix('.png').replace('_', ' ')}]({plot})"


def _item_lines(outcome: Outcome, items: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Accuracies in this table are measured on the test split, which neither training nor"
        " packing has used."
    )
    yield ""
    yield "| item | task | metric | required | base | reached | teacher | promise | adapter |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, item in items.items():
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


def _result(outcome: Outcome, decision: Event | Merge) -> str:
    """Return the last cells of an attempt's table row: broken promises, steps and seconds."""
    attempt = decision.attempt
    broken = ", ".join(
        f"{name} ({attempt.scores[name]:.3f} of {outcome.goals[name].accuracy:.3f})"
        for name in decision.broken
    )
    return f"{broken or 'none'} | {attempt.steps} | {attempt.seconds:.0f}"
