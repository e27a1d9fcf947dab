"""`vlora envoy`: write the files of an Envoy in front of servers on several hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from vlora.cli.common import Command, option, report_errors
from vlora.errors import ServerError
from vlora.net import LOOPBACK

app = typer.Typer(add_completion=False)

ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\s]+)(?::(\d+):(\d+))?")
DEFAULT_PORTS = ("8000", "8001")

Folder = Annotated[Path, typer.Argument(help="Folder for the files.")]
Servers = Annotated[
    list[str],
    option(
        "HOST[:HTTP:GRPC]",
        "Server behind Envoy, with its ports if they are not 8000 and 8001; repeatable.",
        "--server",
    ),
]
Host = Annotated[str, option("ADDRESS", "IP address that Envoy listens on.")]
Port = Annotated[int, option("PORT", "Envoy's port, for gRPC and HTTP.")]


@app.command(cls=Command)
def envoy(folder: Folder, server: Servers, host: Host = LOOPBACK, port: Port = 9001) -> None:
    """Write the files of an Envoy in front of several servers. A running Envoy notices new ones."""
    from vlora.launcher.envoy import Server, find_program, write_configuration, write_servers

    with report_errors():
        servers = []
        for text in server:
            match = ADDRESS.fullmatch(text)
            if match is None:
                raise ServerError(f"--server takes HOST or HOST:HTTP:GRPC, not '{text}'")
            http, grpc = (int(match[n] or DEFAULT_PORTS[n - 2]) for n in (2, 3))
            servers.append(Server(match[1].strip("[]"), http, grpc))
        folder.mkdir(parents=True, exist_ok=True)
        path = write_configuration(folder.absolute(), host, [port], health_checks=True)
        write_servers(folder, servers)
        typer.echo(f"Envoy sends requests to {len(servers)} servers. To start it, run:")
        typer.echo(f"  {find_program() or 'envoy'} -c {path} --disable-hot-restart")
