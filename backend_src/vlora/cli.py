"""The command line: `vlora serve`, `vlora adapters`, `vlora bench`, `vlora tile-search`."""

from __future__ import annotations

import logging
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import vlora
from vlora import paths
from vlora.config import (
    ADAPTERS_VARIABLE,
    MODEL_VARIABLE,
    Options,
    load_adapter_names,
    load_options,
    read_keys,
)
from vlora.errors import MAX_NAMES, VLoraError
from vlora.launcher.assembly import ServerError
from vlora.launcher.cli import probe_command, repository_command
from vlora.launcher.server import (
    GRACE_SECONDS,
    ServerOptions,
    TritonServer,
    default_repository,
)
from vlora.launcher.supervisor import RestartPolicy, Supervisor

if TYPE_CHECKING:
    from vlora.lora.adapter import AdapterInfo
    from vlora.lora.store import AdapterStore

app = typer.Typer(
    help="One large multimodal model, many LoRA adapters, served by Triton.",
    no_args_is_help=True,
    add_completion=False,
)
adapters_app = typer.Typer(help="Look at the adapters that a server would load.")
app.add_typer(adapters_app, name="adapters")
app.command("probe")(probe_command)
app.command("repository")(repository_command)
console = Console(highlight=False)
problems = Console(stderr=True, highlight=False)

ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Checkpoint folder; default: that of model.json.")
]
AdaptersOption = Annotated[
    Path | None, typer.Option("--adapters", help="Folder of adapters; default: that of model.json.")
]


@app.callback()
def _root() -> None:
    """One large multimodal model, many LoRA adapters, served by Triton."""


@app.command()
def serve(
    model: ModelOption = None,
    adapters: AdaptersOption = None,
    repository: Annotated[
        Path | None, typer.Option(help="Model repository; default: the one that vlora brings.")
    ] = None,
    http_port: Annotated[int, typer.Option(help="HTTP; 0 takes a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC; 0 takes a free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Prometheus; 0 takes a free one.")] = 8002,
    log: Annotated[
        Path | None, typer.Option(help="Where the server's log goes; - is standard output.")
    ] = None,
    grace: Annotated[
        int, typer.Option(min=0, help="Seconds that running requests get when it stops.")
    ] = int(GRACE_SECONDS),
    restart: Annotated[
        bool, typer.Option("--restart", help="Start again a server that went down.")
    ] = False,
    options_file: Annotated[
        Path | None,
        typer.Option("--options", help="JSON file of keys that replace those of model.json."),
    ] = None,
    triton: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments of tritonserver itself.")
    ] = None,
) -> None:
    """Serve in the foreground until Ctrl-C; without options, the demo model."""
    with _failures_told():
        served = repository or default_repository()
        replacing = {} if options_file is None else read_keys(options_file)
        options = _check(model, adapters, served, replacing)
        server_options = ServerOptions(
            repository=served,
            model_json=replacing,
            triton_arguments=tuple(triton or ()),
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            model=options.model,
            adapters=options.adapters,
            log=log or Path(tempfile.gettempdir()) / f"vlora-{http_port}.log",
            grace_seconds=grace,
        )
        policy = RestartPolicy() if restart else None
        Supervisor(server_options, _say, policy).run(partial(_announce, options))


@app.command()
def capacity(
    model: ModelOption = None,
    adapters: AdaptersOption = None,
    memory: Annotated[float, typer.Option(min=0.0, help="GiB for all of it.")] = 8.0,
) -> None:
    """What fits into so much memory: weights, adapters, sequences, and what a rank costs.

    Status 1 where the weights alone do not fit.
    """
    from vlora.capacity_cli import show

    with _failures_told():
        names = load_adapter_names(default_repository() / "lmm" / "1" / "multi_lora.json")
        if not show(console, _check(model, adapters), names, memory):
            raise typer.Exit(1)


@adapters_app.command("list")
def list_adapters(model: ModelOption = None, adapters: AdaptersOption = None) -> None:
    """Show every adapter: ranks, targets, tasks, head and digest."""
    with _failures_told():
        store = _store(model, adapters)
    console.print(_table_of([store.info(name) for name in store.names()]))
    for name in store.broken:
        told = f"{name} does not load; see `vlora adapters check`"
        console.print(told, soft_wrap=True, markup=False)


@adapters_app.command("check")
def check_adapters(model: ModelOption = None, adapters: AdaptersOption = None) -> None:
    """Load every adapter; say which fail and why. Status 1 if any does."""
    with _failures_told():
        store = _store(model, adapters)
    for name in store.names():
        console.print(f"[green]ok[/]      {escape(name)}")
    for error in store.broken.values():
        console.print(f"[red]broken[/]  {escape(str(error))}", soft_wrap=True)
    if store.broken:
        raise typer.Exit(1)


def _table_of(adapters: Iterable[AdapterInfo]) -> Table:
    """One row an adapter, to be read at 80 columns: targets go without their `_proj`."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in ("adapter", "ranks", "targets", "tasks", "labels", "digest"):
        table.add_column(head, no_wrap=head not in ("targets", "tasks"))
    for info in adapters:
        table.add_row(
            escape(info.name),
            " ".join(map(str, info.ranks)),
            " ".join(target.removesuffix("_proj") for target in info.targets),
            escape(" ".join(info.tasks)) or "any",
            escape(f"{' '.join(info.head_tasks)}: {len(info.head_labels)}")
            if info.head_labels
            else "-",
            info.digest[:12],
        )
    return table


def _store(model: Path | None, adapters: Path | None) -> AdapterStore:
    """All adapters of the repository with these overrides; importing torch takes a while."""
    from vlora.lora.folders import find_folders
    from vlora.lora.store import AdapterStore
    from vlora.model.decoder_config import load_config
    from vlora.model.loader import adapter_shape

    options = _check(model, adapters)
    logging.getLogger("vlora").addHandler(logging.NullHandler())  # told in the output instead
    config = load_config(options.model)
    store = AdapterStore(adapter_shape(options.model, config), options.limits.max_adapter_bytes)
    names = load_adapter_names(default_repository() / "lmm" / "1" / "multi_lora.json")
    store.load(find_folders(options.adapters, names))
    return store


def _check(
    model: Path | None,
    adapters: Path | None,
    repository: Path | None = None,
    replacing: Mapping[str, Any] | None = None,
) -> Options:
    """The options of the repository with these overrides, their folders known to exist."""
    file = (repository or default_repository()) / "lmm" / "1" / "model.json"
    given = {MODEL_VARIABLE: model, ADAPTERS_VARIABLE: adapters}
    environment = {name: str(path) for name, path in given.items() if path is not None}
    options = load_options(file, environment, replacing)
    if not (options.model / "config.json").is_file():
        raise ServerError(f"no checkpoint at {options.model}; give one with --model DIR")
    if options.adapters is not None and not options.adapters.is_dir():
        raise ServerError(f"no adapters at {options.adapters}; give a folder with --adapters DIR")
    return options


def _announce(options: Options, server: TritonServer, seconds: float) -> None:
    models = ", ".join(sorted(server.index()))
    console.print(f"[bold green]ready[/] in {seconds:.1f} s: {models}", soft_wrap=True)
    console.print(f"model     {options.model}", soft_wrap=True)
    console.print(f"adapters  {options.adapters}", soft_wrap=True)
    if broken := server.broken_adapters():
        told = ", ".join(broken[:MAX_NAMES]) + (", …" if len(broken) > MAX_NAMES else "")
        _say(f"{len(broken)} of them do not load: {told} (why: the log, or `vlora adapters check`)")
    console.print(f"HTTP      {server.http_url}")
    console.print(f"gRPC      {server.grpc_url}")
    console.print(f"metrics   {server.metrics_url}")
    console.print(f"log       {server.log}", soft_wrap=True)
    console.print("try, in another terminal:")
    _say(f"  {_first_question(options, server.http_url)}")
    console.print("Ctrl-C stops it.")


def _first_question(options: Options, url: str) -> str:
    """A command line: about a picture of the demo's where that model is served, else the user's."""
    demo = paths.root() / "tools/demo"
    picture, question = demo / "samples/vqa.png", "What color is the star?"
    served = options.model.resolve() == (demo / "checkpoint").resolve()
    if not (served and picture.is_file()):
        picture, question = Path("picture.png"), "What do you see?"
    request = f"""'{{"text_input": "{question}", "image": "%s"}}'"""
    return (
        f"""printf {request} "$(base64 -w0 {shlex.quote(str(picture))})" |"""
        f" curl -s {url}/v2/models/video_analytics/generate -d @-; echo"
    )


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, markup=False)


@contextmanager
def _failures_told() -> Iterator[None]:
    """What a user can mend is a sentence, not a traceback."""
    try:
        yield
    except (ServerError, VLoraError) as error:
        problems.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


def _add_tile_search() -> None:
    """The search lives beside the package, in the source tree; elsewhere there is no command."""
    source = Path(vlora.__file__).resolve().parents[2]
    if (source / "tools" / "tile_search").is_dir():
        sys.path.append(str(source))
        from tools.tile_search.command import tile_search

        app.command("tile-search")(tile_search)


_add_tile_search()


def main() -> None:
    app()


if __name__ == "__main__":
    main()
