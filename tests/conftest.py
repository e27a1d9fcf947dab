"""Fixtures for all tests: a tiny untrained checkpoint and random adapters, made once per run."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

# GPU kernels run on CPU tensors, except for `make gpu`. `triton` reads this when it is first
# imported.
if "VLORA_GPU_TESTS" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")


SERVERS = ("server", "playground_server")
"""Fixtures of servers that the tests of several files share."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one worker of `make test WORKERS=2`. Start the slow files first.

    Files whose tests share a server stay in one worker as well. A run without workers keeps the
    order of the files.
    """
    if not hasattr(config, "workerinput"):
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    server_of = {
        item.path: name
        for item in items
        for name in SERVERS
        if name in getattr(item, "fixturenames", ())
    }
    for item in items:
        item.add_marker(pytest.mark.xdist_group(server_of.get(item.path, str(item.path))))
    items.sort(key=lambda item: item.path not in slow)


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
