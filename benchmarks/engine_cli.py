"""`vlora bench engine`: the command; torch is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.options import JsonOption, QuickOption, TypesOption, console, types


def engine(
    dtypes: TypesOption = "bf16",
    peers: Annotated[bool, typer.Option("--peers", help="PEFT's mixed batches as well.")] = False,
    served: Annotated[bool, typer.Option(help="Over gRPC as well, from a real server.")] = True,
    engine_threads: Annotated[int | None, typer.Option(help="Default: auto.")] = None,
    encoder_threads: Annotated[int | None, typer.Option(help="Default: auto.")] = None,
    model: Annotated[str, typer.Option(help="whole or grouped.")] = "whole",
    quick: QuickOption = False,
    json: JsonOption = None,
    grid: Annotated[Path | None, typer.Option(help="Another grid file.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where made checkpoints are kept.")] = None,
) -> None:
    """Sixteen requests at once (four if quick): in process, over gRPC, beside PEFT's batches."""
    import torch

    from benchmarks import llava, report
    from benchmarks import machine as atmm
    from benchmarks.engine import measurement as bench
    from benchmarks.engine.peft_mixed import PeftMixed
    from benchmarks.engine_report import engine_table
    from benchmarks.kernels.cells import GRIDS
    from vlora.config import Options
    from vlora.cores import split_threads

    given = {"engine_threads": engine_threads, "encoder_threads": encoder_threads}
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    split = split_threads(Options(**options))
    atmm.set_threads(split.engine)
    path = grid or GRIDS / "engine.json"
    loads, repeats = bench.load_grid(path, quick=quick)
    described = report.meta("bench engine", quick) | {"grid": path.name, "model": model}
    described |= atmm.describe() | {"threads": split._asdict()}
    checkpoint = llava.make(llava.MODELS[model], root)
    limits = atmm.LimitsByThreads()
    results: list[bench.Result] = []
    shown = console()
    with Progress(console=shown, transient=True) as progress:
        task = progress.add_task("", total=len(loads) * len(types(dtypes)))

        def told(what: str) -> None:
            progress.update(task, description=what)

        for dtype in types(dtypes):
            for result in bench.run(
                loads,
                repeats,
                checkpoint,
                dtype,
                limits(split.engine),
                served=served,
                options=options,
                told=told,
            ):
                results.append(result)
                progress.update(task, advance=1)
        if peers:
            told("loading PEFT")
            best = torch.bfloat16 if atmm.bf16_instructions() else torch.float32
            described |= {"peers": {"peft_mixed": str(best)}}
            bench.run_peers(results, checkpoint, PeftMixed(checkpoint, best), told)
    summary = bench.summarize(results)
    shown.print(engine_table(results))
    shown.print(report.summary_table(summary, "average token latency over its floor, and beside"))
    if json is not None:
        report.write_json(json, described, [result.as_row() for result in results], summary)
        shown.print(f"written: {json}", soft_wrap=True)
