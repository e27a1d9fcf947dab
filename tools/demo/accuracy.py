"""Send the held-out set to a server and compare its answers with the oracle's (transformers, PEFT).

In float32, each text must equal the oracle's, unless the two best logits of the oracle are a near
tie. Head scores may differ by 1e-4. In bfloat16, answers may differ, but the accuracy of each
domain must stay within half a point of the accuracy in the model card, which was measured in
float32. Without an address, the script starts a server.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tritonclient.grpc as grpcclient
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from clients.common import first_string, request_inputs, sampling_parameters
from tests.support.oracle import Mismatch, Oracle
from tools.demo.__main__ import ADAPTERS, CHECKPOINT
from tools.demo.heldout import DOMAINS, Item, is_right, items
from vlora.cli.common import run_command
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

HEAD_TOLERANCE = 1e-4
HALF_A_POINT = 0.005
AT_ONCE = 16
"""Number of concurrent requests."""
SECONDS = 120.0
"""Time limit for one answer."""


@dataclass(frozen=True)
class Served:
    """Answer of the server: its text, and the probability of each label if a task head answered."""

    text: str
    scores: dict[str, float] | None


@dataclass
class Comparison:
    """Comparison of the server's answers with the oracle's in one domain.

    served_right, oracle_right: numbers of right answers.
    ties: number of answers that differ at a near tie of the oracle's logits.
    wrong: descriptions of all other differences.
    """

    domain: str
    items: int = 0
    served_right: int = 0
    oracle_right: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, item: Item, served: Served, oracle: Oracle) -> None:
        answer = oracle.answer(item, item.adapter)
        self.items += 1
        self.served_right += is_right(item, served.text)
        self.oracle_right += is_right(item, answer.text)
        if answer.scores is not None:
            labels = oracle.adapter_info(item.adapter)["head"]["labels"]
            worst = _worst_score(served, answer.scores, labels)
            if worst > HEAD_TOLERANCE:
                self.wrong.append(f"{item.id}: head scores differ by {worst:.2e}")
            return
        try:
            self.ties += oracle.text_ties(item, item.adapter, answer, served.text)
        except Mismatch as why:
            difference = f"{served.text!r} instead of {answer.text!r}"
            self.wrong.append(f"{item.id}: {difference} ({why})")


def _worst_score(served: Served, expected: Sequence[float], labels: Sequence[str]) -> float:
    """Return the largest difference between the server's scores and the oracle's."""
    if served.scores is None or list(served.scores) != list(labels):
        return math.inf
    return max(abs(a - b) for a, b in zip(served.scores.values(), expected, strict=True))


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


def compare(url: str, per_domain: int, checkpoint: Path, adapters: Path) -> list[Comparison]:
    """Return a comparison of server and oracle for each domain, on `per_domain` items in mixed
    order.
    """
    asked = [item for domain in DOMAINS for item in items(domain, per_domain)]
    random.Random(0).shuffle(asked)
    served = ask_all(url, asked)
    oracle = Oracle(checkpoint, adapters)
    found = {domain: Comparison(domain) for domain in DOMAINS}
    pairs = list(zip(asked, served, strict=True))
    for item, answer in track(pairs, "oracle", transient=True):
        found[item.domain].add(item, answer, oracle)
    return list(found.values())


@contextmanager
def server_at(url: str | None, dtype: str) -> Iterator[str]:
    """Yield the given address, or the address of a server that runs while the context is open."""
    if url is not None:
        yield url
        return
    with TritonServer(ServerOptions(model_json={"dtype": dtype})) as server:
        yield server.grpc_url


def _accuracy(entry: Mapping[str, Any]) -> float:
    """Return the accuracy of a domain with its adapter, or with the base if it has no adapter."""
    return float(entry["base"] if entry["adapter"] is None else entry["adapter"])


def _compare_with_card(url: str, card: Mapping[str, Any]) -> None:
    """Ask the server the questions with which the model card was measured.

    Exit with 1 if the accuracy of a domain differs from the card's by more than half a point.
    """
    table, far = Table("domain", "items", "server", "card"), []
    asked = [item for domain in DOMAINS for item in items(domain, card[domain]["n"])]
    answers = iter(ask_all(url, asked))
    for domain in DOMAINS:
        count = card[domain]["n"]
        right = sum(is_right(item, next(answers).text) for item in items(domain, count))
        off = right / count - _accuracy(card[domain])
        table.add_row(domain, str(count), f"{right / count:.3f}", f"{_accuracy(card[domain]):.3f}")
        if abs(off) > HALF_A_POINT + 1e-9:
            far.append(f"{domain} ({off:+.3f})")
    Console().print(table)
    Console().print(f"more than half a point from fp32: {', '.join(far) or 'no domain'}")
    if far:
        raise typer.Exit(1)


def main(
    url: Annotated[
        str | None, typer.Option(help="gRPC address of a server. Default: start one.")
    ] = None,
    per_domain: Annotated[
        int, typer.Option("--items", help="Held-out items per domain, in float32.")
    ] = 200,
    checkpoint: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Checkpoint for the oracle.")
    ] = CHECKPOINT,
    adapters: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of the adapters.")
    ] = ADAPTERS,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Server's type: float32 or bfloat16.")
    ] = "float32",
) -> None:
    """Compare a server's answers to the held-out set with transformers + PEFT and the model
    card."""
    card: dict[str, Any] = json.loads((checkpoint / "accuracy.json").read_text())
    if dtype != "float32":
        with server_at(url, dtype) as address:
            _compare_with_card(address, card)
        return
    with server_at(url, dtype) as address:
        found = compare(address, per_domain, checkpoint, adapters)
    table = Table("domain", "items", "server", "oracle", "card", "ties", "different")
    for one in found:
        entry = card[one.domain]
        table.add_row(
            one.domain,
            str(one.items),
            f"{one.served_right / one.items:.3f}",
            f"{one.oracle_right / one.items:.3f}",
            f"{_accuracy(entry):.3f} (n={entry['n']})",
            str(one.ties),
            str(len(one.wrong)),
        )
    console = Console()
    console.print(table)
    wrong = [line for one in found for line in one.wrong]
    for line in wrong:
        console.print(line, style="red", markup=False)
    if wrong:
        raise typer.Exit(1)
    console.print(f"all {sum(one.items for one in found)} answers agree with the oracle's")


if __name__ == "__main__":
    run_command(main)
