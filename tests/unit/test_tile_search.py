"""Tests of Algorithm 2 on a simulated machine whose best tiles are known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from vlora.atmm import tiles
from vlora.atmm.cpu import Cpu
from vlora.atmm.search.search import (
    ROW_STEP,
    Profile,
    Shape,
    Space,
    State,
    choose,
    duel,
    filled,
    profile,
    search,
    sides_of,
    wins,
)


def rows_bucket(shape: Shape) -> str:
    bucket = 1 << (shape.rows - 1).bit_length()
    return f"{shape.operation}/{bucket}/{shape.d_in}/{shape.d_out}/{shape.rank}/{shape.segments}"


class Machine:
    """Backend where small tiles are best for few rows and large ones for many; counts its calls."""

    def __init__(self, die_after: int | None = None) -> None:
        self.prepared: list[str] = []
        self._die_after = die_after

    key = staticmethod(rows_bucket)

    def built_in(self, shape: Shape) -> str:
        return "large"

    def configs(self, shape: Shape) -> Sequence[str]:
        return ["small", "large", "absurd"]

    def prepare(
        self, shape: Shape, configs: Sequence[str], *, cold: bool
    ) -> Mapping[str, Callable[[], None]]:
        if not cold and len(configs) > 2:  # This is the search, not a duel of two tiles.
            if self._die_after is not None and len(self.prepared) >= self._die_after:
                raise KeyboardInterrupt
            self.prepared.append(rows_bucket(shape))
        microseconds = {
            "small": 300 if shape.rows < ROW_STEP else 900,
            "large": 600,
            "absurd": 4000,
        }
        return {name: spin(microseconds[name]) for name in configs}


class Time:
    """Clock that only `spin` advances, so that other work on the machine cannot affect a test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Time()


def spin(microseconds: int) -> Callable[[], None]:
    def call() -> None:
        CLOCK.now += microseconds * 1e-6

    return call


SPACE = Space(sides=((64, 64),), ranks=(8,), segments=(1,), max_rows=64)


def test_rows_are_powers_of_two_then_multiples_of_the_step_in_the_paper() -> None:
    space = Space(sides=((1024, 1024),), memory_bytes=200 * 2048 * 4)
    assert space.rows(1024, 1024) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192]
    assert Space(sides=(), max_rows=20).rows(8, 8) == [1, 2, 4, 8, 16]


def test_shapes_of_one_key_are_profiled_once_at_the_end_of_their_bucket() -> None:
    shapes = Space(sides=((64, 64),), ranks=(8,), segments=(1, 4), max_rows=160).shapes(rows_bucket)
    assert shapes.pop() == Shape("merge", 64, 64, 8, 1, 64)
    assert [s.rows for s in shapes if s.segments == 1] == [1, 2, 4, 8, 16, 32, 64, 128, 160]
    assert [s.rows for s in shapes if s.segments == 4] == [1, 2, 4, 8, 16, 32]


def test_the_best_tile_of_each_shape_is_found(tmp_path: Path) -> None:
    machine = Machine()
    shapes = SPACE.shapes(machine.key)
    found = {
        entry["shape"]["rows"]: entry["config"]
        for entry in search(machine, shapes, state(tmp_path), rounds=5, clock=CLOCK)
        if entry["shape"]["operation"] == "apply"
    }
    assert found == dict.fromkeys((1, 2, 4, 8, 16), "small") | {32: "large", 64: "large"}


def test_an_interrupted_search_resumes_where_it_stopped(tmp_path: Path) -> None:
    machine = Machine(die_after=3)
    shapes = SPACE.shapes(machine.key)
    with pytest.raises(KeyboardInterrupt):
        list(search(machine, shapes, state(tmp_path), rounds=3, clock=CLOCK))
    with (tmp_path / "state").open("a") as file:
        file.write('{"key": "cut o')
    resumed = Machine()
    entries = list(search(resumed, shapes, state(tmp_path), rounds=3, clock=CLOCK))
    assert len(entries) == len(shapes)
    assert len(resumed.prepared) == len(shapes) - 3
    assert not set(resumed.prepared) & set(machine.prepared)


def test_segment_counts_between_two_searched_ones_use_the_choice_of_the_smaller_one() -> None:
    one, four = (Shape("apply", 64, 64, 8, segments, 16) for segments in (1, 4))
    merge = Shape("merge", 64, 64, 8, 1, 64)
    found = [
        {"key": rows_bucket(shape), "shape": vars(shape), "config": config, "hot_us": 1.0}
        for shape, config in ((one, "a"), (four, "b"), (merge, "c"))
    ]
    whole = filled(found, rows_bucket)
    assert [entry["hot_us"] for entry in whole] == [1.0] * 3 + [None] * 7
    table = {entry["key"]: entry["config"] for entry in whole}
    assert [table[f"apply/16/64/64/8/{segments}"] for segments in (1, 2, 4, 8)] == [*"aabb"]
    assert table["merge/64/64/64/8/32"] == "c"
    assert len(table) == 4 + 6


def test_state_of_another_device_is_discarded(tmp_path: Path) -> None:
    state(tmp_path).add({"key": "k"})
    assert state(tmp_path).done == {"k": {"key": "k"}}
    assert State(tmp_path / "state", "another").done == {}


def test_a_clearly_slower_tile_is_dropped_early() -> None:
    good, bad = Mock(side_effect=spin(500)), Mock(side_effect=spin(5000))
    found = profile({"good": good, "bad": bad}, rounds=9, warm=False, clock=CLOCK)
    assert found.best == "good"
    assert found.finalists == ("good",)
    assert bad.call_count == 2  # One call warms up and one determines the sample size.


def test_the_choice_considers_hot_and_cold_times() -> None:
    hot = Profile({"a": 1.0, "b": 1.1, "c": 0.9}, ("a", "b", "c"))
    cold = Profile({"a": 2.0, "b": 1.5}, ("a", "b"))
    assert choose(hot, cold) == "b"


def noisy(microseconds: int, spread: int, seed: int) -> Callable[[], None]:
    draws = random.Random(seed)
    return lambda: spin(microseconds + draws.randint(-spread, spread))()


@pytest.mark.parametrize(
    ("ours", "spread", "won"), [(980, 2, True), (980, 400, False), (1000, 2, False)]
)
def test_a_gain_must_exceed_the_noise_of_the_duel(ours: int, spread: int, won: bool) -> None:
    duels = [
        duel(noisy(ours, spread, seed), noisy(1000, spread, seed + 10), warm=False, clock=CLOCK)
        for seed in (1, 2)
    ]
    assert wins(*duels) is won


def state(folder: Path) -> State:
    return State(folder / "state", "device")


def test_a_table_is_written_atomically_and_names_its_device(tmp_path: Path) -> None:
    device = Cpu("AuthenticAMD", 26, 2, 48, 1024, 32768)
    path = tiles.table_path(device, "avx512", "fp32", tmp_path)
    assert path.name == "amd-f26-m2-48-1024-32768-avx512-fp32.json"
    shape = Shape("apply", 64, 32, 16, 4, 8)
    key = f"{(32 << 96) + (64 << 64) + (1 << 40) + (2 << 32) + (4 << 24) + (3 << 16):032x}"
    found = [
        {"key": key, "shape": vars(shape), "config": "small", "hot_us": 1.5, "cold_us": 2.0},
        {"key": "0" * 32, "config": "large"},
    ]
    tiles.write_table(path, device, "avx512", "fp32", found, threads=1)
    written = json.loads(path.read_text())
    assert written["version"] == 2
    assert written["entries"] == {key: ["small", 1.5, 2.0], "0" * 32: ["large", None, None]}
    assert tiles.read_table(path)[int(key, 16)] == tiles.TableEntry(
        "apply", "fp32", 8, 64, 32, 16, 4, 2, "small", 1.5, 2.0
    )
    assert written["device"]["family"] == 26
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_table_of_version_1_has_tiles_and_no_microseconds(tmp_path: Path) -> None:
    entries = {"00000400000004000000000003010000": "r8-s64-e64-d0-p64"}
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"version": 1, "entries": entries}))
    (entry,) = tiles.read_table(path).values()
    assert (entry.rows, entry.d_in, entry.d_out, entry.rank) == (2, 1024, 1024, 8)
    assert (entry.segments, entry.threads, entry.hot_us, entry.cold_us) == (1, 1, None, None)
    for committed in tiles.TABLES.glob("*-fp32.json"):
        assert len(tiles.read_table(committed)) > 100


def test_the_device_is_read_from_linux(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: hidden\n"
    )
    for index, (level, kind, size) in enumerate(
        ((1, "Data", "32K"), (1, "Instruction", "64K"), (2, "Unified", "1024K"))
    ):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    assert Cpu.here(tmp_path) == Cpu("GenuineIntel", 6, 85, 32, 1024, 0)


def test_sides_of_a_checkpoint_combine_targets_that_share_an_input(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"text_config": sizes | {"intermediate_size": 96}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sides_of(tmp_path) == ((64, 128), (64, 64), (64, 192), (96, 64))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="hidden_size"):
        sides_of(tmp_path)
