"""Plots of a generation run, like figures 4, 5, 10 and 15 of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlora.generation.fusion import Attempt
from vlora.generation.run import Outcome

MARKERS = "osD^vP*X<>hp"
WIDTH_PER_ITEM = 0.8
"""Width in inches of an item's bars."""
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
    """Return a figure and its axes, whose y axis shows accuracies from 0 to 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.5, width), 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_ylabel(ylabel)
    axes.set_ylim(0, 1.08)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _accuracy(outcome: Outcome) -> Any:
    """Return a bar chart of each item's accuracies (base model, adapter) and required accuracy."""
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
    """Return a line chart of the items' accuracies after each attempt and each merge."""
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
    """Return a line chart of each task's mean accuracy by the number of items in the adapter."""
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
