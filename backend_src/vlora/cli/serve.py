"""`vlora serve`: run a server in the foreground."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vlora import paths
from vlora.cli.common import (
    AdaptersOption,
    ConfiguredCommand,
    ModelOption,
    OptionsFileOption,
    RepositoryOption,
    console,
    load_configuration,
    print_plain,
    report_errors,
)
from vlora.cli.gateway import check_installed
from vlora.config import Options
from vlora.errors import MAX_NAMES, ServerError
from vlora.launcher.assembly import unknown_variables
from vlora.launcher.gateway_process import GatewayProcess
from vlora.launcher.repository import GRACE_SECONDS, ServerOptions
from vlora.launcher.server import TritonServer
from vlora.launcher.supervisor import RestartPolicy, Supervisor
from vlora.model.multimodal import takes_images
from vlora.net import LOOPBACK, check_ports

app = typer.Typer(add_completion=False)

OWN_PICTURE = "picture.png"
"""File in the working directory that the printed command sends to a model of the user."""


@app.command(cls=ConfiguredCommand)
def serve(
    model: ModelOption = None,
    adapters: AdaptersOption = None,
    repository: RepositoryOption = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="IP address to listen on; 0.0.0.0 opens all networks."
        ),
    ] = LOOPBACK,
    http_port: Annotated[
        int, typer.Option(metavar="PORT", help="HTTP port; 0 chooses a free one.")
    ] = 8000,
    grpc_port: Annotated[
        int, typer.Option(metavar="PORT", help="gRPC port; 0 chooses a free one.")
    ] = 8001,
    metrics_port: Annotated[
        int,
        typer.Option(metavar="PORT", help="Port of the Prometheus metrics; 0 chooses a free one."),
    ] = 8002,
    gateway_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Also run `vlora gateway`, on this port of --host; 0 chooses a free one.",
        ),
    ] = None,
    gateway_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of the gateway's API keys; needed unless --host is loopback."
        ),
    ] = None,
    allow_shared_memory: Annotated[
        bool,
        typer.Option(
            "--allow-shared-memory", help="Let clients register shared memory of this machine."
        ),
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for the server's log; - is standard output."
            " Default: a file in a private folder, which is printed.",
        ),
    ] = None,
    grace: Annotated[
        int,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Seconds that running requests get to finish on shutdown.",
        ),
    ] = int(GRACE_SECONDS),
    start_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Seconds within which the server must be ready. Default: no limit.",
        ),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Restart the server when it fails.")
    ] = False,
    options_file: OptionsFileOption = None,
    triton: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments for tritonserver itself, after --.", show_default=False),
    ] = None,
) -> None:
    """Run a server in the foreground until Ctrl-C; by default with the demo model."""
    with report_errors():
        for warning in unknown_variables(os.environ):
            print_plain(f"warning: {warning}")
        if triton and not triton[0].startswith("-"):
            raise ServerError(
                f"unexpected argument '{triton[0]}'; name a checkpoint with --model FOLDER, and"
                " write options of tritonserver itself after a separate --"
            )
        ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
        check_ports(ports | ({} if gateway_port is None else {"gateway_port": gateway_port}))
        configured = load_configuration(model, adapters, repository, options_file)
        options = configured.options
        server_options = ServerOptions(
            repository=configured.repository,
            model_json=configured.replacing,
            triton_arguments=tuple(triton or ()),
            host=host,
            allow_shared_memory=allow_shared_memory,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            model=options.model,
            adapters=options.adapters,
            log=log,
            keep_log=True,
            start_seconds=start_timeout,
            grace_seconds=grace,
        )
        policy = RestartPolicy() if restart else None
        supervisor = Supervisor(server_options, print_plain, policy)
        with ExitStack() as stack:
            gateway = None
            if gateway_port is not None:
                check_installed()
                if gateway_keys is not None:
                    from vlora.gateway.door import load_keys

                    load_keys(gateway_keys)
                gateway = GatewayProcess(host, gateway_port, gateway_keys, print_plain)
                stack.enter_context(gateway)
            elif gateway_keys is not None:
                raise ServerError("--gateway-keys needs --gateway-port")
            supervisor.run(partial(_announce, options, gateway))


def _announce(
    options: Options, gateway: GatewayProcess | None, server: TritonServer, seconds: float
) -> None:
    """Print the addresses of a ready server and a first request to try; start the gateway.

    seconds: time that the server took to become ready.
    """
    models = ", ".join(server.options.models)
    console.print(f"[bold green]ready[/] in {seconds:.1f} s: {models}", soft_wrap=True)
    console.print(f"model     {options.model}", soft_wrap=True)
    folder = options.adapters or "none; name a folder with --adapters"
    console.print(f"adapters  {folder}", soft_wrap=True)
    if broken := server.broken_adapters():
        names = ", ".join(broken[:MAX_NAMES]) + (", …" if len(broken) > MAX_NAMES else "")
        print_plain(
            f"{len(broken)} {'adapter' if len(broken) == 1 else 'adapters'} failed to load: {names}"
            " (for the reasons, see the log or run `vlora adapters check` with the same options)"
        )
    console.print(f"HTTP      {server.http_url}")
    console.print(f"gRPC      {server.grpc_url}")
    console.print(f"metrics   {server.metrics_url}")
    if gateway is not None:
        console.print(f"gateway   {gateway.url} (starting)")
    console.print(f"log       {server.log}", soft_wrap=True)
    question = first_question(options, server.http_url)
    hint = f", with an image of yours as {OWN_PICTURE}" if OWN_PICTURE in question else ""
    console.print(f"Try this in another terminal{hint}:")
    print_plain(f"  {question}")
    console.print("Press Ctrl-C to stop the server.")
    if gateway is not None:
        gateway.start(server.grpc_url, server.metrics_url)


def first_question(options: Options, url: str) -> str:
    """Return a shell command that sends the server a question about an image.

    With the demo model, the image is a sample of the demo. With any other model, it is
    `OWN_PICTURE` in the working directory. A text-only model gets a question without an image.
    """
    generate = f"{url}/v2/models/video_analytics/generate"
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    if not takes_images(config.get("model_type")):
        return (
            f"""curl -s {generate} -d '{{"text_input": "What is the capital of France?"}}'; echo"""
        )
    demo = paths.root() / "tools/demo"
    picture, question = demo / "samples/vqa.png", "What color is the star?"
    serves_demo = options.model.resolve() == (demo / "checkpoint").resolve()
    if not (serves_demo and picture.is_file()):
        picture, question = Path(OWN_PICTURE), "What do you see?"
    request = f"""'{{"text_input": "{question}", "image": "%s"}}'"""
    return (
        f"""printf {request} "$(base64 -w0 {shlex.quote(str(picture))})" |"""
        f" curl -s {generate} -d @-; echo"
    )
