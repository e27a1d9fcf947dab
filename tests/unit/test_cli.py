"""Tests of the parts of the command line that need no server."""

from __future__ import annotations

import base64
import errno
import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from rich.console import Console
from safetensors import SafetensorError
from typer.core import TyperGroup
from typer.testing import CliRunner

import vlora
from benchmarks.frame import REGISTRY, command_line
from tests.support.fakes import adapter
from tools.demo.__main__ import app as demo
from vlora import paths
from vlora.adapters.files import AdapterInfo
from vlora.cli import app, main
from vlora.cli.adapters import table_of
from vlora.cli.serve import first_question
from vlora.config import Options
from vlora.errors import ServerError
from vlora.interpreters import python_command
from vlora.launcher.repository import write_repository
from vlora.model.folder_checks import gpu_count


def table_rows(*infos: AdapterInfo) -> list[list[str]]:
    """Return the words of each line of the table of these adapters."""
    shown = io.StringIO()
    Console(file=shown, width=80).print(table_of(infos))
    return [line.split() for line in shown.getvalue().splitlines() if line.strip()]


def test_the_table_of_adapters_fits_into_80_columns() -> None:
    kinds = ("q", "k", "v", "o", "gate", "up", "down")
    targets = tuple(f"{kind}_proj" for kind in kinds)
    plain = adapter("inspection", ("vqa",))
    rows = table_rows(replace(plain, ranks=(4, 8, 16), targets=targets))
    assert rows[0] == ["adapter", "ranks", "targets", "tasks", "labels", "digest"]
    assert len(rows) <= 4
    assert rows[2][:4] == ["inspection", "4", "8", "16"]
    assert [word for row in rows[2:] for word in row][4:] == [*kinds, "vqa", "-", "digest-of-in"]
    rows = table_rows(plain, replace(plain, name="activated", invocation=(17, 4, 1029)))
    assert rows[0][3] == "invocation"
    assert (rows[2][0], rows[2][-4]) == ("inspection", "-")
    assert (rows[3][0], rows[3][-6:-3]) == ("activated", ["17", "4", "1029"])


@pytest.mark.parametrize("demo", [True, False])
def test_the_command_that_serve_prints_sends_a_request_with_a_picture(
    demo: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = paths.root() / "tools/demo"
    own = tmp_path / "picture.png"
    # The picture is longer than an argument may be.
    own.write_bytes(b"a picture of the user's " * 9000)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    monkeypatch.chdir(tmp_path)
    model = samples / "checkpoint" if demo else tmp_path
    command = first_question(Options(model=model), "localhost:8000")
    asks, _, sends = command.rpartition("|")
    assert sends == " curl -s localhost:8000/v2/models/video_analytics/generate -d @-; echo"
    sent = subprocess.run(["sh", "-c", asks], capture_output=True, check=True).stdout
    picture = samples / "samples/vqa.png" if demo else own
    assert base64.b64decode(json.loads(sent)["image"]) == picture.read_bytes()


@pytest.mark.parametrize("config", [{}, {"vision_config": {}}, {"visual": {}}], ids=str)
def test_the_command_that_serve_prints_for_a_text_only_model_has_no_picture(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """The model type alone decides, as in the encoder."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    assert first_question(Options(model=tmp_path), "localhost:8000") == (
        "curl -s localhost:8000/v2/models/video_analytics/generate"
        """ -d '{"text_input": "What is the capital of France?"}'; echo"""
    )


def test_vlora_serve_is_imported_without_torch() -> None:
    code = "import sys, vlora.cli.serve; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture
def own(checkpoint: Path, adapters_dir: Path, tmp_path: Path) -> dict[str, Path]:
    """Return options that name a new repository and an options file, each with another adapter."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}-adapter").symlink_to(adapters_dir / "attention-r4")
    options = tmp_path / "options.json"
    options.write_text('{"adapters": "other", "block_size": 8}')
    repository = write_repository(tmp_path / "repository", checkpoint, tmp_path / "one")
    return {"--repository": repository, "--options": options}


@pytest.mark.parametrize("command", [["adapters", "list"], ["adapters", "check"], ["capacity"]])
def test_commands_read_the_given_repository_and_options(
    command: list[str], own: dict[str, Path]
) -> None:
    words = [str(word) for option in own.items() for word in option]
    by_repository = CliRunner().invoke(app, [*command, *words[:2]])
    assert "one-adapter" in by_repository.output, by_repository
    by_options = CliRunner().invoke(app, [*command, *words])
    assert "other-adapter" in by_options.output, by_options
    assert "one-adapter" not in by_options.output


@pytest.mark.parametrize("command", ["list", "check"])
def test_a_model_without_an_adapter_folder_has_no_adapters(
    command: str, checkpoint: Path, tmp_path: Path
) -> None:
    arguments = ["adapters", command, "--model", str(checkpoint)]
    result = CliRunner().invoke(app, arguments)
    unset = "no adapters: no adapter folder is set; name one with --adapters FOLDER\n"
    assert (result.exit_code, result.output) == (0, unset)
    result = CliRunner().invoke(app, [*arguments, "--adapters", str(tmp_path)])
    empty = f"no adapters in {tmp_path}: it has no subfolders with files\n"
    assert (result.exit_code, result.output) == (0, empty)


HOSTILE = "[v2] :x: [red]\x1b]0;owned\x07\nok      forged\u202e"
SHOWN = r"[v2] :x: [red]\x1b]0;owned\x07\nok      forged\u202e"


@pytest.mark.parametrize(
    "command",
    ["adapters list", "adapters check", "capacity", "premerge --dry-run", "repository"],
)
def test_names_are_shown_as_they_are_but_no_terminal_obeys_them(
    command: str,
    checkpoint: Path,
    adapters_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vlora.cli.common.console._width", 200)
    root = tmp_path / "[" / f"1] {HOSTILE}"
    for folder in (root / HOSTILE, root / f"{HOSTILE} broken"):
        folder.mkdir(parents=True)
    (root / f"{HOSTILE} broken" / "adapter_config.json").touch()
    shutil.copytree(adapters_dir / "attention-r4", root / HOSTILE, dirs_exist_ok=True)
    given = ["--model", str(checkpoint), "--adapters", str(root)]
    given += ["--out", "out", "--hot", HOSTILE] if "premerge" in command else []
    given = [str(root)] if command == "repository" else given
    output = CliRunner().invoke(app, [*command.split(), *given]).output
    assert SHOWN in output, output
    assert [line for line in output.split("\n") if not line.isprintable()] == []
    assert not re.search("^ok +forged", output, re.MULTILINE)
    assert command != "repository" or f"[/1] {SHOWN}" in output


def test_a_log_line_of_a_command_is_printable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.lastResort, "formatter", None)
    monkeypatch.setattr("vlora.cli.app", lambda: logging.lastResort.emit(record))
    record = logging.LogRecord("vlora", logging.WARNING, "", 1, "adapter '%s'", (HOSTILE,), None)
    main()
    assert capsys.readouterr().err == f"adapter '{SHOWN}'\n"


def test_an_adapter_is_refused_as_the_folder_of_adapters(
    checkpoint: Path, adapters_dir: Path
) -> None:
    arguments = ["adapters", "check", "--model", str(checkpoint)]
    result = CliRunner().invoke(app, [*arguments, "--adapters", str(adapters_dir / "attention-r4")])
    assert result.exit_code == 1
    parent = str(adapters_dir.resolve())
    assert "is itself an adapter, not a folder of adapters; --adapters must name" in result.stderr
    assert result.stderr.rstrip().endswith(f"the folder that contains it: {parent}")


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("serve --max-num-seqs 8", "--max-num-seqs {}: use --set max_num_seqs=8"),
        ("serve --quantization=int8", "--quantization {}: use --set quantization=int8"),
        ("serve --enforce-eager", "--enforce-eager {}: use --set enforce_eager=…"),
        ("adapters check --max-model-len 9", "'max_model_len' is a key of model.json"),
        ("capacity --quantization=int8", "'quantization' is a key of model.json"),
    ],
)
def test_a_key_of_model_json_is_no_option_and_the_error_names_the_one_for_it(
    command: str, advice: str
) -> None:
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert advice.format("is an option of model.json") in result.stderr
    assert command.startswith("serve") or "--options FILE" in result.stderr


PYTHON_TYPES = re.compile(r"<[\w\[\]. ]+>|\blist\[|\brange\b *\[")


def commands() -> Iterator[tuple[str, Any]]:
    """Yield (name, command) of each command of vlora, of the demo and of the benchmarks."""
    applications = {"vlora": app, "python -m tools.demo": demo}
    groups = [(name, typer.main.get_command(one)) for name, one in applications.items()]
    for name, command in groups:
        yield name, command
        if isinstance(command, TyperGroup):
            context = typer.Context(command)
            members = (command.get_command(context, one) for one in command.list_commands(context))
            groups += [(f"{name} {one.name}", one) for one in members if one is not None]
    for name in REGISTRY:
        yield f"python -m benchmarks {name}", typer.main.get_command(command_line(name))


@pytest.mark.parametrize(("name", "command"), [pytest.param(*one, id=one[0]) for one in commands()])
def test_help_names_the_values_of_options_in_words(
    name: str, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--help"], prog_name=name, standalone_mode=False) == 0
    shown = capsys.readouterr().out
    assert f"Usage: {name}" in shown
    assert PYTHON_TYPES.findall(shown) == []
    assert not re.search(r"[{}]", shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "serve --http-port 9000 --gateway-port 9000",
            "--http-port and --gateway-port are both 9000",
        ),
        (
            "serve --gateway-port 0 --gateway-keys gone",
            "the keys in gone cannot be read: No such file",
        ),
        ("serve --gateway-image-host cdn.example", "--gateway-image-host needs --gateway-port"),
        ("serve --gateway-port 0 --gateway-tls-ca gone", "gone cannot be read; the options --tls-"),
        ("serve checkpoint", "unexpected argument 'checkpoint'; name a checkpoint with --model"),
        ("serve --repository gone", "no model repository at gone: it has no lmm/1/model.json"),
        ("serve --options gone.json", "cannot read gone.json: No such file or directory"),
        ("serve --set max_num_seqs", "--set must have the form KEY=VALUE, not 'max_num_seqs'"),
        ("serve --set max_num_seq=8", "--set: unknown key 'max_num_seq'; did you mean"),
        ("serve --set max_num_seqs=none", "--set: 'max_num_seqs' must be a positive whole number"),
        pytest.param(
            "serve --set device=cuda:99",
            "'device' = 'cuda:99', but this machine has no GPU that CUDA can use",
            marks=pytest.mark.skipif(gpu_count() > 0, reason="needs a machine without a GPU"),
        ),
        ("--version", f"vlora {vlora.__version__}\n"),
        ("models check gone", "no checkpoint at gone: the folder does not exist"),
        ("serve --model gone", "/gone: the folder does not exist"),
        ("watch gone.yaml", "gone.yaml cannot be read: No such file or directory"),
        ("gateway --grpc nohost", "--grpc takes HOST:PORT, as in 127.0.0.1:8001, not 'nohost'"),
        ("gateway --grpc h:99999", "--grpc takes HOST:PORT"),
        ("serv", "No such command 'serv'. Did you mean 'serve'?"),
    ],
)
def test_a_mistake_in_a_command_is_named_with_what_would_be_right(
    arguments: str, message: str
) -> None:
    done = CliRunner().invoke(app, arguments.split())
    assert done.exit_code in (1, 2) or arguments == "--version"
    assert message in done.output
    assert "Errno" not in done.output


@pytest.mark.parametrize(
    ("variable", "valid"),
    [("VLORA_ATMM", "'cpu' or"), ("VLORA_KERNELS", "'cpu' or"), ("VLORA_ISA", "scalar")],
)
@pytest.mark.parametrize("command", ["capacity", "serve"])
def test_a_variable_that_selects_no_kernels_is_refused_by_every_command(
    variable: str, valid: str, command: str
) -> None:
    environment = {**os.environ, variable: "x"}  # The kernels read it when they are loaded.
    done = subprocess.run(
        python_command("vlora.cli", command), env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: {variable}='x'; ")
    assert valid in done.stderr


@pytest.mark.parametrize(
    ("error", "file"),
    [
        (OSError(errno.ENOSPC, "?", "out/model"), "out/model"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "a file"),
    ],
)
def test_a_full_disk_is_told_in_a_sentence(
    error: Exception, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlora.launcher.repository.write_repository", Mock(side_effect=error))
    done = CliRunner().invoke(app, ["repository", "out"])
    assert (done.exit_code, done.output) == (
        1,
        f"error: {file} cannot be written or read: No space left on device\n",
    )


def test_an_adapter_that_the_gateway_would_hide_is_refused(own: dict[str, Path]) -> None:
    (own["--options"].with_name("one") / "base").mkdir()
    given = ["--repository", str(own["--repository"]), "--gateway-port", "0"]
    done = CliRunner().invoke(app, ["serve", *given])
    assert "an adapter is named 'base', which is the name of the base model" in done.output


RAISED = "import resource, vlora.net; vlora.net.raise_file_limit(); print(resource.getrlimit(7)[0])"


@pytest.mark.parametrize(
    ("limit", "command", "shown"),
    [
        ("-n 64", python_command("vlora.cli", "serve"), "error: this process may open 64 files"),
        ("-n 64", python_command("vlora.cli", "gateway"), "error: this process may open 64 files"),
        ("-n 300; ulimit -Sn 64", [sys.executable, "-c", RAISED], "300\n"),
    ],
)
def test_a_low_limit_of_open_files_is_raised_or_told(
    limit: str, command: list[str], shown: str
) -> None:
    line = f"ulimit {limit}; {shlex.join(command)}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.stdout + done.stderr).startswith(shown)


def test_characters_that_the_output_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "ascii"))
    monkeypatch.setattr("vlora.cli.app", lambda: print("é", flush=True))
    main()
    assert output.getvalue() == b"\\xe9\n"


def test_serve_passes_options_on_to_its_gateway(
    own: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Mock(side_effect=ServerError("enough"))
    monkeypatch.setattr("vlora.cli.serve.GatewayProcess", started)
    words = "--gateway-image-host a.example --gateway-image-host b:1 --gateway-max-body 3"
    words += " --gateway-tls-ca ca.pem --gateway-tls-name vlora --grace 7"
    monkeypatch.chdir(own["--options"].parent)
    Path("ca.pem").touch()
    given = ["--repository", str(own["--repository"]), "--gateway-port", "0", *words.split()]
    assert "enough" in CliRunner().invoke(app, ["serve", *given]).output
    *_, arguments = started.call_args.args
    tls = [f"--tls-ca={Path('ca.pem').absolute()}", "--tls-name=vlora"]
    others = ["--image-host=a.example", "--image-host=b:1", "--max-body=3"]
    assert arguments == [*others, *tls, "--grace=7"]


def test_a_command_without_arguments_uses_the_demo() -> None:
    done = CliRunner().invoke(app, ["adapters", "list"])
    assert done.exit_code == 0, done.exception
    assert "counting" in done.output
