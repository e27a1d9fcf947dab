"""`vlora probe`: check whether a server answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlora.cli.common import Command, error_console, option, print_labelled, print_plain

app = typer.Typer(add_completion=False)


Address = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="host:port of the server's gRPC endpoint.")
]
Deadline = Annotated[
    float, option("SECONDS", "Seconds within which the server must answer.", min=0.1)
]
Alive = Annotated[
    bool,
    option(
        None, "Also exit with 0 while the server starts, drains or has a full queue.", "--alive"
    ),
]
MetricsPort = Annotated[
    int | None,
    option("PORT", "Port of the server's metrics, to tell a busy server from a hung one."),
]
Quiet = Annotated[bool, option(None, "Print nothing; only set the exit status.", "--quiet")]
TlsCa = Annotated[
    Path | None, option("FILE", "Use TLS, with the certificate authority in this PEM file.")
]
TlsName = Annotated[
    str | None, option("NAME", "Name in the server's certificate. Default: the host.")
]
TlsKey = Annotated[Path | None, option("FILE", "PEM file of the client's key, for mutual TLS.")]
TlsCertificate = Annotated[
    Path | None, option("FILE", "PEM file of the client's certificate, for mutual TLS.")
]


@app.command(cls=Command)
def probe(
    address: Address = ("localhost:8001"),
    deadline: Deadline = 5.0,
    alive: Alive = False,
    metrics_port: MetricsPort = None,
    quiet: Quiet = False,
    tls_ca: TlsCa = None,
    tls_name: TlsName = None,
    tls_key: TlsKey = None,
    tls_certificate: TlsCertificate = None,
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
    from vlora.launcher.probe import Health
    from vlora.launcher.probe import probe as probe_server
    from vlora.net import GRPC_ADDRESS, MAX_PORT, Tls

    parts = GRPC_ADDRESS.fullmatch(address)
    if parts is None or int(parts[1]) > MAX_PORT:
        say = f"give the address as HOST:PORT, not '{address}'"
        print_labelled("error:", "bold red", say, to=error_console)
        raise typer.Exit(2)
    tls = None if tls_ca is None else Tls(tls_ca, tls_name, tls_key, tls_certificate)
    try:
        finding = probe_server(address, deadline, tls, metrics_port)
    except OSError as error:
        print_labelled("error:", "bold red", str(error), to=error_console)
        raise typer.Exit(2) from None
    if not quiet:
        print_plain(f"{finding.health.name.lower()} in {finding.seconds:.2f} s: {finding.reason}")
    healthy = (Health.READY, Health.ALIVE) if alive else (Health.READY,)
    raise typer.Exit(0 if finding.health in healthy else int(finding.health))
