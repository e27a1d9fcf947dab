"""Validation of compose.yaml with the schema of the Compose specification."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import deploy_kit as kit

COMPOSE = kit.DOCKER / "compose.yaml"


def check(tools: Path, file: Path) -> str:
    return kit.output_of(
        [tools / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", file]
    )


def test_the_file_is_valid(tools: Path) -> None:
    assert "ok" in check(tools, COMPOSE)


def test_the_check_notices_an_unknown_key(tools: Path, tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE.read_text().replace("shm_size:", "shm:"))
    with pytest.raises(pytest.fail.Exception, match="shm"):
        check(tools, file)
