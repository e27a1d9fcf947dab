"""`vlora premerge`: merge one adapter into the checkpoint, before it is served."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlora.cli import common
from vlora.cli.common import console, option, print_plain
from vlora.errors import InvalidArgument, known_names, shown

if TYPE_CHECKING:
    from vlora.adapters.files import Adapter, AdapterDescription
    from vlora.adapters.model_shape import ModelShape
    from vlora.offline.premerge import Report

app = typer.Typer(add_completion=False)


Model = Annotated[Path, option("FOLDER", "Folder of the checkpoint.")]
Adapters = Annotated[Path, option("FOLDER", "Folder of the adapters.")]
Out = Annotated[Path, option("FOLDER", "New folder for the results.")]
Hot = Annotated[str | None, option("ADAPTER", "Name of the adapter to merge.")]
Requests = Annotated[
    Path | None,
    option(
        "FILE",
        "Log of requests: JSON lines with the key lora_name, or one adapter name per"
        " line. The adapter whose merge saves the most work is chosen.",
    ),
]
MaxRank = Annotated[int, option("RANK", "Warn about delta adapters of a higher rank.", min=1)]
Float32 = Annotated[
    bool,
    option(
        None,
        "Store fused weights in fp32 instead of rounding them to the"
        " checkpoint's type; OUT/model is then served in fp32.",
        "--float32",
    ),
]
DryRun = Annotated[bool, option(None, "Show the choice and the ranks; write nothing.", "--dry-run")]


@app.command(cls=common.Command)
def premerge(
    model: Model,
    adapters: Adapters,
    out: Out,
    hot: Hot = None,
    requests: Requests = None,
    max_rank: MaxRank = 64,
    float32: Float32 = False,
    dry_run: DryRun = False,
) -> None:
    """Merge one hot adapter into the checkpoint and adapt all others to it.

    Writes OUT/model, a Hugging Face checkpoint with the hot adapter merged into
    its weights, and OUT/adapters, PEFT folders of adapters for that checkpoint.
    Requests for an adapter get the same answers as before, up to rounding: each
    other adapter is stored minus the hot one (a delta adapter), and the hot
    adapter's name becomes an adapter without effect. Requests that name no
    adapter now use the hot one.
    A request that names the new adapter `unmerged` gets the old checkpoint's answer.
    """
    with common.report_errors():
        if (hot is None) == (requests is None):
            raise InvalidArgument("pass either --hot NAME or --requests FILE")
        # Imported here because they import torch.
        from vlora.model.decoder_config import load_config
        from vlora.model.loader import adapter_shape
        from vlora.offline.premerge import premerge as run

        config = load_config(model)
        shape = adapter_shape(model, config)
        folders, files, broken = _check_adapters(adapters, shape)
        name = _choose(requests, files, shape) if requests is not None else str(hot)
        if name in broken:
            raise broken[name]
        if name not in files:
            raise InvalidArgument(
                f"no adapter '{name}' in {adapters}{known_names(name, sorted(files))}"
            )
        for error in broken.values():
            _warn("left out", str(error))
        if dry_run:
            _print_ranks(_planned_ranks(files, name), max_rank)
            return
        readers = {other: partial(_read, folders[other], one) for other, one in files.items()}
        merged = readers.pop(name)()
        with common.progress() as progress:
            report = run(model, config, shape, merged, readers, out, max_rank, float32, progress)
        _print_report(report, out)
        if broken or report.failed:
            raise typer.Exit(1)


def _check_adapters(
    root: Path, shape: ModelShape
) -> tuple[dict[str, Path], dict[str, AdapterDescription], dict[str, InvalidArgument]]:
    """Return (folders under `root`, descriptions of valid adapters, errors), each by name."""
    from vlora.adapters.catalog import find_folders, read_each
    from vlora.adapters.files import describe_adapter

    if not root.is_dir():
        raise InvalidArgument(f"no adapters folder at {root}")
    folders = find_folders(root, {})
    files, broken = read_each(folders, lambda name, folder: describe_adapter(name, folder, shape))
    return folders, files, broken


def _choose(requests: Path, files: Mapping[str, AdapterDescription], shape: ModelShape) -> str:
    """Return the adapter whose merge saves the most work for a log of requests, and print it."""
    from vlora.offline.premerge import BASE_NAME, choose_hot, lora_work, read_request_log

    work = {name: lora_work(one.ranks, shape) for name, one in files.items()}
    counts = read_request_log(requests)
    if not counts:
        raise InvalidArgument(f"{requests} has no requests")
    unknown = [name for name in counts if name not in work and name != BASE_NAME]
    if unknown and not counts.keys() & work.keys():
        raise InvalidArgument(
            f"{requests}: no request names one of the adapters; it has, for example,"
            f" {shown(unknown[0])}{known_names(unknown[0], sorted(work))}"
        )
    choice = choose_hot(counts, work)
    if choice.hot is None:
        raise InvalidArgument(
            f"according to {requests}, no merge would reduce the mean work of a request;"
            " to merge one anyway, name it with --hot"
        )
    print_plain(
        f"{choice.hot}: {counts[choice.hot] / counts.total():.0%} of {counts.total()} requests;"
        f" merging it saves {1 - choice.work_after / choice.work_before:.0%} of the work of LoRA"
    )
    return choice.hot


def _planned_ranks(files: Mapping[str, AdapterDescription], hot: str) -> dict[str, int]:
    """Return the rank of each delta adapter (an adapter minus the hot one), without its weights."""
    from vlora.offline.premerge import BASE_ADAPTER

    merged = files[hot].ranks
    ranks = {BASE_ADAPTER: max(merged.values())}
    for name, one in files.items():
        own = one.ranks
        if name != hot:
            ranks[name] = max(own.get(m, 0) + merged.get(m, 0) for m in own.keys() | merged.keys())
    return ranks


def _print_ranks(ranks: Mapping[str, int], max_rank: int) -> None:
    table = common.make_table(("delta adapter", "rank"), ("rank",))
    for name, rank in ranks.items():
        table.add_row(name, str(rank), style="yellow" if rank > max_rank else "")
    console.print(table)


def _warn(kind: str, text: str) -> None:
    common.print_labelled(f"{kind}:", "yellow", text, to=common.error_console)


def _read(folder: Path, description: AdapterDescription) -> tuple[Path, Adapter]:
    from vlora.adapters.files import read_adapter

    return folder, read_adapter(folder, description)


def _print_report(report: Report, out: Path) -> None:
    _print_ranks(report.deltas, report.max_rank)
    for warning in report.warnings:
        _warn("warning", warning)
    for error in report.failed.values():
        _warn("left out", error)
    print_plain(
        f"merged '{report.hot}' into {report.matrices} matrices; rounding to the stored type is"
        f" {report.rounding:.1e} of the adapter's largest change"
    )
    print_plain(f"serve it with: vlora serve --model {out / 'model'} --adapters {out / 'adapters'}")
