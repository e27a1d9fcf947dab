"""The units of the operator: generated kernels, one unit per instruction set and part.

Register tiles are template instances; which of them exist follows from the number of registers.
Nothing generated is committed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kernels
from kernels import CSRC, Unit

SOURCES = ("apply", "products", "merge", "table", "pack")


@dataclass(frozen=True)
class Isa:
    """rows: most rows of a register tile with 1, 2, … panels of 16 columns.

    AVX-512 has 32 registers: rows x panels accumulators, the panels and one row value. AVX2 has
    16, two to a panel, and more rows serve it better than more panels. As many panels as the widest
    tile has are packed interleaved. accumulators: how many hide the latency of a multiply-add.
    """

    base: kernels.Isa
    rows: tuple[int, ...]
    accumulators: int
    registers_per_panel: int
    most_accumulators: int
    parts: tuple[str, ...] = ("fp32", "bf16", "merge", "rows")
    rest: str | None = None
    """Whose kernels serve where there is no part of its own: an instruction set further down."""
    few: str | None = None
    """Whose kernels serve blocks of few rows where pairs are slow, but for a part of that name."""

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def pairs(self) -> bool:
        return "VLORA_HAS_BF16_PRODUCTS" in self.base.defines

    @property
    def apart(self) -> bool:
        """Whether a panel takes two registers, so that even and odd columns can have one each."""
        return self.registers_per_panel > 1


_BF16_ONLY = ("bf16", "merge", "rows", "few")

ISAS = (
    Isa(kernels.AMX, (24, 13, 9, 6), 12, 1, 28, ("limbs",), "avx512_bf16"),
    Isa(kernels.TWIN, (4,), 1, 4, 4, ("bf16", "rows", "limbs"), "scalar", "scalar"),
    Isa(kernels.AVX512_BF16, (24, 13, 9, 6), 12, 1, 28, _BF16_ONLY, "avx512", "avx512"),
    Isa(kernels.AVX512, (24, 13, 9, 6), 12, 1, 28),
    Isa(kernels.AVX2, (6,), 8, 2, 12),
    Isa(kernels.SCALAR, (4,), 1, 4, 4),
)

DIRECT_ROWS = 8
"""Rows that the general registers can address each by a pointer of its own."""
CHAINS = (8, 4, 2, 1)
FEW = (9, 3, 2, 2)
"""Rows of register tiles where few are wanted: each kind is there, and one past DIRECT_ROWS."""


def chains(isa: Isa, rows: int, panels: int) -> int:
    """Partial sums over the depth, for tiles with too few accumulators to hide the latency."""
    registers = rows * panels * isa.registers_per_panel
    for count in CHAINS[::-1]:
        if count * registers >= isa.accumulators:
            break
    while count > 1 and count * registers > isa.most_accumulators:
        count //= 2
    return count


def most_rows(isa: Isa) -> tuple[int, ...]:
    """Of a register tile with 1, 2, … panels."""
    return tuple(map(min, isa.rows, FEW)) if kernels.FEW_TILES else isa.rows


def tiles(isa: Isa) -> Iterator[tuple[int, int]]:
    """(rows, panels) of every register tile."""
    for panels, most in enumerate(most_rows(isa), start=1):
        for rows in range(1, most + 1):
            yield rows, panels


def instances(isa: Isa, part: str) -> Iterator[str]:
    """Assignments that fill the table of kernels."""
    if part == "merge":
        for (storage, name), (rows, panels) in itertools.product(
            (("float", 0), ("uint16_t", 1)), tiles(isa)
        ):
            if rows <= DIRECT_ROWS:
                for field, stream in (("merge", "false"), ("merge_streaming", "true")):
                    yield (
                        f"k.{field}[{name}][{panels - 1}][{rows - 1}] = tile<Fp32,"
                        f" Added<{storage}, {stream}>, {rows}, {panels}, 1, 0, false>;"
                    )
        for rows, panels in tiles(isa):
            if isa.apart and rows <= DIRECT_ROWS:
                yield (
                    f"k.merge_apart[{panels - 1}][{rows - 1}] = tile<Fp32,"
                    f" AddedApart, {rows}, {panels}, 1, 0, false>;"
                )
        return
    dtype = 0 if part == "fp32" else 1
    pairs = isa.pairs and part != "few"
    product = "Fp32" if part == "fp32" else "Bf16Pairs" if pairs else "Bf16Widened"
    ends = {f"shrink[{dtype}]": "ToScratch"}
    if dtype:
        ends["expand[1][1]"] = "Added<uint16_t, false>"
    ends[f"expand[{dtype}][0]"] = "Added<float, false>"
    for side, end in ends.items():
        for rows, panels in tiles(isa):
            at, head = f"[{panels - 1}][{rows - 1}]", f"k.{side}"
            shape = f"{product}, {end}, {rows}, {panels}"
            if part != "few":
                yield f"{head}.packed{at} = tile<{shape}, 1, kRowStride, false>;"
            if rows <= DIRECT_ROWS:
                if part != "few":
                    yield f"{head}.direct{at} = tile<{shape}, 1, 0, false>;"
                yield f"{head}.stream{at} = tile<{shape}, {chains(isa, rows, panels)}, 0, true>;"
    narrow = product.replace("Bf16", "")
    for rows in range(1, most_rows(isa)[0] + 1):
        at, head = f"[kNarrow][{rows - 1}]", f"k.shrink[{dtype}]"
        shape = f"Narrow{narrow}, NarrowToScratch, {rows}, 1"
        if part != "few":
            yield f"{head}.packed{at} = tile<{shape}, 1, kRowStride, false>;"
        if rows <= DIRECT_ROWS:
            if part != "few":
                yield f"{head}.direct{at} = tile<{shape}, 1, 0, false>;"
            yield f"{head}.stream{at} = tile<{shape}, {chains(isa, rows, 1)}, 0, true>;"


def body(isa: Isa, part: str) -> str:
    """What fills the table of kernels with one part of an instruction set."""
    if part == "rows":
        lines = [
            "k.load_rows = load_rows;",
            "k.round_rows = round_rows;",
            "k.widen_panels = widen_panels;",
            "k.split_narrow = split_narrow;",
            "k.pairs_in_registers = kPairs;",
            "k.add_sums = add_sums;",
        ]
    elif part == "limbs":
        lines = ["k.limbs.of_rows = limbs_of_rows;", "k.limbs.of_columns = limbs_of_columns;"]
        for storage, dtype in (("float", 0), ("uint16_t", 1)):
            lines.append(f"k.limbs.merge[{dtype}] = merge_limbs<{storage}, false>;")
            lines.append(f"k.limbs.merge_streaming[{dtype}] = merge_limbs<{storage}, true>;")
    else:
        lines = list(instances(isa, part))
    filled = "".join(f"  {line}\n" for line in lines)
    return f"void fill_{part}(Kernels& k) {{\n{filled}}}\n"


def headers(isa: Isa, part: str) -> tuple[str, ...]:
    """What a part is made of."""
    if part == "limbs":
        return (f"runtime/tile_{isa.name}.h", "runtime/tile_product.h", "merge_limbs.h")
    if part == "rows":
        return ("rows.h",)
    return ("deinterleave.h",) if part == "merge" and isa.apart else ("tile.h",)


def kernel_table() -> str:
    """Source of the table of instruction sets."""
    lines = ['// Generated by csrc/atmm/codegen.py.\n#include "atmm/kernels.h"\n']
    lines.append("namespace vlora::atmm {\n")
    for isa in ISAS:
        declared = "".join(f" void fill_{part}(Kernels&);" for part in isa.parts)
        lines.append(f"namespace {isa.name} {{{declared} }}\n")
    lines.append("const Kernels& kernels(runtime::Isa isa) {\n  static const struct All {\n")
    lines.append("    Kernels k[runtime::kIsas] = {}, few[runtime::kIsas] = {};\n    All() {\n")
    for isa in reversed(ISAS):
        here, at = (
            f"runtime::Isa::{isa.base.enumerator}",
            f"k[int(runtime::Isa::{isa.base.enumerator})]",
        )
        # Even filling the table is done with the instructions of the unit.
        lines.append(f"      if (runtime::runs_here({here})) {{\n")
        if isa.rest:
            rest = next(one.base.enumerator for one in ISAS if one.name == isa.rest)
            lines.append(f"        {at} = k[int(runtime::Isa::{rest})];\n")
        lines.append(f'        {at}.name = "{isa.name}";\n')
        most = most_rows(isa)
        lines.append(f"        {at}.bundle = {len(most)};\n")
        lines += [f"        {at}.max_rows[{i}] = {rows};\n" for i, rows in enumerate(most)]
        parts = [part for part in isa.parts if part != "few"]
        lines += [f"        {isa.name}::fill_{part}({at});\n" for part in parts]
        if isa.few:
            of = next(one.base.enumerator for one in ISAS if one.name == isa.few)
            few = f"few[int({here})]"
            lines.append(f"        {few} = k[int(runtime::Isa::{of})];\n")
            if "few" in isa.parts:
                lines.append(f"        {isa.name}::fill_few({few});\n")
            lines.append(f"        {at}.few = &{few};\n")
        lines.append(f"        {at}.tiles = runtime::tile_unit({here});\n")
        lines.append("      }\n")
    lines.append("    }\n  } all;\n  return all.k[int(isa)];\n}\n}  // namespace vlora::atmm\n")
    return "".join(lines)


def configurations() -> str:
    """Source of the tile configurations that the search chooses among (TileConfig's fields)."""
    rows = ["// Generated by csrc/atmm/codegen.py."]
    # Few rows: adapters are streamed once, rows are read where they lie.
    for shrink, expand, prefetch in itertools.product((32, 64), (32, 64), (0, 24, 64, 128)):
        rows.append(f"{{8, {shrink}, {expand}, 0, {prefetch}, false, 0}},")
    # Many rows: blocks of both operands stay in cache.
    for block, shrink, expand, depth in itertools.product(
        (48, 96, 192), (32, 64), (32, 64), (128, 256)
    ):
        rows.append(f"{{{block}, {shrink}, {expand}, {depth}, 0, true, 0}},")
    for block, shrink, expand, depth in itertools.product(
        (24, 32, 48, 96, 192), (32, 64), (32, 64), (128, 256, 512, 1024)
    ):
        rows.append(f"{{{block}, {shrink}, {expand}, {depth}, 0, false, 0}},")
    return "\n".join(rows) + "\n"


def merge_configurations() -> str:
    """The same for the merge: columns of A in cache at a time, lines of W fetched ahead."""
    rows = ["// Generated by csrc/atmm/codegen.py."]
    for expand, columns, prefetch in itertools.product((32, 64), (1024, 2048, 4096), (0, 4, 8)):
        rows.append(f"{{8, 0, {expand}, 0, {prefetch}, true, {columns}}},")
    return "\n".join(rows) + "\n"


def units(build: Path) -> list[Unit]:
    """All units; what is generated lies in `build`."""
    found = [Unit(CSRC / "atmm" / "cpu" / f"{name}.cpp") for name in SOURCES]
    found.append(Unit(kernels.write(build / "atmm_kernel_table.cpp", kernel_table())))
    for one, part in ((isa, part) for isa in ISAS for part in isa.parts):
        found.append(
            kernels.unit(build, "atmm", part, one.base, headers(one, part), body(one, part))
        )
    kernels.write(build / "configurations.inc", configurations())
    kernels.write(build / "merge_configurations.inc", merge_configurations())
    return found
