"""Options, output and error reports that several commands share."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup

from vlora.config import (
    ADAPTERS_VARIABLE,
    MODEL_VARIABLE,
    Options,
    load_adapter_names,
    load_options,
    load_replacing,
    read_settings,
)
from vlora.errors import ServerError, VLoraError
from vlora.file_names import printable
from vlora.launcher.repository import default_repository

FAULTS_OF_THE_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

# Words for values of options without a `metavar` of their own, instead of Python types.
WORDS: dict[Any, str] = {int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}
REQUIRED = re.compile(r"\{(\w+)\}")  # Form in which typer shows a required argument in the usage.


class Command(TyperCommand):
    """A command whose help has words for the values of options and arguments."""

    def get_params(self, ctx: Any) -> Any:
        return _worded(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [REQUIRED.sub(r"\1", piece) for piece in super().collect_usage_pieces(ctx)]


class Group(TyperGroup):
    """A group of commands whose help has no type behind `--help`."""

    def get_params(self, ctx: Any) -> Any:
        return _worded(super().get_params(ctx))


def run_command(function: Callable[..., None]) -> None:
    """Run a function as a program with one command, as `typer.run` does."""
    app = typer.Typer(add_completion=False)
    app.command(cls=Command)(function)
    app()


def _worded(parameters: list[Any]) -> list[Any]:
    for one in parameters:
        # In 80 columns, typer's "[x>=0.1]" would leave no room for the longest names.
        one._get_number_range_help_str = str
        if isinstance(one, TyperArgument):
            one.metavar = one.metavar or one.name.upper()
            # The column of types would show a Python type.
            one.display_type_rich = lambda ctx: ""  # type: ignore[method-assign]
        elif one.metavar is None:
            described = one.type_descriptor
            is_flag = one.is_flag or described.annotation is bool
            word = "" if is_flag else WORDS.get(described.annotation, "TEXT")
            one.metavar = None if described.is_choice else word
    return parameters


def option(word: str | None, text: str, *flags: str, **more: Any) -> Any:
    """Return an option with this placeholder for its value, or None for a flag, and help text."""
    return typer.Option(*flags, metavar=word, help=text, **more)


class Terminal(Console):
    """A console that shows texts as they are: not as markup, and with control marks escaped."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)


console = Terminal()
error_console = Terminal(stderr=True)

ModelOption = Annotated[
    Path | None,
    option("FOLDER", "Folder of the checkpoint. Default: the one in model.json.", "--model"),
]
AdaptersOption = Annotated[
    Path | None,
    option(
        "FOLDER",
        "Folder of the adapters. Default: the one in model.json, or none if --model is set.",
        "--adapters",
    ),
]
RepositoryOption = Annotated[
    Path | None,
    option(
        "FOLDER",
        "Model repository with model.json. Default: the one in the package vlora.",
        "--repository",
    ),
]
OptionsFileOption = Annotated[
    Path | None,
    option(
        "FILE",
        "JSON file with keys that replace those of model.json, such as quantization.",
        "--options",
    ),
]


class ConfiguredCommand(Command):
    """A command that says so if a key of `model.json` is used as an option of its own.

    For `--quantization int8`, the error names `--set quantization=int8`, or `--options FILE` in a
    command without `--set`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        keys = {field.name for field in fields(Options)} - {"notes"}
        words = list(takewhile(lambda word: word != "--", args))
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            name, equals, value = word.partition("=")
            key = name.removeprefix("--").replace("-", "_")
            if not name.startswith("--") or name in known or key not in keys:
                continue
            if "--set" in known:
                value = value if equals else following
                value = "…" if not value or value.startswith("--") else value
                raise typer.BadParameter(
                    f"{name} is an option of model.json: use --set {key}={value}", ctx
                )
            raise typer.BadParameter(
                f"{name} is no option of this command; '{key}' is a key of model.json. Write"
                f' {{"{key}": …}} into a file, and name the file with --options FILE.',
                ctx,
            )
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class Configuration:
    """The options that a server with this repository would have, and their sources.

    replacing: keys that replace those of its `model.json`.
    names: adapter folders by name, as in `multi_lora.json`.
    """

    repository: Path
    replacing: dict[str, Any]
    options: Options
    names: dict[str, str]


def make_table(heads: Sequence[str], right: Sequence[str] = (), title: str | None = None) -> Table:
    """Return an empty table with these columns, of which those in `right` are aligned right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title)
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left")
    return table


def print_plain(*lines: str) -> None:
    """Print each text in one line, however long it is."""
    console.print(*lines, sep="\n", soft_wrap=True)


def print_lines(text: str) -> None:
    print_plain(*text.split("\n"))


def print_labelled(label: str, style: str, *lines: str, to: Console = console) -> None:
    """Print lines as `print_plain` does, with a label of this style before the first one."""
    to.print(Text(label, style), end=" ")
    to.print(*lines, sep="\n", soft_wrap=True)


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in the singular or the plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step, with the seconds since the start."""
    started = time.monotonic()
    with console.status("starting") as status:
        yield lambda part: status.update(
            Text(f"{printable(part)} ({time.monotonic() - started:.0f} s)")
        )


@contextmanager
def report_errors() -> Iterator[None]:
    """Print an error that the user can correct, but no traceback, and exit with status 1."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, ServerError | VLoraError)
        if not (reason := str(error) if known else _fault_of_the_system(error)):
            raise
        print_labelled("error:", "bold red", *reason.split("\n"), to=error_console)
        raise typer.Exit(1) from None


def _fault_of_the_system(error: Exception) -> str:
    """Return a sentence for a full disk or a missing right; "" for any other error."""
    # safetensors has the number in its message.
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    if number not in FAULTS_OF_THE_SYSTEM:
        return ""
    file = getattr(error, "filename", None) or "a file"
    return f"{file} cannot be written or read: {os.strerror(number)}"


def load_configuration(
    model: Path | None,
    adapters: Path | None,
    repository: Path | None = None,
    options_file: Path | None = None,
    settings: Sequence[str] = (),
) -> Configuration:
    """Return the configuration of a model repository, with these overrides.

    settings: KEY=VALUE of keys that replace those of `model.json` and of the options file.

    Raises ServerError without a checkpoint or a valid adapters folder, and InvalidArgument.
    """
    repository = repository or default_repository()
    version = repository / "lmm" / "1"
    if not (version / "model.json").is_file():
        raise ServerError(
            f"no model repository at {repository}: it has no lmm/1/model.json; name one with"
            " --repository FOLDER, and write a new one with `vlora repository FOLDER`"
        )
    replacing = {} if options_file is None else load_replacing(options_file)
    replacing |= read_settings(settings)
    sources = [str(options_file)] if options_file else []
    source = " and ".join([*sources, *(["--set"] if settings else [])]) or None
    overrides = {MODEL_VARIABLE: model, ADAPTERS_VARIABLE: adapters}
    given = {name: str(path) for name, path in overrides.items() if path is not None}
    options = load_options(version / "model.json", os.environ | given, replacing, source)
    check_checkpoint(options.model, "; set it with --model FOLDER")
    if options.adapters is not None:
        _check_adapter_root(options.adapters)
    names = load_adapter_names(version / "multi_lora.json")
    return Configuration(repository, replacing, options, names)


def check_checkpoint(folder: Path, remedy: str = "") -> None:
    """Raise ServerError if a folder is no checkpoint."""
    if not (folder / "config.json").is_file():
        missing = "has no config.json" if folder.is_dir() else "does not exist"
        raise ServerError(
            f"no checkpoint at {folder}: the folder {missing} (nothing is downloaded){remedy}"
        )


def _check_adapter_root(root: Path) -> None:
    if not root.is_dir():
        raise ServerError(f"no adapters folder at {root}; set it with --adapters FOLDER")
    if (root / "adapter_config.json").is_file() and not any(one.is_dir() for one in root.iterdir()):
        raise ServerError(
            f"{root} is itself an adapter, not a folder of adapters; --adapters must name the"
            f" folder that contains it: {root.resolve().parent}"
        )
