"""Ask a server the demo's held-out questions, and compare its accuracies with the model card's.

The accuracy of each domain must be within half a point of the card's, which was measured in
float32. Without an address, the script starts a server, with float or quantized weights.
`tests/triton/test_accuracy.py` compares single answers with those of transformers and PEFT.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tritonclient.grpc as grpcclient
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from clients.common import first_string, request_inputs, sampling_parameters
from tools.demo.build import CHECKPOINT
from tools.demo.heldout import DOMAINS, Item, adapter_of, is_right, items, png
from tools.demo.scenes import SIDE
from vlora.cli.common import run_command
from vlora.config import QUANTIZATIONS
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

GREY = png(np.full((SIDE, SIDE, 3), 128, np.uint8))
ITEMS, BLIND_ITEMS = 200, 100
HALF_A_POINT = 0.005
AT_ONCE = 16
"""Number of concurrent requests."""
SECONDS = 120.0
"""Time limit for one answer."""
Quantization = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE", help=f"Weights of the started server: {', '.join(QUANTIZATIONS)}."
    ),
]


@dataclass(frozen=True)
class Served:
    """Answer of the server: its text, and the probability of each label if a task head answered."""

    text: str
    scores: dict[str, float] | None


def ask_all(url: str, asked: Sequence[Item]) -> list[Served]:
    """Return the answers of `video_analytics` in order. Send AT_ONCE requests at a time."""
    client = grpcclient.InferenceServerClient(url)

    def ask(item: Item) -> Served:
        inputs = request_inputs(
            item.text,
            images=item.images,
            frames=item.frames,
            sampling=sampling_parameters(item.adapter),
            task=item.task,
        )
        answer = client.infer("video_analytics", inputs, client_timeout=SECONDS)
        result = json.loads(first_string(answer, "result"))
        return Served(first_string(answer, "text_output"), result.get("scores"))

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(track(pool.map(ask, asked), "server", total=len(asked), transient=True))
    finally:
        client.close()


def measure(url: str, domain: str) -> dict[str, Any]:
    """Return the entry of a domain in accuracy.json. Accuracies are from 0 to 1."""
    asked, adapter = items(domain, ITEMS), adapter_of(domain)
    base = _hits(url, [replace(item, adapter=None) for item in asked])
    grey = [
        replace(item, images=[GREY] * len(item.images), frames=[GREY] * len(item.frames))
        for item in asked[:BLIND_ITEMS]
    ]
    kinds: dict[str, list[bool]] = defaultdict(list)
    for item, hit in zip(asked, base, strict=True):
        kinds[item.kind].append(hit)
    return {
        "task": asked[0].task,
        "base": _share(base),
        "adapter": _share(_hits(url, asked)) if adapter else None,
        "blind": _share(_hits(url, grey)),
        "n": ITEMS,
        "kinds": {kind: _share(hits) for kind, hits in kinds.items()},
    }


def _hits(url: str, asked: Sequence[Item]) -> list[bool]:
    answers = ask_all(url, asked)
    return [is_right(item, served.text) for item, served in zip(asked, answers, strict=True)]


def _share(hits: Sequence[bool]) -> float:
    return round(sum(hits) / len(hits), 4)


def evaluate(checkpoint: Path, adapters: Path) -> None:
    """Write accuracy.json and the accuracies in each vlora.json. Print the model card's rows."""
    with TritonServer(ServerOptions(model=checkpoint, adapters=adapters)) as server:
        table = {domain: measure(server.grpc_url, domain) for domain in DOMAINS}
    (checkpoint / "accuracy.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    for domain, row in table.items():
        own, name = ("–" if row["adapter"] is None else f"{row['adapter']:.1%}"), adapter_of(domain)
        cells = [domain, row["task"], name or "–", f"{row['base']:.1%}", own, f"{row['blind']:.1%}"]
        print(f"| {' | '.join(cells)} | {ITEMS} |")
        if name is not None:
            about_file = adapters / name / "vlora.json"
            about = json.loads(about_file.read_text(encoding="utf-8"))
            about["accuracy"][domain] = row["adapter"]
            about_file.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def main(
    url: Annotated[
        str | None, typer.Option(help="gRPC address of a server. Default: start one.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Type of the started server: float32 or bfloat16.")
    ] = "float32",
    quantization: Quantization = None,
) -> None:
    """Compare a server's accuracies on the held-out set with the model card's."""
    if url is not None and quantization is not None:
        raise typer.BadParameter("--quantization is for a started server; remove it or --url")
    card = json.loads((CHECKPOINT / "accuracy.json").read_text(encoding="utf-8"))
    asked = [item for domain in card for item in items(domain, card[domain]["n"])]
    with ExitStack() as stack:
        if url is None:
            types = {"dtype": dtype, "quantization": quantization}
            server = TritonServer(ServerOptions(model_json=types))
            url = stack.enter_context(server).grpc_url
        answers = iter(ask_all(url, asked))
    table, far, hits = Table("domain", "items", "server", "card"), [], 0
    for domain, entry in card.items():
        count = entry["n"]
        expected = entry["base"] if entry["adapter"] is None else entry["adapter"]
        right = sum(is_right(item, next(answers).text) for item in items(domain, count))
        reached, hits = right / count, hits + right
        table.add_row(domain, str(count), f"{reached:.3f}", f"{expected:.3f}")
        if abs(reached - expected) > HALF_A_POINT + 1e-9:
            far.append(f"{domain} ({reached - expected:+.3f})")
    table.add_row("all", str(len(asked)), f"{hits / len(asked):.4f}", "")
    conclude(table, far, "more than half a point from the card")


def conclude(table: Table, far: Sequence[str], what: str) -> None:
    """Print a comparison and the rows in `far`. Exit with 1 if there are any.

    what: what the rows in `far` have in common.
    """
    console = Console()
    console.print(table)
    console.print(f"{what}: {', '.join(far) or 'none'}")
    if far:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
