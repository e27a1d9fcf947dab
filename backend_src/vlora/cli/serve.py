"""`vlora serve`: run a server in the foreground."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from vlora import paths
from vlora.cli import common
from vlora.cli.common import option, print_labelled, print_lines, print_plain
from vlora.cli.gateway import (
    DEFAULTS,
    AnswerTimeout,
    BaseName,
    CorsOrigin,
    FetchTimeout,
    ImageHost,
    MaxBody,
    MaxFetch,
    RequestsPerMinute,
    check_installed,
    tls_options,
)
from vlora.cli.probe import TlsCa, TlsCertificate, TlsKey, TlsName
from vlora.config import Options
from vlora.errors import MAX_NAMES, ServerError
from vlora.gateway.options import MIB, check_base_name
from vlora.launcher.assembly import unknown_variables
from vlora.launcher.gateway_process import GatewayProcess
from vlora.launcher.replicas import Replicas
from vlora.launcher.repository import GRACE_SECONDS, STANDARD_OUTPUT, ServerOptions
from vlora.launcher.server import TritonServer
from vlora.launcher.supervisor import RestartPolicy, Supervisor
from vlora.model.folder_checks import check_device, check_folder, gpu_count
from vlora.model.multimodal import takes_images
from vlora.net import LOOPBACK, check_ports, raise_file_limit

app = typer.Typer(add_completion=False)

# File in the working directory that the printed command sends to a model of the user.
OWN_PICTURE = "picture.png"
GIB = 1 << 30


Host = Annotated[str, option("ADDRESS", "IP address to listen on; 0.0.0.0 opens all networks.")]
HttpPort = Annotated[int, option("PORT", "HTTP port; 0 chooses a free one.")]
GrpcPort = Annotated[int, option("PORT", "gRPC port; 0 chooses a free one.")]
MetricsPort = Annotated[
    int, option("PORT", "Port of the Prometheus metrics; 0 chooses a free one.")
]
GatewayPort = Annotated[
    int | None,
    option(
        "PORT",
        "Also run `vlora gateway`, on this port of --host; 0 chooses a free one. Its options have"
        " the prefix --gateway- here.",
    ),
]
GatewayKeys = Annotated[
    Path | None, option("FILE", "File of the gateway's API keys; needed unless --host is loopback.")
]
AllowSharedMemory = Annotated[
    bool,
    option(None, "Let clients register shared memory of this machine.", "--allow-shared-memory"),
]
Log = Annotated[
    Path | None,
    option(
        "FILE",
        "File for the server's log; - is standard output."
        " Default: a file in a private folder, which is printed.",
    ),
]
Grace = Annotated[
    int, option("SECONDS", "Seconds that running requests get to finish on shutdown.", min=0)
]
HandOver = Annotated[
    bool,
    option(
        None,
        "On shutdown, refuse requests that have not begun with UNAVAILABLE, so that Envoy sends"
        " them to another server.",
        "--hand-over",
    ),
]
StartTimeout = Annotated[
    float | None,
    option("SECONDS", "Seconds within which the server must be ready. Default: no limit.", min=0),
]
Count = Annotated[
    int,
    option(
        "NUMBER",
        "Servers on this machine behind Envoy, which share its cores, GPUs and caches; SIGUSR1"
        " restarts them one after the other.",
        "--replicas",
        min=1,
    ),
]
Restart = Annotated[bool, option(None, "Restart the server when it fails.", "--restart")]
Settings = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "Key that replaces the one in model.json; may be repeated. VALUE is JSON or text.",
        "--set",
        show_default=False,
    ),
]
Triton = Annotated[
    list[str] | None,
    typer.Argument(help="Arguments for tritonserver itself, after --.", show_default=False),
]


@app.command(cls=common.ConfiguredCommand)
def serve(
    context: typer.Context,
    model: common.ModelOption = None,
    adapters: common.AdaptersOption = None,
    repository: common.RepositoryOption = None,
    host: Host = LOOPBACK,
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 8001,
    metrics_port: MetricsPort = 8002,
    gateway_port: GatewayPort = None,
    gateway_keys: GatewayKeys = None,
    # `_gateway` passes the following options on, as the context has them.
    gateway_tls_ca: TlsCa = None,
    gateway_tls_name: TlsName = None,
    gateway_tls_key: TlsKey = None,
    gateway_tls_certificate: TlsCertificate = None,
    gateway_requests_per_minute: RequestsPerMinute = None,
    gateway_base_name: BaseName = DEFAULTS.base_name,
    gateway_image_host: ImageHost = None,
    gateway_cors_origin: CorsOrigin = None,
    gateway_max_body: MaxBody = DEFAULTS.max_body_bytes // MIB,
    gateway_max_fetch: MaxFetch = DEFAULTS.max_fetch_bytes // MIB,
    gateway_fetch_timeout: FetchTimeout = DEFAULTS.fetch_seconds,
    gateway_answer_timeout: AnswerTimeout = DEFAULTS.answer_seconds,
    allow_shared_memory: AllowSharedMemory = False,
    log: Log = None,
    grace: Grace = int(GRACE_SECONDS),
    hand_over: HandOver = False,
    start_timeout: StartTimeout = None,
    restart: Restart = False,
    replicas: Count = 1,
    options_file: common.OptionsFileOption = None,
    settings: Settings = None,
    triton: Triton = None,
) -> None:
    """Run a server in the foreground until Ctrl-C; by default with the demo model."""
    with common.report_errors():
        for warning in unknown_variables(os.environ):
            print_plain(f"warning: {warning}")
        raise_file_limit()
        _check_triton_arguments(triton or [])
        ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
        check_ports(ports | ({} if gateway_port is None else {"gateway_port": gateway_port}))
        configured = common.load_configuration(
            model, adapters, repository, options_file, settings or ()
        )
        options = configured.options
        check_folder(options.model, options)
        check_device(options.device)
        server_options = ServerOptions(
            repository=configured.repository,
            model_json={**configured.replacing, **_cache_shares(options, replicas)},
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
            hand_over=hand_over,
        )
        runner = _runner(configured, server_options, replicas, restart)
        if gateway_port is not None:
            name, root = gateway_base_name, options.adapters
            is_taken = root is not None and (name in configured.names or (root / name).is_dir())
            check_base_name(name, is_taken, "--gateway-base-name")
        with _gateway(context, log != STANDARD_OUTPUT) as gateway:
            runner.run(partial(_announce, options, gateway))


def _runner(
    configured: common.Configuration, options: ServerOptions, replicas: int, restart: bool
) -> Supervisor | Replicas:
    """Return what runs one server or several. Raises ServerError if several do not fit."""
    if replicas == 1:
        return Supervisor(options, print_lines, RestartPolicy() if restart else None)
    on_gpus = configured.options.device != "cpu" and gpu_count() > 0
    runner = Replicas(options, replicas, print_lines, on_gpus=on_gpus)
    # An engine on a GPU checks the GPU's memory itself.
    if not on_gpus:
        _check_memory(configured, replicas)
    return runner


def _cache_shares(options: Options, replicas: int) -> dict[str, Any]:
    """Return the options for the sizes of caches, which the replicas of a machine share."""
    names = ("adapter_host_bytes", "feature_cache_bytes") if replicas > 1 else ()
    return {name: getattr(options, name) // replicas for name in names}


def _check_memory(configured: common.Configuration, replicas: int) -> None:
    """Raise ServerError if the replicas do not fit the memory that is left."""
    options = replace(configured.options, **_cache_shares(configured.options, replicas))
    # In a process of its own, because torch needs memory as long as it is imported.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        needed, left = pool.submit(_memory, options, configured.names, replicas).result()
    if left is not None and needed > left:
        raise ServerError(
            f"--replicas {replicas} needs about {needed / GIB:.1f} GiB of memory, and"
            f" {left / GIB:.1f} GiB are left; use fewer replicas, or reduce 'kv_cache_tokens' or"
            " 'adapter_pool_bytes' (`vlora capacity` shows the memory of each)"
        )


def _memory(options: Options, names: Mapping[str, str], replicas: int) -> tuple[int, int | None]:
    """Return the bytes that the replicas need, and those that are left."""
    from vlora.device.host_memory import available_bytes
    from vlora.engine.capacity import replicas_bytes

    left = available_bytes()
    return replicas_bytes(options, names, replicas), left


def _check_triton_arguments(arguments: list[str]) -> None:
    if arguments and not arguments[0].startswith("-"):
        raise ServerError(
            f"unexpected argument '{arguments[0]}'; name a checkpoint with --model FOLDER, and"
            " write options of tritonserver itself after a separate --"
        )


def _gateway(
    context: typer.Context, log_to_file: bool
) -> AbstractContextManager[GatewayProcess | None]:
    """Return the gateway that the options `--gateway-…` of a command line describe, or None."""
    options = _gateway_options(context)
    port = options.pop("port", None)
    if port is None:
        if options:
            raise ServerError(f"--gateway-{next(iter(options))} needs --gateway-port")
        return nullcontext()
    check_installed()
    if (keys := options.pop("keys", None)) is not None:
        from vlora.gateway.door import load_keys

        load_keys(keys)
    tls_options(*(options.get(f"tls-{one}") for one in ("ca", "name", "key", "certificate")))
    arguments = [
        f"--{name}={one.absolute() if isinstance(one, Path) else one}"
        for name, value in {**options, "grace": context.params["grace"]}.items()
        for one in (value if isinstance(value, list | tuple) else [value])
    ]
    host = context.params["host"]
    return GatewayProcess(host, port, keys, print_plain, log_to_file, arguments)


def _gateway_options(context: typer.Context) -> dict[str, Any]:
    """Return the given options with the prefix `--gateway-`, by their names without it."""
    given = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if name.startswith("gateway_") and source is not None and source.name == "COMMANDLINE":
            given[name.removeprefix("gateway_").replace("_", "-")] = value
    return given


def _announce(
    options: Options,
    gateway: GatewayProcess | None,
    server: TritonServer | Replicas,
    seconds: float,
) -> None:
    started = time.monotonic()
    late = ""
    if gateway is not None:
        gateway.start(server.grpc_url, server.metrics_url)
        if not gateway.wait_ready(lambda: server.failure() is None):
            late = " (does not answer yet)"
    seconds += time.monotonic() - started
    models = ", ".join(server.options.models)
    print_labelled("ready", "bold green", f"in {seconds:.1f} s: {models}")
    print_plain(f"model     {options.model}")
    print_plain(f"adapters  {options.adapters or 'none; name a folder with --adapters'}")
    reasons, others = server.broken_adapters()
    if reasons:
        _print_broken(reasons, others)
    print_plain(f"HTTP      {server.http_url}")
    print_plain(f"gRPC      {server.grpc_url}")
    print_plain(f"metrics   {server.metrics_url}")
    if gateway is not None:
        print_plain(f"gateway   {gateway.url}/v1{late}")
        print_plain(f"page      {gateway.url}/playground/")
    replicas = server.replicas if isinstance(server, Replicas) else []
    for one in replicas:
        own, cores = one.server, ",".join(map(str, one.cores))
        print_plain(f"replica {one.name} HTTP {own.http_url}, gRPC {own.grpc_url}, cores {cores}")
    logs = [one.server.log for one in replicas] or [server.log]
    if gateway is not None and gateway.log is not None:
        logs.append(gateway.log)
    for label, log in zip_longest(["log"], logs, fillvalue=""):
        print_plain(f"{label:<9} {log}")
    question = first_question(options, server.http_url)
    hint = f", with an image of yours as {OWN_PICTURE}" if OWN_PICTURE in question else ""
    print_plain(f"Try this in another terminal{hint}:")
    print_plain(f"  {question}")
    print_plain("Press Ctrl-C to stop the server.")


def _print_broken(reasons: Sequence[str], others: int) -> None:
    print_plain(f"{common.counted(len(reasons) + others, 'adapter')} failed to load:")
    for reason in reasons[:MAX_NAMES]:
        print_plain(f"  {reason}")
    if len(reasons) > MAX_NAMES:
        print_plain("  … (`vlora adapters check` with the same options names all)")


def first_question(options: Options, url: str) -> str:
    """Return a command with a question about a sample of the demo, OWN_PICTURE, or no image."""
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
