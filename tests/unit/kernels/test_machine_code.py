"""Tests of the disassembled compiled kernels: instruction sets and exit handlers."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field

import pytest

from vlora import native

RANKS = {"scalar": 0, "twin": 0, "avx2": 1, "avx512": 2}
RANKS |= {"avx512_vnni": 3, "avx512_bf16": 4, "amx": 5}
"""Instruction sets by the namespace of their code; each one includes those of a lower rank."""
NAMESPACE = re.compile("|".join(f"{len(name)}{name}(?![a-z_])" for name in RANKS))
"""A namespace in a mangled name."""
FUNCTION = re.compile(r"^([0-9a-f]+) <(.+)>:$")
REFERENCE = re.compile(r"([0-9a-f]+) <[^>+]+>$")
AVX512 = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])\b")


@dataclass
class Function:
    """One function of the disassembled module.

    name: mangled. rank: of the highest instruction set among its instructions.
    calls: addresses that its instructions refer to.
    exit_handlers: whether it registers a function to be called at exit.
    """

    name: str
    rank: int = 0
    calls: set[int] = field(default_factory=set)
    exit_handlers: bool = False

    def add(self, instruction: str) -> None:
        self.rank = max(self.rank, _rank(instruction))
        self.exit_handlers |= "__cxa_atexit" in instruction
        if match := REFERENCE.search(instruction):
            self.calls.add(int(match[1], 16))

    @property
    def allowed(self) -> int:
        """Return the rank of the highest set in its name, 0 for code that runs on every CPU."""
        names = (name.lstrip("0123456789") for name in NAMESPACE.findall(self.name))
        return max((RANKS[name] for name in names), default=0)

    @property
    def is_clone(self) -> bool:
        """Return whether only its own object calls it: a clone of the compiler, `name.isra.0`."""
        return "." in self.name


@pytest.fixture(scope="module")
def functions() -> dict[int, Function]:
    """Return the functions of the compiled module by address."""
    try:
        module = native.kernels().__file__
    except ImportError as error:
        pytest.skip(str(error))
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    command = ["objdump", "-d", "--no-show-raw-insn", "-w", module]
    functions: dict[int, Function] = {}
    current = Function("")
    for line in subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines():
        if match := FUNCTION.match(line):
            current = functions[int(match[1], 16)] = Function(match[2])
        elif "\t" in line:
            current.add(line.split("\t")[1])
    return functions


def _rank(instruction: str) -> int:
    operation = instruction.split(maxsplit=1)[0]
    if operation.startswith(("tile", "ldtile", "tdp")):
        return RANKS["amx"]
    if "bf16" in operation:
        return RANKS["avx512_bf16"]
    if operation.startswith("vpdp"):
        return RANKS["avx512_vnni"]
    if AVX512.search(instruction):
        return 2
    return int(operation.startswith("v"))


def test_code_uses_no_instruction_set_above_that_of_its_namespace(
    functions: dict[int, Function],
) -> None:
    assert {function.allowed for function in functions.values()} == set(RANKS.values())
    clones = {address: clone for address, clone in functions.items() if clone.is_clone}
    for _ in clones:  # clones may call each other
        for function in functions.values():
            called = (clones[address].rank for address in function.calls & clones.keys())
            function.rank = max(function.rank, *called, 0)
    above = [f.name for f in functions.values() if not f.is_clone and f.rank > f.allowed]
    assert above == []


def test_nothing_of_ours_is_destroyed_at_exit(functions: dict[int, Function]) -> None:
    callers = [function.name for function in functions.values() if function.exit_handlers]
    assert [name for name in callers if "5vlora" in name or name.startswith("_GLOBAL__")] == []
