"""Description of a server for its clients: limits, tasks and adapters, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from vlora.vision.prompts import TASKS

if TYPE_CHECKING:
    from vlora.adapters.catalog import NameTable
    from vlora.adapters.files import AdapterInfo

# What the playground shows of each task.
TASK_LABELS = {
    name: {"name": spec.title, "label": spec.label, "hint": spec.hint}
    for name, spec in TASKS.items()
}


class ServerDescription:
    """Describes a server as JSON. The JSON is made again only after the adapters have changed.

    names: returns the present table of adapters.
    max_model_len: maximum number of tokens of a prompt and its answer.
    """

    def __init__(self, names: Callable[[], NameTable], max_model_len: int) -> None:
        self._names = names
        self._max_model_len = max_model_len
        self._described: NameTable | None = None
        self._json = ""

    def as_json(self) -> str:
        """Return the object `{"max_model_len", "tasks", "task_labels", "adapters", "broken"}` as
        JSON.

        `adapters` lists the adapters that requests can use, in order of name. Each has its name,
        tasks, accuracy by task or dataset, ranks, and the labels and tasks of its vision task head.
        `broken` maps the names of all other adapters to their errors.
        """
        names = self._names()
        if names is not self._described:
            self._json = json.dumps(
                {
                    "max_model_len": self._max_model_len,
                    "tasks": list(TASKS),
                    "task_labels": TASK_LABELS,
                    "adapters": [_entry(name, names.current[name].info) for name in names.names],
                    "broken": {name: str(names.broken[name]) for name in sorted(names.broken)},
                },
                allow_nan=False,
            )
            self._described = names
        return self._json


def _entry(name: str, info: AdapterInfo) -> dict[str, object]:
    return {
        "name": name,
        "tasks": list(info.tasks),
        "accuracy": dict(info.accuracy),
        "ranks": list(info.ranks),
        "head_labels": list(info.head_labels),
        "head_tasks": list(info.head_tasks),
    }
