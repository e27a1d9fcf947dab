"""`vlora gateway`: the OpenAI API in front of a server, in the foreground."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from vlora.cli.common import Command, option, report_errors
from vlora.cli.probe import TlsCa, TlsCertificate, TlsKey, TlsName
from vlora.errors import ServerError
from vlora.gateway.options import MIB, GatewayOptions
from vlora.net import Tls

app = typer.Typer(add_completion=False)
DEFAULTS = GatewayOptions()

# Packages that the extra `gateway` installs, by the names of their imports.
PACKAGES = ("fastapi", "grpc", "httpcore2", "httptools", "prometheus_client", "uvicorn")


def check_installed() -> None:
    """Raise ServerError if a package of the extra `gateway` is missing."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ServerError(
                f"the package {name} is missing; install it with: pip install 'vlora[gateway]'"
            )


def tls_options(
    ca: Path | None, name: str | None, key: Path | None, certificate: Path | None
) -> Tls | None:
    tls = None if ca is None else Tls(ca, name, key, certificate)
    if tls is None and (name, key, certificate) != (None, None, None):
        raise ServerError("--tls-name, --tls-key and --tls-certificate need --tls-ca FILE")
    for file in (ca, key, certificate):
        if file is not None and not os.access(file, os.R_OK):
            raise ServerError(f"{file} cannot be read; the options --tls-… name PEM files")
    return tls


Grpc = Annotated[
    str,
    option(
        "HOST:PORT",
        "host:port of the V-LoRA server's gRPC endpoint; with dns:/// before it, all addresses"
        " of the host are used in turn.",
        "--grpc",
    ),
]
Host = Annotated[
    str, option("ADDRESS", "IP address to listen on. Any address but loopback needs --keys.")
]
Port = Annotated[int, option("PORT", "Port; 0 chooses a free one.")]
Keys = Annotated[Path | None, option("FILE", "File of API keys, one line TENANT KEY per key.")]
RequestsPerMinute = Annotated[
    int | None, option("NUMBER", "Requests per minute and tenant. Default: no limit.", min=1)
]
BaseName = Annotated[str, option("NAME", "Name under which the base model is served.")]
ImageHost = Annotated[
    list[str] | None,
    option(
        "HOST", "HOST or HOST:PORT from which images may be fetched; repeatable. Default: none."
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    option("ORIGIN", "Origin of web pages that may use the gateway; repeatable. Default: none."),
]
MetricsUrl = Annotated[
    str | None, option("URL", "URL of the server's metrics, which /metrics then includes.")
]
MaxBody = Annotated[int, option("MIB", "Maximum size of a request's body in MiB.", min=1)]
MaxFetch = Annotated[int, option("MIB", "Maximum size of a fetched image in MiB.", min=1)]
FetchTimeout = Annotated[
    float, option("SECONDS", "Seconds within which an image must be fetched.", min=0.1)
]
AnswerTimeout = Annotated[
    float, option("SECONDS", "Seconds to wait for each response of the server.", min=1)
]
Grace = Annotated[
    int, option("SECONDS", "Seconds that running requests get to finish on shutdown.", min=0)
]


@app.command(cls=Command)
def gateway(
    grpc: Grpc = DEFAULTS.grpc,
    host: Host = DEFAULTS.host,
    port: Port = DEFAULTS.port,
    tls_ca: TlsCa = None,
    tls_name: TlsName = None,
    tls_key: TlsKey = None,
    tls_certificate: TlsCertificate = None,
    keys: Keys = None,
    requests_per_minute: RequestsPerMinute = None,
    base_name: BaseName = DEFAULTS.base_name,
    image_host: ImageHost = None,
    cors_origin: CorsOrigin = None,
    metrics_url: MetricsUrl = None,
    max_body: MaxBody = DEFAULTS.max_body_bytes // MIB,
    max_fetch: MaxFetch = DEFAULTS.max_fetch_bytes // MIB,
    fetch_timeout: FetchTimeout = DEFAULTS.fetch_seconds,
    answer_timeout: AnswerTimeout = DEFAULTS.answer_seconds,
    grace: Grace = int(DEFAULTS.grace_seconds),
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
                tls=tls_options(tls_ca, tls_name, tls_key, tls_certificate),
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
