"""`vlora load`: send a seeded load of requests to a server, and measure its answers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from vlora import __version__
from vlora.cli.common import (
    Command,
    console,
    counted,
    make_table,
    option,
    print_plain,
    report_errors,
)
from vlora.cli.gateway import tls_options
from vlora.cli.probe import TlsCa, TlsCertificate, TlsKey, TlsName
from vlora.errors import InvalidArgument, ServerError

if TYPE_CHECKING:
    from vlora.load.run import Asking, Measurement, Record
    from vlora.load.targets import Target
    from vlora.load.trace import TracedRequest

app = typer.Typer(add_completion=False)
INTERRUPTED = 130
MAX_ADAPTER_ROWS = 10
SPREADS = {
    "first_token_s": "first token",
    "end_to_end_s": "end to end",
    "lag_s": "delay of sending",
}
SHOW_SECONDS = 0.25  # Seconds between two updates of the live figures.

Grpc = Annotated[str, option("HOST:PORT", "gRPC address of a Triton server.", "--grpc")]
OpenAi = Annotated[
    str | None, option("URL", "OpenAI API to measure instead, such as http://HOST:8080/v1.")
]
Key = Annotated[str | None, option("KEY", "Key of the OpenAI API.", envvar="OPENAI_API_KEY")]
Model = Annotated[
    str | None, option("NAME", "Triton model (default: lmm), or OpenAI's base model (base).")
]
Kind = Annotated[
    Literal["text", "retrieval", "video", "vss"],
    option(
        None,
        "text: prompts of 256 tokens, answers of 64, or the lengths of an Azure trace; retrieval:"
        " 256 and 200; video: six frames of each second of --streams cameras, answers of 10; vss: a"
        " clip of 80 frames, a one-token alert.",
    ),
]
Rate = Annotated[float, option("NUMBER", "Requests per second.", min=0.001)]
Seconds = Annotated[float, option("SECONDS", "Seconds during which requests are sent.", min=0.1)]
ArrivalSource = Annotated[
    str,
    option(
        "NAME|FILE.csv",
        "poisson, bursty (five at once), uniform, the statistics of Azure's traces of 2023"
        " (azure-conv, azure-code), or an Azure LLM inference file, whose first requests are"
        " stretched to the rate.",
    ),
]
PromptTokens = Annotated[
    int | None, option("TOKENS", "Length of prompts, without pictures.", min=1)
]
OutputTokens = Annotated[int | None, option("TOKENS", "Length of answers.", min=1)]
Context = Annotated[
    int | None, option("TOKENS", "Cut each prompt with its answer to this length.", min=2)
]
Images = Annotated[int, option("NUMBER", "Pictures of each request.", min=0)]
Frames = Annotated[int | None, option("NUMBER", "Frames of each clip instead of 6 or 80.", min=1)]
ImageSize = Annotated[int, option("PIXELS", "Width and height of pictures and frames.", min=16)]
Streams = Annotated[int, option("NUMBER", "Cameras of the workload video, whatever --rate.", min=1)]
Supersede = Annotated[
    bool, option(None, "Let a newer chunk of a camera end an older one that waits.", "--supersede")
]
Task = Annotated[
    str | None, option("NAME", "Task of each request, such as video; a V-LoRA server knows it.")
]
AdapterNames = Annotated[
    str | None, option("NAMES|@FILE", "Adapters, separated by commas or one per line of a file.")
]
Hot = Annotated[
    float | None, option("SHARE", "Share of the first adapter's requests.", min=0.0, max=1.0)
]
Zipf = Annotated[
    float, option("EXPONENT", "How popularity falls from adapter to adapter; 0: equal.", min=0.0)
]
BaseShare = Annotated[
    float, option("SHARE", "Share of requests without an adapter.", min=0.0, max=1.0)
]
Priority = Annotated[
    list[str] | None, option("PRIORITY=SHARE", "Share of requests with a priority; repeatable.")
]
Deadline = Annotated[
    float | None, option("MS", "Time within which an answer is in time.", "--deadline-ms", min=1.0)
]
SendDeadline = Annotated[
    bool,
    option(None, "Send it as deadline_ms; the server then drops late requests.", "--send-deadline"),
]
Timeout = Annotated[float, option("SECONDS", "Seconds after which to give a request up.", min=0.1)]
Seed = Annotated[int, option("NUMBER", "Seed of times, lengths, adapters and contents.", min=0)]
Json = Annotated[
    Path | None, option("FILE", "Write figures and requests into this file.", "--json")
]
Picture = Annotated[Path | None, option("FILE", "Draw latencies into this file (matplotlib).")]


@app.command(cls=Command)
def load(
    grpc: Grpc = "127.0.0.1:8001",
    openai: OpenAi = None,
    key: Key = None,
    tls_ca: TlsCa = None,
    tls_name: TlsName = None,
    tls_key: TlsKey = None,
    tls_certificate: TlsCertificate = None,
    model: Model = None,
    workload: Kind = "text",
    rate: Rate = 1.0,
    seconds: Seconds = 30.0,
    arrivals: ArrivalSource = "poisson",
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    context: Context = None,
    images: Images = 0,
    frames: Frames = None,
    image_size: ImageSize = 256,
    streams: Streams = 1,
    supersede: Supersede = False,
    task: Task = None,
    adapters: AdapterNames = None,
    hot: Hot = None,
    zipf: Zipf = 0.0,
    base_share: BaseShare = 0.0,
    priority: Priority = None,
    deadline: Deadline = None,
    send_deadline: SendDeadline = False,
    timeout: Timeout = 120.0,
    seed: Seed = 0,
    json_file: Json = None,
    picture: Picture = None,
) -> None:
    """Send a load of requests to a server at fixed times, and measure the answers.

    The server is Triton with a model of the vLLM backend's inputs, or an
    OpenAI API. The loop is open: a request is sent at its time, also if those
    before it wait. The same seed gives the same requests at the same times.
    All latencies count from the scheduled times, and the delay of sending is
    shown. Answers have their full length (ignore_eos). Ctrl-C ends the run and
    shows what was measured. The exit status is 1 if no request was answered.
    """
    with report_errors():
        _check(json_file, picture, openai)
        # Imported here because they import numpy, gRPC and more.
        from vlora.load.run import Asking, Measurement
        from vlora.load.targets import OpenAiTarget, TritonTarget
        from vlora.load.trace import Traffic

        if not adapters and (hot or zipf or base_share):
            raise InvalidArgument("--hot, --zipf and --base-share need --adapters NAMES")
        if send_deadline and not deadline:
            raise InvalidArgument("--send-deadline needs --deadline-ms MS")
        names, priorities = _adapter_names(adapters), _priorities(priority or ())
        prompt, output, clip = _shape(workload, arrivals, prompt_tokens, output_tokens)
        cameras = streams if workload == "video" else None
        lengths, popularity = (prompt, output), (len(names), hot, zipf, base_share)
        traffic = Traffic(
            arrivals, rate, seconds, lengths, cameras, context, *popularity, priorities
        )
        trace = traffic.draw(seed)
        sampling = {"deadline_ms": deadline} if send_deadline else {}
        asking = Asking(names, sampling, task, f"load-{seed}" if supersede else None, timeout)
        target: Target
        if openai is None:
            tls = tls_options(tls_ca, tls_name, tls_key, tls_certificate)
            target = TritonTarget(grpc, model or "lmm", tls)
        else:
            target = OpenAiTarget(openai, model or "base", key)
        measurement = Measurement.of(trace, names)
        pictures = {"images": images, "frames": frames or clip, "side": image_size}
        interrupted = _run(target, asking, trace, measurement, seed, pictures)
        about = asdict(traffic) | asdict(asking) | pictures
        about |= {"server": openai or grpc, "model": model, "workload": workload, "seed": seed}
        about |= {"version": __version__, "interrupted": interrupted}
        late = None if deadline is None else deadline / 1e3
        answered = _report(measurement, late, about, json_file, picture)
        raise typer.Exit(INTERRUPTED if interrupted else int(not answered))


def _check(json_file: Path | None, picture: Path | None, openai: str | None) -> None:
    """Raise an error if results could not be written after the run, or a package is missing."""
    for file in (json_file, picture):
        if file is not None and not file.absolute().parent.is_dir():
            raise InvalidArgument(f"{file} cannot be written: its folder does not exist; make it")
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ServerError("--picture needs matplotlib; install it with: pip install matplotlib")
    extra, package = ("gateway", "httpcore2") if openai else ("server", "tritonclient")
    if importlib.util.find_spec(package) is None:
        raise ServerError(f"the package {package} is missing: pip install 'vlora[{extra}]'")


def _adapter_names(given: str | None) -> list[str]:
    if given is None:
        return []
    if not given.startswith("@"):
        return [name.strip() for name in given.split(",") if name.strip()]
    try:
        lines = Path(given[1:]).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--adapters {given}: the file cannot be read: {error}") from None
    return [line.strip() for line in lines if line.strip()]


def _priorities(given: Sequence[str]) -> dict[int, float]:
    found = {}
    for text in given:
        name, _, share = text.partition("=")
        try:
            found[int(name)] = float(share)
        except ValueError:
            raise InvalidArgument(
                f"--priority takes PRIORITY=SHARE, as in 5=0.1, not '{text}'"
            ) from None
    if not all(0 <= share <= 1 for share in found.values()) or sum(found.values()) > 1:
        raise InvalidArgument(
            "each share of --priority must be from 0 to 1, and their sum 1 at most"
        )
    return found


def _shape(
    workload: str, arrivals: str, prompt: int | None, output: int | None
) -> tuple[int | None, int | None, int]:
    """Return tokens of prompts and answers, None for those of the arrivals, and frames."""
    from vlora.load.trace import ARRIVALS, AZURE, SHAPES

    is_file = arrivals.endswith(".csv")
    if arrivals not in ARRIVALS and not is_file:
        raise InvalidArgument(
            f"unknown --arrivals '{arrivals}'; choose {', '.join(ARRIVALS)} or a file FILE.csv"
        )
    shape = SHAPES[workload]
    if workload == "text" and (is_file or arrivals in AZURE):
        return prompt, output, 0
    return prompt or shape.prompt, output or shape.output, shape.frames


def _run(
    target: Target,
    asking: Asking,
    trace: Sequence[TracedRequest],
    measurement: Measurement,
    seed: int,
    pictures: Mapping[str, int],
) -> bool:
    """Make the contents, send them and show the progress. Return whether Ctrl-C ended the run."""
    from vlora.load.contents import ContentMaker
    from vlora.load.run import measure_tokens, send

    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        maker = ContentMaker(seed, asyncio.run(_opened(target, measure_tokens, asking)), **pictures)
        with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
            task = bars.add_task("preparing", total=len(trace))
            contents = []
            for place, one in enumerate(trace):
                contents.append(maker.make(place, one))
                bars.update(task, completed=place + 1)
            bars.reset(task)
            live = _Live(bars, task)
            asyncio.run(_opened(target, send, asking, trace, contents, measurement, live))
    except KeyboardInterrupt:
        return True
    return False


async def _opened(target: Target, work: Callable[..., Awaitable[Any]], *more: Any) -> Any:
    """Return the result of `work` with an open target."""
    await target.open()
    try:
        return await work(target, *more)
    finally:
        await target.close()


class _Live:
    """Shows the number of requests that have ended, and figures of those so far."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task
        self._started = self._shown = time.monotonic()
        self._sent = self._ended = self._errors = self._tokens = 0
        self._seconds = 0.0

    def __call__(self, record: Record) -> None:
        if record.error is None:
            self._sent += 1
        else:
            self._ended += 1
            self._errors += record.error != ""
            self._tokens += record.output_tokens
            self._seconds += record.end or 0.0
        now = time.monotonic()
        if now >= self._shown + SHOW_SECONDS:
            self._shown = now
            self._bars.update(self._task, completed=self._ended, description=self._note(now))

    def _note(self, now: float) -> str:
        rate, mean = self._tokens / (now - self._started), self._seconds / max(1, self._ended)
        running = f"{self._sent - self._ended} running, {counted(self._errors, 'error')}"
        return f"{running}, {rate:.0f} tokens/s, {mean:.2f} s each"


def _report(
    measurement: Measurement,
    deadline: float | None,
    about: Mapping[str, Any],
    json_file: Path | None,
    picture: Path | None,
) -> int:
    """Print the figures, and write the files. Return the number of answered requests."""
    from vlora.load.figures import by_adapter, draw, summarize

    records = measurement.records
    figures, adapters = summarize(records, deadline), by_adapter(records, deadline)
    _print_figures(figures, measurement.messages)
    if len(adapters) > 1:
        console.print(_adapters_table(adapters))
    if json_file is not None:
        rows = [asdict(one) for one in records]
        meta = {**about, "deadline_s": deadline}
        found = {"meta": meta, "summary": figures, "adapters": adapters, "rows": rows}
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print_plain(f"figures   {json_file}")
    if picture is not None:
        draw(records, picture)
        print_plain(f"picture   {picture}")
    return int(figures["answered"])


def _print_figures(figures: Mapping[str, Any], messages: Mapping[str, str]) -> None:
    from vlora.load.figures import MAX_LAG_SECONDS, kept_schedule

    running = f", {figures['unfinished']} did not end" if figures["unfinished"] else ""
    print_plain(
        f"{figures['sent']} of {counted(figures['requests'], 'request')} sent,"
        f" {figures['answered']} answered in {figures['seconds']:.1f} s{running}"
    )
    for code, number in figures["errors"].items():
        print_plain(f"{counted(number, 'error')} {code}: {messages[code]}")
    spreads = ("mean", "p50", "p95", "p99", "max")
    table = make_table(("seconds", *spreads), spreads)
    for name, title in SPREADS.items():
        if found := figures[name]:
            table.add_row(title, *(f"{found[spread]:.4f}" for spread in spreads))
    console.print(table)
    print_plain(_rates(figures))
    if not kept_schedule(figures):
        print_plain(
            f"warning: this client did not keep its schedule: 1 % of the requests were sent more"
            f" than {MAX_LAG_SECONDS * 1e3:.0f} ms late, which the latencies include. Lower --rate,"
            " or run it on a machine with free cores."
        )


def _rates(figures: Mapping[str, Any]) -> str:
    met, latency = figures["deadlines_met"], figures["token_latency_s"]
    parts = [
        f"{figures['requests_per_s']:.2f} requests/s",
        f"{figures['tokens_per_s']:.1f} tokens/s",
        f"average token latency {latency * 1e3:.2f} ms" if latency else "no tokens",
    ]
    if figures["prompt_tokens"] is not None:
        parts.append(f"{figures['prompt_tokens']:.0f} + {figures['output_tokens']:.0f} tokens each")
    if met is not None:
        parts += [f"{met:.1%} of deadlines met", f"goodput {figures['goodput_per_s']:.2f}/s"]
    return ", ".join(parts)


def _adapters_table(adapters: Mapping[str, Mapping[str, Any]]) -> Table:
    right = ("requests", "errors", "ms/token", "first token", "p95", "in time")
    table = make_table(("adapter", *right), right)
    for name, figures in list(adapters.items())[:MAX_ADAPTER_ROWS]:
        first, end = figures["first_token_s"], figures["end_to_end_s"]
        latency, met = figures["token_latency_s"], figures["deadlines_met"]
        table.add_row(
            name or "(base model)",
            str(figures["requests"]),
            str(sum(figures["errors"].values())),
            f"{latency * 1e3:.2f}" if latency else "-",
            f"{first['mean']:.4f} s" if first else "-",
            f"{end['p95']:.4f} s" if end else "-",
            f"{met:.1%}" if met is not None else "-",
        )
    return table
