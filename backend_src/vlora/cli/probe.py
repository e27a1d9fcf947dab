"""`vlora probe`: check whether a server answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlora.cli.common import Command

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def probe(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="host:port of the server's gRPC endpoint.")
    ] = ("localhost:8001"),
    deadline: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.1, help="Seconds within which the server must answer."
        ),
    ] = 5.0,
    alive: Annotated[
        bool,
        typer.Option(
            "--alive", help="Also exit with 0 while the server starts, drains or has a full queue."
        ),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Port of the server's metrics, to tell a busy server from a hung one.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print nothing; only set the exit status.")
    ] = False,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Use TLS, with the certificate authority in this PEM file."
        ),
    ] = None,
    tls_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name in the server's certificate. Default: the host."),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM file of the client's key, for mutual TLS."),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM file of the client's certificate, for mutual TLS."),
    ] = None,
) -> None:
    """Check a server by asking for one token, which passes through every model.

    Exit status:
    0  The server answers.
    1  There is no server, a model's process has ended, or no answer came
       within the deadline.
    2  The address is not HOST:PORT, or a TLS file cannot be read.
    3  The server runs but accepts no requests now: it is starting or
       draining, or its queue is full. With --metrics-port, also if no
       answer came within the deadline but the metrics show progress.

    A server that is starting is recognized only if the probe runs on the
    server's machine.
    """
    from vlora.launcher.probe import Health, Tls
    from vlora.launcher.probe import probe as probe_server
    from vlora.net import GRPC_ADDRESS, MAX_PORT

    parts = GRPC_ADDRESS.fullmatch(address)
    if parts is None or int(parts[1]) > MAX_PORT:
        typer.echo(f"error: give the address as HOST:PORT, not '{address}'", err=True)
        raise typer.Exit(2)
    tls = None if tls_ca is None else Tls(tls_ca, tls_name, tls_key, tls_certificate)
    try:
        finding = probe_server(address, deadline, tls, metrics_port)
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if not quiet:
        health = finding.health.name.lower()
        typer.echo(f"{health} in {finding.seconds:.2f} s: {finding.reason}")
    healthy = (Health.READY, Health.ALIVE) if alive else (Health.READY,)
    raise typer.Exit(0 if finding.health in healthy else int(finding.health))
