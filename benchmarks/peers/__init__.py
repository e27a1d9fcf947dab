"""The peers benchmark: the same requests in our engine and in what a user would pick instead.

Each system runs in a process of its own, and all get the same checkpoint, adapters and prompts of
256 tokens, for 32 greedy tokens. The grid has each system's settings. For each number of requests,
each setting runs once, and the fastest is used in all cells of that number, after its tokens were
checked against those of its own dequantized weights. A system whose batches have one adapter serves
adapters in turns.

A later run with the same `--json FILE` measures the missing cells and systems. Packages of the
peers are installed on first use, or by `--setup` alone.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, ClassVar

import typer

from benchmarks import frame
from benchmarks.frame import Row, ThreadedBenchmark, matching
from benchmarks.loads import OUTPUT, Load
from benchmarks.peers import environments
from benchmarks.peers.checkpoints import llama_folder
from benchmarks.peers.process import Answer, Cannot, PeerProcess, Prompt, Setup
from vlora.atmm.search.timing import rotated

OURS = "ours"
SEARCHED_ADAPTERS = 4
"""Number of adapters of the requests with which settings are compared."""
LARGEST_GAP = 0.5
"""Largest accepted distance of a token's logit from the best, in standard deviations of all."""


@dataclass(kw_only=True)
class Peers(ThreadedBenchmark):
    """Average token latency and wall time. A cell is a number of requests and one of adapters.

    With fewer requests than adapters, only as many adapters are used, and cells that would be equal
    are measured once.
    """

    name = "peers"
    title = "average token latency of our fastest type, divided by that of a peer"
    bars: ClassVar = {
        f"over_{peer}_{requests}_{adapters}": bar
        for requests, adapters in ((1, 0), (1, 1), (4, 0), (4, 4), (16, 0), (16, 4), (16, 16))
        for peer, bar in (("best", "≤ 0.9"), ("OpenVINO int8", "≤ 0.8"))
        if peer == "best" or requests > 1
    }
    shown: ClassVar = {
        "tokens per system": "requests adapters system token_latency_ms wall_s first_token_s noise"
        " argmax largest_gap over setting",
        "not measured": "requests adapters system cannot",
    }
    conditions = ("cpu", "commit", "threads")

    peer: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Comma-separated peers; default: all of the grid."),
    ] = ""
    requests: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Numbers of requests; default: the grid's.")
    ] = ""
    setup: Annotated[
        bool, typer.Option("--setup", help="Install the peers' packages and measure nothing.")
    ] = False

    def prepare(self) -> None:
        super().prepare()
        systems = self.values["systems"]
        peers = self.peer.split(",") if self.peer else list(systems)
        if unknown := set(peers) - set(systems):
            raise typer.BadParameter(
                f"--peer {', '.join(unknown)}: valid systems are {', '.join(systems)}"
            )
        self._systems = [n for n in systems if n.startswith(OURS) or n in peers]
        self._checkpoint = self.generated()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._environments = cache / "vlora" / "peers"
        self._best: dict[tuple[str, int], Any] = {}
        self._processes: dict[str, PeerProcess] = {}
        self.stack.callback(self._close_processes)
        self._seed = 0

    def cells(self) -> Sequence[tuple[int, int]]:
        for module in {self.values["systems"][name][0] for name in self._systems}:
            self.status(f"environment of {module}")
            environments.python_of(module, self._environments)
        if self.setup:
            return []
        numbers = frame.parse_thread_counts(self.requests) if self.requests else None
        chosen = itertools.product(numbers or self.values["requests"], self.values["adapters"])
        return list(dict.fromkeys((r, min(r, adapters)) for r, adapters in chosen))

    def measure(self, cell: tuple[int, int]) -> Iterator[Row]:
        requests, adapters = cell
        where = {"requests": requests, "adapters": adapters}
        known = {row["system"] for row in matching(self.rows, **where)}
        ours = [name for name in self._systems if name.startswith(OURS)]
        missing = [name for name in self._systems if name not in (*known, *ours)]
        if known and not missing:
            return
        refused: dict[str, str] = {}
        for name in (*ours, *missing):
            try:
                self._start(name, requests)
            except Cannot as reason:
                refused[name] = str(reason)
        ready = [name for name in (*ours, *missing) if name not in refused]
        samples: dict[str, list[list[Answer]]] = {name: [] for name in ready}
        for repeat in range(self.values["repeats"]):
            prompts = self._prompts(requests, adapters)
            for name in rotated(ready, repeat):
                self.status(f"{requests} requests, {adapters} adapters, {name}")
                try:
                    samples[name].append(self._processes[name].run(prompts))
                except Cannot as reason:
                    refused[name] = str(reason)
        rows: dict[str, Row] = {
            name: {"cannot": refused[name]}
            if name in refused
            else figures(samples[name]) | self._best[name, requests]
            for name in (*ours, *missing)
        }
        fastest = min(rows[name].get("token_latency_ms", math.inf) for name in ours)
        for name, row in rows.items():
            over = None if name in refused else fastest / row["token_latency_ms"]
            yield where | {"system": name} | row | {"over": over}

    def _prompts(self, requests: int, adapters: int) -> list[Prompt]:
        from transformers import AutoTokenizer

        self._seed += 1
        ids = AutoTokenizer.from_pretrained(self._checkpoint.folder)
        drawn = Load("text", adapters, requests).draw(self._checkpoint, self._seed)
        return [Prompt(one.prompt, ids(one.prompt)["input_ids"], one.adapter) for one in drawn]

    def _start(self, name: str, requests: int) -> None:
        """Let the process of the system's fastest setting for a number of requests run.

        Raises Cannot if no setting runs, or if its tokens are not those of its weights.
        """
        if (name, requests) in self._best and name in self._processes:
            return
        if old := self._processes.pop(name, None):
            old.close()
        module, settings = self.values["systems"][name]
        latencies: dict[int, float] = {}
        reasons: list[Cannot] = []
        for number, options in enumerate(settings if self.values["searched"] else settings[:1]):
            self.status(f"{requests} requests, {name}: {options}")
            try:
                process, latency = self._tried(module, options, requests)
            except Cannot as reason:
                reasons.append(reason)
                continue
            slower: PeerProcess | None = process
            if latency < min(latencies.values(), default=math.inf):
                slower, best = self._processes.get(name), options
                self._processes[name] = process
            if slower is not None:
                slower.close()
            latencies[number] = latency
        if not latencies:
            raise reasons[0]
        found = {"setting": best, "searched_ms": latencies, "refused": list(map(str, reasons))}
        self._best[name, requests] = found | self._check(name)

    def _tried(
        self, module: str, options: dict[str, Any], requests: int
    ) -> tuple[PeerProcess, float]:
        """Return a process with a setting, and its average token latency. Raises Cannot."""
        process = self._process(module, options)
        try:
            process.run(self._prompts(1, 1))
            answers = process.run(self._prompts(requests, min(requests, SEARCHED_ADAPTERS)))
            return process, figures([answers])["token_latency_ms"]
        except Cannot:
            process.close()
            raise

    def _close_processes(self) -> None:
        for process in self._processes.values():
            process.close()

    def _process(self, module: str, options: dict[str, Any]) -> PeerProcess:
        python = environments.python_of(module, self._environments)
        folder, llama = self._checkpoint.folder, llama_folder(self._checkpoint)
        names = self._checkpoint.adapter_names
        setup = Setup(module, str(folder), str(llama), names, self.threads, options)
        return PeerProcess(python, setup)

    def _check(self, name: str) -> Row:
        """Compare some tokens with the system's dequantized weights. Raises Cannot if they differ
        by more than rounding."""
        from benchmarks.peers.reference import Reference

        count = self.values["checked"]
        self.status(f"checking {name}")
        prompts = self._prompts(count, count - 1)
        # One of them asks for the base model.
        prompts[-1] = Prompt(prompts[-1].text, prompts[-1].tokens, None)
        answers = self._processes[name].run(prompts)
        names = self._checkpoint.adapter_names[:count]
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "weights.safetensors"
            quantized = self._processes[name].save_weights(file)
            llama = llama_folder(self._checkpoint)
            reference = Reference(llama, file if quantized else None, names)
            argmax, gap = reference.check(prompts, answers)
        if gap > LARGEST_GAP:
            raise Cannot(
                f"{1 - argmax:.0%} of its tokens are not those of its own weights; the logit of one"
                f" is {gap:.2f} standard deviations below the best, at most {LARGEST_GAP} are valid"
            )
        return {"argmax": argmax, "largest_gap": gap}

    def summarize(self) -> dict[str, Any]:
        return summarize(self.rows)


def figures(runs: Sequence[Sequence[Answer]]) -> Row:
    """Return the medians of the figures of several runs of a load, and their noise.

    Raises Cannot if an answer has another number of tokens.
    """
    for answer in itertools.chain(*runs):
        if len(answer.tokens) != OUTPUT:
            raise Cannot(f"an answer has {len(answer.tokens)} tokens instead of {OUTPUT}")
    latencies = [1e3 * fmean(a.end for a in answers) / OUTPUT for answers in runs]
    return {
        "token_latency_ms": median(latencies),
        "wall_s": median(max(a.end for a in answers) for answers in runs),
        "first_token_s": median(fmean(a.first for a in answers) for answers in runs),
        "noise": (max(latencies) - min(latencies)) / median(latencies),
        "latencies_ms": latencies,
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return our fastest type's latency divided by that of each peer, and of the best, by cell.

    The best is that of those measured. `refused_…` is the number of peers that were not.
    """
    summary: dict[str, Any] = {}
    for row in rows:
        if row["system"].startswith(OURS):
            continue
        cell = f"{row['requests']}_{row['adapters']}"
        if row["over"] is None:
            summary[f"refused_{cell}"] = summary.get(f"refused_{cell}", 0) + 1
            continue
        summary[f"over_{row['system']}_{cell}"] = row["over"]
        best = f"over_best_{cell}"
        summary[best] = max(summary.get(best, 0.0), row["over"])
    return summary
