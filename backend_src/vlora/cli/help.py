"""Help texts that name the values of options in words instead of Python types."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

WORDS: dict[Any, str] = {int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}
"""Words for values of options without a `metavar` of their own."""

REQUIRED = re.compile(r"\{(\w+)\}")
"""Form in which typer shows a required argument in the usage."""


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
    """Give words to those parameters that have none."""
    for one in parameters:
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
