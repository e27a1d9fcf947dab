"""Commands for who deploys: `vlora probe`, `vlora repository`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlora.errors import InvalidArgument


def probe_command(
    address: Annotated[str, typer.Argument(help="host:port of the server's gRPC.")] = (
        "localhost:8001"
    ),
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds within which it has to answer.")
    ] = 5.0,
    alive: Annotated[
        bool,
        typer.Option("--alive", help="Status 0 also where it starts, drains or its queue is full."),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Of the server's metrics: tells a long queue from a hung server."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing; only the status.")] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM of the authority, for a server with TLS.")
    ] = None,
    tls_name: Annotated[
        str | None, typer.Option(help="Name in its certificate, where it is not the host asked.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Our key, for mutual TLS.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="Our certificate.")] = None,
) -> None:
    """Ask a server for one token through every model; tells a dead model from a live one.

    Status 0: it answers. 3: it lives but takes no questions now (starting, draining, queue full;
    with --metrics-port also a queue longer than the deadline). 1: nobody listens, a model's process
    is gone, or no answer came within the deadline. That it starts is known on its own machine only.
    """
    from vlora.launcher.probe import Health, Tls, probe

    tls = None if tls_ca is None else Tls(tls_ca, tls_name, tls_key, tls_certificate)
    try:
        finding = probe(address, deadline, tls, metrics_port)
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if not quiet:
        word = finding.health.name.lower()
        typer.echo(f"{word} in {finding.seconds:.2f} s: {finding.reason}")
    well = (Health.READY, Health.ALIVE) if alive else (Health.READY,)
    raise typer.Exit(0 if finding.health in well else int(finding.health))


def repository_command(
    folder: Annotated[Path, typer.Argument(help="Where to write it: a new or an empty folder.")],
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint for its model.json, as the server sees it.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="Folder of adapters, as the server sees it.")
    ] = None,
) -> None:
    """Write a model repository of your own, to mount and change."""
    from vlora.launcher.repository import write_repository

    try:
        written = write_repository(folder, model, adapters)
    except (InvalidArgument, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{written}/lmm/1/model.json has the options; serve it with:")
    typer.echo(f"  vlora serve --repository {written}")
    typer.echo(f"  tritonserver --model-repository={written} --disable-auto-complete-config")
