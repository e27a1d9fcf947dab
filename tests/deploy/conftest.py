"""Marks and fixtures of `make deploy-check`, which needs downloads, other programs and minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import deploy_kit as kit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.deploy)


@pytest.fixture(scope="session")
def tools() -> Path:
    """Return the folder of the commands installed from PyPI."""
    return kit.pypi()
