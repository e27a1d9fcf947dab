"""Reports of a generation run: `report.json` for programs, `report.md` and plots for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlora.generation.fusion import Event, Merge
from vlora.generation.plots import write_plots
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
    yield (
        "Accuracies in this table are measured on the test split, which neither training nor"
        " packing has used."
    )
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


def _result(outcome: Outcome, decision: Event | Merge) -> str:
    """Return the last cells of an attempt's table row: broken promises, steps and seconds."""
    attempt = decision.attempt
    broken = ", ".join(
        f"{name} ({attempt.scores[name]:.3f} of {outcome.goals[name].accuracy:.3f})"
        for name in decision.broken
    )
    return f"{broken or 'none'} | {attempt.steps} | {attempt.seconds:.0f}"
