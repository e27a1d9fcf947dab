"""The engine benchmark: concurrent requests in process, over gRPC and on PEFT."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import RenderableType

from benchmarks.benchmark import (
    GRIDS,
    Bar,
    Benchmark,
    DeviceOption,
    GridOption,
    QuickOption,
    RootOption,
    Row,
    TypesOption,
    at_most,
    parse_types,
)

if TYPE_CHECKING:
    from benchmarks.engine.load import Load, LoadTimes
    from benchmarks.engine.measurement import EnginePair, EngineResult

Job = tuple["Load", str] | None
"""A load and its storage type, or None for the run of all loads on PEFT."""


class EngineBenchmark(Benchmark[Job]):
    """Token latency of concurrent requests, compared with the roofline, gRPC and PEFT."""

    name = "engine"
    bars: ClassVar[Mapping[str, Bar]] = {
        **{
            f"{kind}_{adapters}": at_most(1.45)
            for kind in ("text", "image")
            for adapters in (0, 1, 4, 16)
        },
        "served_over_engine": at_most(1.1),
        "vs_peft_mixed": at_most(0.35),
    }

    def __init__(
        self,
        *,
        dtypes: TypesOption = "bf16",
        peers: Annotated[
            bool, typer.Option("--peers", help="Measure PEFT's mixed batches as well.")
        ] = False,
        served: Annotated[
            bool, typer.Option(help="Measure a real server over gRPC as well.")
        ] = True,
        engine_threads: Annotated[
            int | None, typer.Option(help="Threads of the engine; default: auto.")
        ] = None,
        encoder_threads: Annotated[
            int | None, typer.Option(help="Threads of the vision encoder; default: auto.")
        ] = None,
        model: Annotated[
            str,
            typer.Option(
                metavar="MODEL", help="whole (as many KV heads as query heads) or grouped (fewer)."
            ),
        ] = "whole",
        device: DeviceOption = "cpu",
        quick: QuickOption = False,
        grid: GridOption = None,
        root: RootOption = None,
    ) -> None:
        super().__init__(quick=quick, grid=grid or GRIDS / "engine.json")
        from benchmarks import llava, machine
        from benchmarks.engine.measurement import load_grid
        from vlora.config import Options
        from vlora.cores import split_threads

        threads = {"engine_threads": engine_threads, "encoder_threads": encoder_threads}
        self._options: dict[str, Any] = {"device": device} | {
            key: value for key, value in threads.items() if value is not None
        }
        self._split = split_threads(Options(**self._options))
        machine.set_threads(self._split.engine)
        self._model = model
        self._loads, self._repeats = load_grid(self.grid_path, quick=quick)
        self._dtypes = parse_types(dtypes)
        self._peers, self._served = peers, served
        self._checkpoint = llava.make(llava.MODELS[model], root)
        self._roofline = machine.RooflineByThreads(device)(self._split.engine)
        self._engines: EnginePair | None = None
        self._results: list[EngineResult] = []

    def settings(self) -> dict[str, Any]:
        settings = {"model": self._model, "threads": self._split._asdict()}
        settings["device"] = self._options["device"]
        if self._peers:
            settings["peers"] = {"peft_mixed": str(self._peer_dtype())}
        return settings

    def cells(self) -> Sequence[Job]:
        loads = [(load, dtype) for dtype in self._dtypes for load in self._loads]
        return [*loads, None] if self._peers else loads

    def run(self, cell: Job) -> Iterator[Row]:
        if cell is None:
            # The engines end before PEFT starts, because both would compete for the caches.
            self.close()
            self._run_peers()
            self.rows[:] = [result.as_row() for result in self._results]
            return
        load, dtype = cell
        if self._engines is None or self._engines.dtype != dtype:
            self.close()
            self._engines = self._start(dtype)
        self._results.append(self._engines.run(load, self._repeats))
        yield self._results[-1].as_row()

    def _start(self, dtype: str) -> EnginePair:
        from benchmarks.engine.measurement import EnginePair

        return EnginePair(
            self._checkpoint,
            dtype,
            self._roofline,
            self._options,
            streams=max(load.requests for load in self._loads),
            served=self._served,
            status=self.status,
        )

    def _run_peers(self) -> None:
        """Run each load once on PEFT."""
        from benchmarks.engine.peft_mixed import PeftMixed

        self.status("loading PEFT")
        peer = PeftMixed(self._checkpoint, self._peer_dtype())
        for seed, result in enumerate(self._results, start=1):
            self.status(f"{result.load.name}, PEFT")
            result.peers.append(peer.run(result.load.draw(self._checkpoint, seed)))

    def _peer_dtype(self) -> Any:
        """Return the torch.dtype in which torch is fastest on this CPU."""
        import torch

        from benchmarks.machine import has_bf16_instructions

        return torch.bfloat16 if has_bf16_instructions() else torch.float32

    def summarize(self) -> dict[str, Any]:
        from benchmarks.engine.measurement import summarize

        return summarize(self._results)

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.engine.load import OUTPUT
        from benchmarks.report import figure_table

        columns = ("load", "type", "run", "token latency ms", "first token s", "wall s")
        requests = max(result.load.requests for result in self._results)
        table = figure_table(
            (*columns, "over the floor"),
            f"{requests} concurrent requests, {OUTPUT} tokens each",
            labels=3,
        )

        def add(result: EngineResult, run: str, times: LoadTimes, over: str) -> None:
            row = times.as_row()
            table.add_row(
                result.load.name,
                result.dtype,
                run,
                f"{row['token_latency_ms']:.1f}",
                f"{row['first_token_s']:.2f}",
                f"{row['wall_s']:.2f}",
                over,
            )

        for result in self._results:
            for times, floor, combined in result.in_process:
                over = times.token_latency / floor.token_latency
                add(result, "in process", times, f"{over:.2f}")
                add(result, f"its floor (all work at once: {combined:.2f} s)", floor, "1")
            for times in result.served:
                add(result, "over gRPC", times, "")
            for times in result.peers:
                add(result, "PEFT, mixed batch", times, "")
        return [table]

    def summary_title(self) -> str:
        return "average token latency relative to the floor, to the engine in process, to PEFT"

    def close(self) -> None:
        if self._engines is not None:
            self._engines.close()
            self._engines = None
