"""Tests of many broken adapters: none stops the server or affects another, and each is reported
with its file."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.support.adapter_store import load_and_pack
from tests.support.small_adapter import edit_config, edit_tensors
from vlora import cli
from vlora.adapters import patterns
from vlora.adapters.catalog import find_folders
from vlora.adapters.files import load_adapter
from vlora.adapters.model_shape import ModelShape
from vlora.adapters.peft import USED
from vlora.adapters.store import AdapterStore
from vlora.errors import InvalidArgument
from vlora.file_names import printable
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.weights.safetensors import open_tensors

Change = Callable[[Path], object]
CONFIG, WEIGHTS, EXTRA, HEAD = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "vlora.json",
    "head.safetensors",
)
HEALTHY = ("a-healthy", "z-healthy")


def config(**changes: Any) -> Change:
    return lambda folder: edit_config(folder, **changes)


def written(file: str, content: bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(content)


def replaced(file: str, by: Callable[[Path], object]) -> Change:
    """Return a change that replaces the file by what `by` creates at its path."""

    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        by(folder / file)

    return change


def weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    return lambda folder: edit_tensors(folder, edit)


def first(tensors: dict[str, torch.Tensor]) -> str:
    return min(tensors)


def cut(file: str, size: int) -> Change:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


def declares(dtype: str, *shape: int, size: int | None = None) -> Change:
    """Return a change to a weights file that declares one tensor; it is sparse, so it takes no
    disk space."""

    def change(folder: Path) -> None:
        key = min(load_file(folder / WEIGHTS))
        width = {"F32": 4, "F16": 2, "F8_E4M3": 1, "I64": 8}[dtype]
        end = math.prod(shape) * width if size is None else size
        header = json.dumps({key: {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}})
        with (folder / WEIGHTS).open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header.encode())
            file.truncate(8 + len(header) + end)

    return change


def renamed(old: str, new: str) -> Change:
    """Return a change that renames the file's keys by a regular expression."""
    return weights(
        lambda tensors: [
            tensors.update({re.sub(old, new, key): tensors.pop(key)}) for key in sorted(tensors)
        ]
    )


def head(labels: Any, tasks: Any = ("classify",), **tensors: torch.Tensor) -> Change:
    def change(folder: Path) -> None:
        declared = {"head": {"labels": labels, "tasks": tasks}}
        (folder / EXTRA).write_text(json.dumps(declared))
        save_file(tensors, folder / HEAD)

    return change


def accuracy(keys: Iterable[str]) -> bytes:
    return json.dumps({"accuracy": dict.fromkeys(keys, 0.5)}).encode()


SKILL = {"name": "a", "task": "vqa ", "accuracy": 1, "words": []}
TWO = {"weight": torch.ones(2, 192), "bias": torch.ones(2)}

ZOO: dict[str, tuple[str, Change]] = {
    # Configs that are no JSON object.
    "config-empty": (CONFIG, written(CONFIG, b"")),
    "config-null": (CONFIG, written(CONFIG, b"null")),
    "config-deep-lists": (CONFIG, written(CONFIG, b"[" * 100_000)),
    "config-noise": (CONFIG, written(CONFIG, bytes(range(256)) * 4)),
    "config-huge": (CONFIG, written(CONFIG, b" " * (1 << 21) + b"{}")),
    "config-number": (CONFIG, written(CONFIG, b'{"r": ' + b"9" * 5000 + b"}")),
    "config-cut": (CONFIG, cut(CONFIG, 200)),
    "config-gone": (CONFIG, lambda folder: (folder / CONFIG).unlink()),
    # Entries that are no regular files.
    "config-folder": (CONFIG, replaced(CONFIG, lambda path: path.mkdir())),
    "config-pipe": (CONFIG, replaced(CONFIG, os.mkfifo)),
    "config-device": (CONFIG, replaced(CONFIG, lambda path: path.symlink_to("/dev/zero"))),
    "config-loop": (CONFIG, replaced(CONFIG, lambda path: path.symlink_to(path))),
    "weights-folder": (WEIGHTS, replaced(WEIGHTS, lambda path: path.mkdir())),
    "weights-pipe": (WEIGHTS, replaced(WEIGHTS, os.mkfifo)),
    "weights-device": (WEIGHTS, replaced(WEIGHTS, lambda path: path.symlink_to("/dev/zero"))),
    "weights-gone": (WEIGHTS, lambda folder: (folder / WEIGHTS).unlink()),
    "extra-folder": (EXTRA, replaced(EXTRA, lambda path: path.mkdir())),
    "extra-pipe": (EXTRA, replaced(EXTRA, os.mkfifo)),
    "link-loop": (CONFIG, lambda folder: (shutil.rmtree(folder), folder.symlink_to(folder))),
    "link-nowhere": (CONFIG, lambda folder: (shutil.rmtree(folder), folder.symlink_to("none"))),
    # Patterns.
    "pattern-catastrophe": (CONFIG, config(target_modules=r"(.|..)*\.")),
    "pattern-ahead": (CONFIG, config(alpha_pattern={r"(?=(((.|..)+)+)\.$)": 1})),
    "pattern-nested": (CONFIG, config(rank_pattern={"(" * 500 + "a" + "){1,9}" * 500: 1})),
    "pattern-open-end": (CONFIG, config(exclude_modules=".*")),
    "names-surrogate": (CONFIG, config(target_modules=["q_proj", "\ud800"])),
    "names-many": (CONFIG, config(target_modules=[f"m{i}" for i in range(50_000)])),
    "key-surrogate": (CONFIG, config(**{"\ud800": 1})),
    "key-long": (CONFIG, config(**{"k" * 100_000: 1})),
    # Weights.
    "weights-cut-header": (WEIGHTS, cut(WEIGHTS, 77)),
    "weights-cut": (WEIGHTS, cut(WEIGHTS, -1)),
    "weights-header-size": (WEIGHTS, written(WEIGHTS, struct.pack("<Q", 1 << 62) + b"{}")),
    "weights-deep-header": (WEIGHTS, written(WEIGHTS, struct.pack("<Q", 50_000) + b"[" * 50_000)),
    "weights-terabyte": (WEIGHTS, declares("F32", 1 << 30, 256)),
    "weights-beyond-file": (WEIGHTS, declares("F32", 1 << 30, 256, size=64)),
    "weights-beyond-all": (WEIGHTS, declares("F32", 1 << 62, 1 << 62, size=64)),
    "weights-complex": (
        WEIGHTS,
        weights(lambda t: t.update({k: t[k].to(torch.cfloat) for k in t})),
    ),
    "weights-scalar": (WEIGHTS, weights(lambda t: t.update({first(t): torch.tensor(1.0)}))),
    "weights-layer-huge": (WEIGHTS, renamed(r"layers\.0\.", f"layers.{'9' * 6000}.")),
    "weights-two-layouts": (WEIGHTS, renamed(r"model\.language_model(.*lora_A)", r"model\1")),
    "invocation-huge": (CONFIG, config(alora_invocation_tokens=[10**4000])),
    "weights-left-over": (WEIGHTS, config(target_modules=["q_proj"])),
    "rank-beyond-floats": (WEIGHTS, config(r=10**399)),
    "rank-huge": (WEIGHTS, lambda folder: (config(r=1 << 30)(folder), huge_rank(folder))),
    # vlora.json and the head.
    "extra-empty": (EXTRA, written(EXTRA, b"")),
    "extra-deep": (EXTRA, written(EXTRA, b"[" * 100_000)),
    "extra-key": (EXTRA, written(EXTRA, b'{"\\ud800": 1}')),
    "extra-tasks": (EXTRA, written(EXTRA, b'{"tasks": ["vqa", null]}')),
    "extra-task-unknown": (EXTRA, written(EXTRA, b'{"tasks": ["vqa", "auto"]}')),
    "extra-task-twice": (EXTRA, written(EXTRA, b'{"tasks": ["vqa", "vqa"]}')),
    "extra-task-of-a-skill": (EXTRA, written(EXTRA, json.dumps({"skills": [SKILL]}).encode())),
    "extra-default-task": (EXTRA, written(EXTRA, b'{"tasks": ["vqa"], "default_task": "refer"}')),
    "extra-default-task-list": (EXTRA, written(EXTRA, b'{"default_task": ["vqa"]}')),
    "extra-tasks-surrogate": (EXTRA, written(EXTRA, b'{"tasks": ["\\udfff"]}')),
    "extra-accuracy-key": (EXTRA, written(EXTRA, b'{"accuracy": {"\\ud800": 0.5}}')),
    "extra-key-twice": (EXTRA, written(EXTRA, b'{"tasks": ["vqa"], "tasks": ["refer"]}')),
    "extra-accuracy": (EXTRA, written(EXTRA, b'{"accuracy": {"vqa": NaN}}')),
    "extra-accuracy-many": (EXTRA, written(EXTRA, accuracy(map(str, range(257))))),
    "extra-accuracy-long": (EXTRA, written(EXTRA, accuracy(["k" * 257]))),
    "extra-huge": (EXTRA, written(EXTRA, accuracy(["k" * (1 << 20)]))),
    "head-undeclared": (EXTRA, lambda folder: save_file(TWO, folder / HEAD)),
    "head-gone": (HEAD, lambda f: (head(["a", "b"], **TWO)(f), (f / HEAD).unlink())),
    "head-pipe": (HEAD, lambda f: (head(["a", "b"], **TWO)(f), replaced(HEAD, os.mkfifo)(f))),
    "head-labels": (EXTRA, head(["a", {"b": 1}], **TWO)),
    "head-labels-many": (EXTRA, head([f"{number}" for number in range(10_001)], **TWO)),
    "head-labels-long": (EXTRA, head(["a", "b" * 257], **TWO)),
    "head-task-unknown": (EXTRA, head(["a", "b"], ["clasify"], **TWO)),
    "head-labels-surrogate": (EXTRA, head(["a", "\udc00"], **TWO)),
    "head-nan": (HEAD, head(["a", "b"], **(TWO | {"bias": torch.tensor([0, math.nan])}))),
    "head-f8": (HEAD, head(["a", "b"], **(TWO | {"bias": torch.ones(2).to(torch.float8_e5m2)}))),
    "head-noise": (HEAD, lambda f: (head(["a", "b"], **TWO)(f), written(HEAD, b"\0" * 99)(f))),
    # Names.
    "[red]markup[bold]": (CONFIG, written(CONFIG, b"")),
    "line\nbreak": (CONFIG, written(CONFIG, b"")),
    "n" * 255: (CONFIG, written(CONFIG, b"")),
    "bad-\udcff\udcfe": ("not UTF-8", lambda folder: None),
}


def huge_rank(folder: Path) -> None:
    """Write A and B of one module with the config's rank of 2^30: 4 TB, none of it on disk."""
    keys = sorted(load_file(folder / WEIGHTS))[:2]
    shapes, header, offset = ((1 << 30, 192), (192, 1 << 30)), {}, 0
    for key, shape in zip(keys, shapes, strict=True):
        size = 4 * math.prod(shape)
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + offset)


@pytest.fixture(scope="module")
def shape(checkpoint: Path) -> ModelShape:
    return adapter_shape(checkpoint, load_config(checkpoint))


@pytest.fixture(scope="module")
def zoo(adapters_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("zoo")
    for name in (*HEALTHY, *ZOO):
        shutil.copytree(adapters_dir / "attention-r4", root / name)
    for name, (_, change) in ZOO.items():
        change(root / name)
    return root


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.2)


@pytest.fixture(scope="module")
def loaded(zoo: Path, shape: ModelShape) -> Iterator[AdapterStore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "SECONDS", 0.2)
        store = AdapterStore(shape)
        load_and_pack(store, find_folders(zoo, {}))
        yield store


def test_healthy_adapters_are_served_in_spite_of_broken_ones(loaded: AdapterStore) -> None:
    assert loaded.names() == HEALTHY
    pairs = loaded.slots.group([(0, "q_proj")]).pairs[0]
    assert len(pairs) == len(HEALTHY)
    assert pairs[0] is not None
    assert pairs[1] is not None
    assert torch.equal(pairs[0].b, pairs[1].b)


@pytest.mark.parametrize("name", ZOO, ids=lambda name: ascii(name)[:30])
def test_each_broken_adapter_is_reported_with_its_file(loaded: AdapterStore, name: str) -> None:
    file, _ = ZOO[name]
    known = name.encode(errors="backslashreplace").decode()
    with pytest.raises(InvalidArgument) as caught:
        loaded.slot(known)
    message = str(caught.value)
    assert message.startswith(f"adapter '{printable(name)}': ")
    assert file in message
    assert message.count("adapter '") == 1
    assert "failed to load" not in message, (
        "the message has a reason rather than an unexpected exception"
    )
    assert len(message.encode()) < 2000


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS, EXTRA, HEAD])
@pytest.mark.parametrize("checks", [1, 2, 3, 4])
def test_a_file_that_becomes_a_pipe_after_some_checks_is_not_read(
    adapters_dir: Path, shape: ModelShape, tmp_path: Path, file: str, checks: int
) -> None:
    folder, look, looks = tmp_path / "a", Path.stat, 0
    shutil.copytree(adapters_dir / "attention-r4", folder)
    head(["a", "b"], **TWO)(folder)

    def check(path: Path, **options: Any) -> os.stat_result:
        nonlocal looks
        found = look(path, **options)
        looks += path.name == file
        if path.name == file and looks == checks:
            replaced(file, os.mkfifo)(folder)
        return found

    def give_up(*_: object) -> None:
        raise TimeoutError("nobody writes to the pipe")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(10)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "stat", check)
            load_adapter("a", folder, shape)
        message = "not a regular file" if looks < checks else ""
    except InvalidArgument as error:
        message = error.message
    finally:
        signal.alarm(0)
    assert "not a regular file" in message


@pytest.mark.parametrize("before", [b"", bytes(9), struct.pack("<Q", 14) + b'{"a": {"": 1}}'])
def test_a_header_that_changes_before_safetensors_reads_it_is_told(
    adapters_dir: Path, shape: ModelShape, tmp_path: Path, before: bytes
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(adapters_dir / "attention-r4", folder)
    whole = (folder / WEIGHTS).read_bytes()
    written(WEIGHTS, before)(folder)

    def open_whole(file: Any) -> Any:
        written(WEIGHTS, whole)(folder)
        return open_tensors(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlora.adapters.tensors.open_tensors", open_whole)
        with pytest.raises(InvalidArgument, match="has changed while it was being read"):
            load_adapter("a", folder, shape)


def test_files_that_grow_and_shrink_while_they_are_read_load_or_are_refused(
    adapters_dir: Path, shape: ModelShape, tmp_path: Path
) -> None:
    folder, closed, outcomes = tmp_path / "a", threading.Event(), set()
    shutil.copytree(adapters_dir / "attention-r4", folder)
    head(["a", "b"], **TWO)(folder)
    files = [folder / name for name in (CONFIG, WEIGHTS, EXTRA, HEAD)]
    whole = [path.read_bytes() for path in files]

    def change() -> None:
        rng = random.Random(4)
        while not closed.is_set():
            which = rng.randrange(len(files))
            files[which].write_bytes(whole[which][: rng.randrange(len(whole[which]))])
            with files[which].open("ab") as file:
                for _ in range(rng.randrange(20)):
                    file.write(bytes(65_536))
            files[which].write_bytes(whole[which])

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(500):
            try:
                outcomes.add(len(load_adapter("a", folder, shape).pairs))
            except InvalidArgument as error:
                outcomes.add(error.message.split(": ")[0])
    finally:
        closed.set()
        changing.join()
    assert outcomes <= {len(load_adapter("a", folder, shape).pairs), "adapter_broken"}


def test_the_maximum_size_of_an_adapter_is_configurable(zoo: Path, shape: ModelShape) -> None:
    store = AdapterStore(shape, max_bytes=1000)
    load_and_pack(store, {"x": zoo / "a-healthy"})
    with pytest.raises(InvalidArgument, match=r"'max_adapter_bytes' allows 1000"):
        store.slot("x")


VALUES = (None, True, 0, -1, 7, 1.5, math.nan, math.inf, 10**400, "", "x", "(", "\ud800", [], [1])
MORE_VALUES = ([None], ["q_proj"], ["\ud800"], {}, {"q_proj": None}, {"x": {}}, [[[[]]]], {"(": 1})


def test_any_value_of_any_key_loads_or_is_rejected(
    adapters_dir: Path, shape: ModelShape, tmp_path: Path
) -> None:
    healthy = adapters_dir / "attention-r4"
    shutil.copytree(healthy, tmp_path / "x")
    for key in (*USED, "use_dora", "something_new"):
        for value in VALUES + MORE_VALUES:
            shutil.copy(healthy / CONFIG, tmp_path / "x")
            edit_config(tmp_path / "x", **{key: value})
            store = AdapterStore(shape)
            store.load({"x": tmp_path / "x"})
            assert not store.table.broken or "failed to load" not in str(store.table.broken["x"]), (
                key,
                value,
            )


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_flipped_bits_load_or_are_rejected(
    adapters_dir: Path, shape: ModelShape, tmp_path: Path, file: str
) -> None:
    healthy = adapters_dir / "attention-r4"
    shutil.copytree(healthy, tmp_path / "x")
    content = (healthy / file).read_bytes()
    rng = random.Random(0)
    for _ in range(150):
        flipped = bytearray(content)
        for _ in range(rng.choice((1, 1, 1, 5, 50))):
            at = rng.randrange(min(len(content), 4000))
            flipped[at] ^= 1 << rng.randrange(8)
        (tmp_path / "x" / file).write_bytes(flipped)
        store = AdapterStore(shape)
        store.load({"x": tmp_path / "x"})
        assert not store.table.broken or "failed to load" not in str(store.table.broken["x"])


def adapters(command: str, checkpoint: Path, root: Path) -> Result:
    """Return the result of `vlora adapters COMMAND`, which has no traceback."""
    result = CliRunner().invoke(
        cli.app, ["adapters", command, "--model", str(checkpoint), "--adapters", str(root)]
    )
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result


@pytest.mark.parametrize(("command", "status"), [("check", 1), ("list", 0)])
def test_the_commands_report_the_zoo_without_a_traceback(
    zoo: Path, checkpoint: Path, command: str, status: int
) -> None:
    result = adapters(command, checkpoint, zoo)
    assert result.exit_code == status, result.output
    for name in (*HEALTHY, "config-deep-lists", "[red]markup[bold]", "weights-complex"):
        assert name in result.output
    assert "config-deep-lists': adapter_config.json is nested" in result.output


def test_a_root_that_is_no_folder_is_reported_in_a_sentence(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert adapters("list", checkpoint, tmp_path / "file").exit_code == 1


def test_listing_adapters_needs_only_the_models_config(
    checkpoint: Path, adapters_dir: Path, tmp_path: Path
) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    result = adapters("list", tmp_path, adapters_dir)
    assert result.exit_code == 0, result.output
    for folder in adapters_dir.iterdir():
        assert folder.name in result.output
