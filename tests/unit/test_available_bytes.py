"""Tests that available memory is the minimum of the machine's and its control groups'."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlora.device.host_memory import available_bytes

MACHINE = "MemTotal:  8000 kB\nMemAvailable:    5000 kB\n"


def written(tmp_path: Path, lines: str, files: dict[str, str]) -> int | None:
    (tmp_path / "meminfo").write_text(MACHINE)
    (tmp_path / "process").write_text(lines)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return available_bytes(tmp_path / "meminfo", tmp_path / "process", tmp_path)


def test_without_a_control_group_the_machines_memory_counts(tmp_path: Path) -> None:
    assert written(tmp_path, "0::/a\n", {"a/memory.max": "max\n"}) == 5000 * 1024
    assert available_bytes(tmp_path / "none", tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ("0::/pod/a\n", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/pod/a\n",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_a_groups_limit_minus_its_use_counts_but_inactive_files_are_free(
    tmp_path: Path, lines: str, names: tuple[str, str, str]
) -> None:
    root = "pod/a" if lines.startswith("0") else "memory/pod/a"
    limit, used, cache = names
    files = {
        f"{root}/{limit}": "3000000\n",
        f"{root}/{used}": "1000000\n",
        f"{root}/memory.stat": f"anon 7\n{cache} 200000\nactive_file 1\n",
    }
    assert written(tmp_path, lines, files) == 2200000
    assert written(tmp_path, lines, files | {f"{root}/{used}": "9000000\n"}) == 1
