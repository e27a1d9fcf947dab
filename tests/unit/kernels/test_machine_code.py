"""The machine code of the compiled kernels, disassembled: instruction sets and exit handlers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator

import pytest

from vlora import native

RANKS = {"scalar": 0, "twin": 0, "avx2": 1, "avx512": 2, "avx512_bf16": 3, "amx": 4}
"""Instruction sets by the namespace of their code; each one includes those of a lower rank."""
NAMESPACE = re.compile("|".join(f"{len(name)}{name}(?![a-z_])" for name in RANKS))
"""A namespace in a mangled name."""
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
AVX512 = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])\b")


@pytest.fixture(scope="module")
def disassembled() -> list[tuple[str, str]]:
    """Return (function, instruction) of the compiled module."""
    try:
        module = native.kernels().__file__
    except ImportError as error:
        pytest.skip(str(error))
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    command = ["objdump", "-d", "--no-show-raw-insn", "-w", module]
    return list(_instructions(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout))


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    function = ""
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            function = match[1]
        elif "\t" in line:
            yield function, line.split("\t")[1]


def _rank(instruction: str) -> int:
    operation = instruction.split(maxsplit=1)[0]
    if operation.startswith(("tile", "ldtile", "tdp")):
        return 4
    if "bf16" in operation:
        return 3
    if AVX512.search(instruction):
        return 2
    return int(operation.startswith("v"))


def _rank_of_namespace(function: str) -> int:
    """Return the rank of the highest set named in a mangled name, 0 for code of all CPUs."""
    names = (name.lstrip("0123456789") for name in NAMESPACE.findall(function))
    return max((RANKS[name] for name in names), default=0)


def test_code_uses_no_instruction_set_above_that_of_its_namespace(
    disassembled: list[tuple[str, str]],
) -> None:
    used: dict[str, int] = defaultdict(int)
    for function, instruction in disassembled:
        used[function] = max(used[function], _rank(instruction))
    allowed = {function: _rank_of_namespace(function) for function in used}
    assert set(allowed.values()) == set(RANKS.values()), "all sets are built"
    assert {name: rank for name, rank in used.items() if rank > allowed[name]} == {}


def test_nothing_of_ours_is_destroyed_at_exit(disassembled: list[tuple[str, str]]) -> None:
    callers = {function for function, instruction in disassembled if "__cxa_atexit" in instruction}
    assert [name for name in callers if "5vlora" in name or name.startswith("_GLOBAL__")] == []
