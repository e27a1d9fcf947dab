"""`vlora gateway`: the OpenAI API in front of a server, in the foreground."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from vlora.cli.common import Command, report_errors
from vlora.errors import ServerError
from vlora.gateway.options import MIB, GatewayOptions

app = typer.Typer(add_completion=False)

DEFAULTS = GatewayOptions()

PACKAGES = ("fastapi", "grpc", "httpcore2", "httptools", "prometheus_client", "uvicorn")
"""Packages that the extra `gateway` installs, by the names of their imports."""


def check_installed() -> None:
    """Raise ServerError if a package of the extra `gateway` is missing."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ServerError(
                f"the package {name} is missing; install it with: pip install 'vlora[gateway]'"
            )


@app.command(cls=Command)
def gateway(
    grpc: Annotated[
        str,
        typer.Option(
            "--grpc", metavar="HOST:PORT", help="host:port of the V-LoRA server's gRPC endpoint."
        ),
    ] = DEFAULTS.grpc,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="IP address to listen on. Any address but loopback needs --keys.",
        ),
    ] = DEFAULTS.host,
    port: Annotated[
        int, typer.Option(metavar="PORT", help="Port; 0 chooses a free one.")
    ] = DEFAULTS.port,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of API keys, one line TENANT KEY per key."),
    ] = None,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", min=1, help="Requests per minute and tenant. Default: no limit."
        ),
    ] = None,
    base_name: Annotated[
        str, typer.Option(metavar="NAME", help="Name under which the base model is served.")
    ] = DEFAULTS.base_name,
    image_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="HOST or HOST:PORT from which images may be fetched; repeatable. Default: none.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin of web pages that may use the gateway; repeatable. Default: none.",
        ),
    ] = None,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of the server's metrics, which /metrics then includes."
        ),
    ] = None,
    max_body: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Maximum size of a request's body in MiB.")
    ] = DEFAULTS.max_body_bytes // MIB,
    max_fetch: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Maximum size of a fetched image in MiB.")
    ] = DEFAULTS.max_fetch_bytes // MIB,
    fetch_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.1, help="Seconds within which an image must be fetched."
        ),
    ] = DEFAULTS.fetch_seconds,
    answer_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1, help="Seconds to wait for each response of the server."
        ),
    ] = DEFAULTS.answer_seconds,
    grace: Annotated[
        int,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Seconds that running requests get to finish on shutdown.",
        ),
    ] = int(DEFAULTS.grace_seconds),
) -> None:
    """Serve the OpenAI API in front of a V-LoRA server until Ctrl-C."""
    with report_errors():
        check_installed()
        from vlora.gateway.server import serve

        serve(
            GatewayOptions(
                host=host,
                port=port,
                grpc=grpc,
                base_name=base_name,
                keys=keys,
                requests_per_minute=requests_per_minute,
                image_hosts=tuple(image_host or ()),
                cors_origins=tuple(cors_origin or ()),
                metrics_url=metrics_url,
                max_body_bytes=max_body * MIB,
                max_fetch_bytes=max_fetch * MIB,
                fetch_seconds=fetch_timeout,
                answer_seconds=answer_timeout,
                grace_seconds=grace,
            )
        )
