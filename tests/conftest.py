"""Fixtures for all tests: a tiny untrained checkpoint and random adapters, made once per run."""

from __future__ import annotations

import os
import random
from collections.abc import Generator
from pathlib import Path

import pytest

# GPU kernels run on CPU tensors, except for `make gpu`. `triton` reads this when it is first
# imported.
if "VLORA_GPU_TESTS" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")


SERVED = Path(__file__).parent / "triton"
SERVERS = ("server", "demo_server")
"""Fixtures of servers that the tests of several files share."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="run the files, and the tests of each file, in an order drawn from this seed",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("shuffle")
    return [] if seed is None else [f"shuffle: {seed}"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the tests if asked to, and put tests marked `last` at the end of their file.

    In a run with workers, keep the tests of a file in one worker, and files whose tests share a
    server as well. Start files with servers first, then slow ones: they take longest.
    """
    files = list(dict.fromkeys(item.path for item in items))
    if (seed := config.getoption("shuffle")) is not None:
        # Every worker must draw the same order.
        rng = random.Random(seed)
        rng.shuffle(files)
        rng.shuffle(items)
    position = {path: number for number, path in enumerate(files)}
    items.sort(key=lambda item: (position[item.path], bool(item.get_closest_marker("last"))))
    if not hasattr(config, "workerinput"):
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    server_of = {
        item.path: name
        for item in items
        for name in SERVERS
        # A module's own fixture of this name is another server.
        if name in getattr(item, "fixturenames", ()) and name not in vars(item.module)  # type: ignore[attr-defined]
    }
    for item in items:
        item.add_marker(pytest.mark.xdist_group(server_of.get(item.path, str(item.path))))
    items.sort(key=lambda item: (SERVED not in item.path.parents, item.path not in slow))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Escape lone surrogates in what a worker reports, which cannot be sent as UTF-8."""
    return _without_surrogates((yield))


def _without_surrogates(value: object) -> object:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {key: _without_surrogates(item) for key, item in value.items()}
        case list():
            return [_without_surrogates(item) for item in value]
        case tuple():
            return tuple(_without_surrogates(item) for item in value)
    return value


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_worker() -> None:
    """Use one torch thread in each worker: threads that wait for a busy core would use several
    times the CPU time. Tests of several threads set their number."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untrained but complete checkpoint of the demo architecture (seed 0)."""
    from tools.demo.build import build

    return build(tmp_path_factory.mktemp("checkpoint"), seed=0)


@pytest.fixture(scope="session")
def adapters_dir(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one random adapter per entry of `tests.support.make_adapters.SPECS`."""
    from tests.support.make_adapters import make_adapters

    return make_adapters(checkpoint, tmp_path_factory.mktemp("adapters"))
