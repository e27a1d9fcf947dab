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


def quota_of(tmp_path: Path, lines: str, files: dict[str, str]) -> float | None:
    (tmp_path / "self").write_text(lines)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return cpu_quota(tmp_path / "self", tmp_path / "cgroup")


def test_a_quota_of_cgroup_version_2_is_read(tmp_path: Path) -> None:
    assert quota_of(tmp_path, "0::/pod/a\n", {"pod/a/cpu.max": "150000 100000\n"}) == 1.5


def test_the_tightest_quota_of_all_parent_groups_is_used(tmp_path: Path) -> None:
    files = {"pod/a/cpu.max": "max 100000", "pod/cpu.max": "50000 100000", "cpu.max": "400000 1000"}
    assert quota_of(tmp_path, "0::/pod/a\n", files) == 0.5


def test_inside_a_container_the_root_is_its_own_group(tmp_path: Path) -> None:
    lines = "0::/docker/of-the-host\n"
    assert quota_of(tmp_path, lines, {"cpu.max": "200000 100000\n"}) == 2.0


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_a_quota_of_cgroup_version_1_is_read(tmp_path: Path, mount: str) -> None:
    files = {f"{mount}/a/cpu.cfs_quota_us": "250000", f"{mount}/a/cpu.cfs_period_us": "100000"}
    lines = "4:cpu,cpuacct:/a\n3:memory:/a\n0::/\n" if "," in mount else "4:cpu:/a\n0::/\n"
    assert quota_of(tmp_path, lines, files) == 2.5


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("0::/a\n", {"a/cpu.max": "max 100000"}),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
        ("0::/a\n", {"a/cpu.max": "nonsense"}),
        ("", {}),
    ],
)
def test_a_group_without_a_quota_has_no_limit(
    tmp_path: Path, lines: str, files: dict[str, str]
) -> None:
    assert quota_of(tmp_path, lines, files) is None


def test_a_kernel_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path) is None
