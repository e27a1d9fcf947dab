"""Tests of the division of cores between the two processes: affinity, quotas, given numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlora.cores import Split, cpu_quota, split_cores, usable_cores


@pytest.mark.parametrize(
    ("cores", "split", "by_quota"),
    [
        (1, (1, 1), (1, 1)),
        (2, (2, 1), (1, 1)),
        (4, (4, 1), (3, 1)),
        (16, (16, 4), (12, 4)),
    ],
)
def test_the_encoder_gets_a_quarter_and_the_engine_all_cores_or_the_rest_of_a_quota(
    cores: int, split: tuple[int, int], by_quota: tuple[int, int]
) -> None:
    assert split_cores(usable_cores(cores, None)) == Split(*split)
    assert split_cores(usable_cores(64, cores), by_quota=True) == Split(*by_quota)


@pytest.mark.parametrize(
    ("affinity", "quota", "threads"),
    [
        (16, 4.0, 4),
        (2, 4.0, 2),
        (16, 0.25, 1),
        (16, 0.5, 1),
        (16, 1.4, 1),
        (16, 1.5, 2),
        (16, 2.1, 2),
        (4, 3.75, 4),
        (0, None, 1),
    ],
)
def test_a_quota_is_rounded_to_whole_cores_and_at_least_one(
    affinity: int, quota: float | None, threads: int
) -> None:
    assert usable_cores(affinity, quota) == threads


def test_explicit_numbers_are_not_changed() -> None:
    for by_quota in (False, True):
        assert split_cores(4, engine=3, by_quota=by_quota) == Split(3, 1)
        assert split_cores(1, engine=5, encoder=6, by_quota=by_quota) == Split(5, 6)
    assert split_cores(16, encoder=7) == Split(16, 7)
    assert split_cores(16, encoder=7, by_quota=True) == Split(9, 7)
    assert split_cores(4, encoder=6, by_quota=True) == Split(1, 6)


V1 = {"a/cpu.cfs_quota_us": "250000", "a/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("lines", "files", "quota"),
    [
        ("0::/pod/a\n", {"pod/a/cpu.max": "150000 100000\n"}, 1.5),
        (  # The tightest quota of all parent groups is used.
            "0::/pod/a\n",
            {
                "pod/a/cpu.max": "max 100000",
                "pod/cpu.max": "50000 100000",
                "cpu.max": "400000 1000",
            },
            0.5,
        ),
        # Inside a container, the root is its own group.
        ("0::/docker/of-the-host\n", {"cpu.max": "200000 100000\n"}, 2.0),
        # Version 1 of control groups.
        ("4:cpu:/a\n", {f"cpu/{name}": text for name, text in V1.items()}, 2.5),
        (
            "4:cpu,cpuacct:/a\n3:memory:/a\n0::/\n",
            {f"cpu,cpuacct/{name}": text for name, text in V1.items()},
            2.5,
        ),
        # No quota.
        ("0::/a\n", {"a/cpu.max": "max 100000"}, None),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/a\n", {"a/cpu.max": "nonsense"}, None),
        ("", {}, None),
        (None, {}, None),
    ],
)
def test_the_quota_of_the_process_is_read_from_its_control_groups(
    tmp_path: Path, lines: str | None, files: dict[str, str], quota: float | None
) -> None:
    if lines is not None:
        (tmp_path / "self").write_text(lines)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert cpu_quota(tmp_path / "self", tmp_path / "cgroup") == quota
