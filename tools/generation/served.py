"""Send the test split of a generation run to a server, and compare with the report's accuracies.

usage: python -m tools.generation.served SPEC OUT [--dtype TYPE] [--quantization TYPE] [--routed]

It exits with 1 if an accuracy differs by more than half a point from the report, or is below the
item's promise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tools.demo.accuracy import HALF_A_POINT, Quantization, ask_all, conclude
from tools.demo.heldout import Item as Question
from vlora.cli.common import run_command
from vlora.generation.examples import Example
from vlora.generation.metrics import METRICS
from vlora.generation.run import load_splits
from vlora.generation.spec import read_spec
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer


def question(task: str, example: Example, adapter: str | None) -> Question:
    """Return an example as a request. If `adapter` is None, the request names no adapter."""
    files = [path.read_bytes() for path in example.images]
    return Question(
        id="", domain="", adapter=adapter, task=task, text=example.question, answer=example.answer,
        images=[] if task == "video" else files, frames=files if task == "video" else [],
        boxes=None, kind="",
    )  # fmt: skip


def main(
    spec: Annotated[Path, typer.Argument(help="Specification of the run.")],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Adapters and report.json.")],
    dtype: Annotated[str, typer.Option(help="Server's type: float32 or bfloat16.")] = "float32",
    quantization: Quantization = None,
    routed: Annotated[bool, typer.Option(help="Let the server choose the adapter.")] = False,
) -> None:
    """Compare the accuracies of served adapters with the report of the run that made them."""
    wanted = read_spec(spec)
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    splits = load_splits(wanted, out / ".generation")
    table, far = Table("item", "adapter", "examples", "promise", "report", "served"), []
    types = {"dtype": dtype, "quantization": quantization, "route_adapters": routed}
    options = ServerOptions(model=wanted.base, adapters=out, model_json=types)
    with TritonServer(options) as server:
        for name, entry in report["items"].items():
            if entry["adapter"] is None:
                continue
            item, examples = wanted.item(name), splits[name].test
            adapter = None if routed else entry["adapter"]
            questions = [question(item.task, example, adapter) for example in examples]
            answers = [answer.text for answer in ask_all(server.grpc_url, questions)]
            reached = METRICS[item.metric](answers, [example.answer for example in examples])
            table.add_row(
                name, entry["adapter"], str(len(examples)), f"{item.required:.4f}",
                f"{entry['reached']:.4f}", f"{reached:.4f}",
            )  # fmt: skip
            if reached < item.required:
                far.append(f"{name} (below its promise of {item.required:g})")
            if abs(reached - entry["reached"]) > HALF_A_POINT + 1e-9:
                far.append(f"{name} ({reached - entry['reached']:+.4f})")
    conclude(table, far, "more than half a point from the report, or below a promise")


if __name__ == "__main__":
    run_command(main)
