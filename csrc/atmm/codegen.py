"""The operator's translation units: generated kernels of each instruction set, and common code.

Register tiles are template instances. Which of them exist follows from the number of registers and
from the loops that use them (cpu/products.cpp, cpu/merge.cpp). No generated file is committed.
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
    """The register tiles of an instruction set.

    A tile of R rows and P panels needs R x P registers for its sums, P for the panels, and one for
    a value of a row. AVX-512 has 32 registers, each as wide as a panel. AVX2 has 16 registers of
    half the width, so its tiles have only one panel. A packed matrix interleaves as many panels as
    the widest tile has.
    """

    base: kernels.Isa
    rows: tuple[int, ...]
    """Maximum rows of a register tile with 1, 2, … panels of 16 columns."""
    min_accumulators: int
    """Minimum number of accumulator registers that hides the latency of a multiply-add."""
    registers_per_panel: int
    max_accumulators: int
    """Maximum number of registers for sums."""
    parts: tuple[str, ...] = ("fp32", "bf16", "merge", "rows")
    """Parts of the kernel table that are compiled for this instruction set."""
    fallback: str | None = None
    """Instruction set whose kernels are used for the parts that `parts` lacks."""
    small_blocks: str | None = None
    """Instruction set whose kernels compute small blocks of rows, on CPUs where products of bf16
    pairs are slow. If `parts` has "small_blocks", that part replaces some of these kernels."""

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def multiplies_pairs(self) -> bool:
        return "VLORA_HAS_BF16_PRODUCTS" in self.base.defines

    @property
    def deinterleaves(self) -> bool:
        """True if different registers hold the even and the odd columns of a panel."""
        return self.registers_per_panel > 1

    @property
    def bypasses_caches(self) -> bool:
        """True if merges can bypass the caches, because a tile writes several whole cache lines of
        a row (see cpu/merge.cpp).
        """
        return len(self.rows) > 1


_BF16_PARTS = ("bf16", "merge", "rows", "small_blocks")

ISAS = (
    Isa(kernels.AMX, (24, 13, 9, 6), 12, 1, 28, ("limbs",), "avx512_bf16"),
    Isa(kernels.TWIN, (4,), 1, 4, 4, ("bf16", "rows", "limbs"), "scalar", "scalar"),
    Isa(kernels.AVX512_BF16, (24, 13, 9, 6), 12, 1, 28, _BF16_PARTS, "avx512", "avx512"),
    Isa(kernels.AVX512, (24, 13, 9, 6), 12, 1, 28),
    Isa(kernels.AVX2, (6,), 8, 2, 12),
    Isa(kernels.SCALAR, (4,), 1, 4, 4),
)

DIRECT_ROWS = 8
"""Maximum rows of a tile that reads its rows in place. The address of each row takes a general
register (kMaxDirectRows in cpu/variants.h)."""
SMALL_BLOCK_ROWS = range(2, 7)
"""Numbers of rows of the blocks that the part "small_blocks" computes, each block as one tile."""
CHAINS = (1, 2, 4, 8)
"""Possible numbers of partial sums over the depth. They are powers of two, to be added in pairs."""
REDUCED_ROWS = (9, 3, 2, 2)
"""Maximum rows with 1, 2, … panels in reduced builds. All kinds of tile remain, also one with more
than DIRECT_ROWS rows."""


def chains(isa: Isa, rows: int, panels: int) -> int:
    """Return the number of partial sums over the depth that hides the latency of multiply-adds."""
    registers = rows * panels * isa.registers_per_panel
    enough = (count for count in CHAINS if count * registers >= isa.min_accumulators)
    count = next(enough, CHAINS[-1])
    while count > 1 and count * registers > isa.max_accumulators:
        count //= 2
    return count


def max_rows(isa: Isa) -> tuple[int, ...]:
    """Return the maximum rows of a register tile with 1, 2, … panels."""
    return tuple(map(min, isa.rows, REDUCED_ROWS)) if kernels.REDUCED_TILES else isa.rows


def tiles(isa: Isa) -> Iterator[tuple[int, int]]:
    """Yield (rows, panels) of every register tile."""
    for panels, most in enumerate(max_rows(isa), start=1):
        for rows in range(1, most + 1):
            yield rows, panels


def instances(isa: Isa, part: str) -> Iterator[str]:
    """Yield the assignments that fill one part of the kernel table."""
    if part == "merge":
        yield from merge_instances(isa)
        return
    fp32 = part == "fp32"
    dtype = 0 if fp32 else 1
    widens = part == "small_blocks" or not isa.multiplies_pairs
    product = "Fp32" if fp32 else "Bf16Widened" if widens else "Bf16Pairs"
    epilogues = {f"shrink[{dtype}]": "ToScratch"}
    if not fp32:
        epilogues["expand[1][1]"] = "Added<uint16_t, false>"
    epilogues[f"expand[{dtype}][0]"] = "Added<float, false>"
    for field, epilogue in epilogues.items():
        for rows, panels in tiles(isa):
            index = f"[{panels - 1}][{rows - 1}]"
            yield from variants(isa, part, field, index, f"{product}, {epilogue}", rows, panels)
    narrow = f"Narrow{product.removeprefix('Bf16')}, NarrowToScratch"
    for rows in range(1, max_rows(isa)[0] + 1):
        index = f"[kNarrowIndex][{rows - 1}]"
        yield from variants(isa, part, f"shrink[{dtype}]", index, narrow, rows, 1)


def variants(
    isa: Isa, part: str, field: str, index: str, kind: str, rows: int, panels: int
) -> Iterator[str]:
    """Yield the assignments of one register tile's variants (TileSet in include/atmm/kernels.h)."""
    shape = f"{kind}, {rows}, {panels}"
    chained = f"tile<{shape}, {chains(isa, rows, panels)}, 0, true>"
    if part == "small_blocks":
        if rows in SMALL_BLOCK_ROWS:
            yield f"k.{field}.prefetching{index} = {chained};"
        return
    # Kernels for fp32 read rows from scratch memory only if the panels were widened from bf16. Such
    # panels are never narrow.
    if not (part == "fp32" and "kNarrowIndex" in index):
        yield f"k.{field}.packed{index} = tile<{shape}, 1, kScratchStride, false>;"
    if rows <= DIRECT_ROWS:
        if field.startswith("shrink"):
            yield f"k.{field}.direct{index} = tile<{shape}, 1, 0, false>;"
        yield f"k.{field}.prefetching{index} = {chained};"


def merge_instances(isa: Isa) -> Iterator[str]:
    """Yield the assignments of the merge's register tiles."""
    shapes = [(rows, panels) for rows, panels in tiles(isa) if rows <= DIRECT_ROWS]
    fields = {"merge": "false"}
    if isa.bypasses_caches:
        fields["merge_streaming"] = "true"
    # An instruction set with a fallback needs kernels of its own for bf16 storage only.
    storages = ((1, "uint16_t"),) if isa.fallback else ((0, "float"), (1, "uint16_t"))
    for (dtype, storage), (rows, panels) in itertools.product(storages, shapes):
        for field, bypasses in fields.items():
            yield (
                f"k.{field}[{dtype}][{panels - 1}][{rows - 1}] ="
                f" tile<Fp32, Added<{storage}, {bypasses}>, {rows}, {panels}, 1, 0, false>;"
            )
    if isa.deinterleaves:
        for rows, panels in shapes:
            yield (
                f"k.merge_deinterleaved[{panels - 1}][{rows - 1}] ="
                f" tile<Fp32, AddedDeinterleaved, {rows}, {panels}, 1, 0, false>;"
            )


def body(isa: Isa, part: str) -> str:
    """Return the source of the function that fills a part of an instruction set's kernel table."""
    if part == "rows":
        lines = [
            "k.load_rows = load_rows;",
            "k.round_rows = round_rows;",
            "k.widen_panels = widen_panels;",
            "k.deinterleave_narrow = deinterleave_narrow;",
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
    statements = "".join(f"  {line}\n" for line in lines)
    return f"void fill_{part}(Kernels& k) {{\n{statements}}}\n"


def headers(isa: Isa, part: str) -> tuple[str, ...]:
    """Return the headers that a part includes."""
    if part == "limbs":
        return (f"runtime/tile_{isa.name}.h", "runtime/tile_product.h", "merge_limbs.h")
    if part == "rows":
        return ("rows.h",)
    return ("deinterleave.h",) if part == "merge" and isa.deinterleaves else ("tile.h",)


def _enumerator(name: str) -> str:
    return next(f"runtime::Isa::{isa.base.enumerator}" for isa in ISAS if isa.name == name)


def kernel_table() -> str:
    """Return the source that defines `kernels(runtime::Isa)`."""
    lines = ['// Generated by csrc/atmm/codegen.py.\n#include "atmm/kernels.h"\n']
    lines.append("namespace vlora::atmm {\n")
    for isa in ISAS:
        declared = "".join(f" void fill_{part}(Kernels&);" for part in isa.parts)
        lines.append(f"namespace {isa.name} {{{declared} }}\n")
    lines.append("const Kernels& kernels(runtime::Isa isa) {\n  static const struct All {\n")
    lines.append("    Kernels k[runtime::kIsas] = {}, small[runtime::kIsas] = {};\n    All() {\n")
    for isa in reversed(ISAS):
        enumerator = _enumerator(isa.name)
        target = f"k[int({enumerator})]"
        # The functions that fill the table are themselves compiled for the instruction set.
        lines.append(f"      if (runtime::runs_here({enumerator})) {{\n")
        if isa.fallback:
            lines.append(f"        {target} = k[int({_enumerator(isa.fallback)})];\n")
        lines.append(f'        {target}.name = "{isa.name}";\n')
        rows_by_panels = max_rows(isa)
        lines.append(f"        {target}.bundle = {len(rows_by_panels)};\n")
        lines += [f"        {target}.max_rows[{i}] = {n};\n" for i, n in enumerate(rows_by_panels)]
        parts = [part for part in isa.parts if part != "small_blocks"]
        lines += [f"        {isa.name}::fill_{part}({target});\n" for part in parts]
        if isa.small_blocks:
            small = f"small[int({enumerator})]"
            lines.append(f"        {small} = k[int({_enumerator(isa.small_blocks)})];\n")
            if "small_blocks" in isa.parts:
                lines.append(f"        {isa.name}::fill_small_blocks({small});\n")
            lines.append(f"        {target}.small_blocks = &{small};\n")
        lines.append(f"        {target}.tiles = runtime::tile_unit({enumerator});\n")
        lines.append("      }\n")
    lines.append("    }\n  } all;\n  return all.k[int(isa)];\n}\n}  // namespace vlora::atmm\n")
    return "".join(lines)


def configurations() -> str:
    """Return the source of the tile configurations of `apply`, with the fields of TileConfig.

    Searches have chosen 32 columns for the second product only with the longest prefetch distance,
    so other configurations with 32 columns are left out.
    """
    rows = ["// Generated by csrc/atmm/codegen.py."]
    # Few rows: an adapter is read once as a stream, and rows are read in place.
    for shrink, (expand, prefetch) in itertools.product(
        (32, 64), ((64, 0), (64, 24), (64, 64), (64, 128), (32, 128))
    ):
        rows.append(f"{{8, {shrink}, {expand}, 0, {prefetch}, 0}},")
    # Many rows: blocks of both operands stay in the caches.
    for block, shrink, depth in itertools.product(
        (24, 32, 48, 96, 192), (32, 64), (128, 256, 512, 1024)
    ):
        rows.append(f"{{{block}, {shrink}, 64, {depth}, 0, 0}},")
    return "\n".join(rows) + "\n"


def merge_configurations() -> str:
    """Return the source of the merge's tile configurations.

    They differ in two numbers: the columns of A that are packed at a time, and the distance in
    cache lines at which W is prefetched.
    """
    rows = ["// Generated by csrc/atmm/codegen.py."]
    for columns, prefetch in itertools.product((1024, 2048, 4096), (0, 4, 8)):
        rows.append(f"{{8, 0, 64, 0, {prefetch}, {columns}}},")
    return "\n".join(rows) + "\n"


def units(build: Path) -> list[Unit]:
    """Return all translation units of the operator, writing generated ones into `build`."""
    result = [Unit(CSRC / "atmm" / "cpu" / f"{name}.cpp") for name in SOURCES]
    result.append(Unit(kernels.write(build / "atmm_kernel_table.cpp", kernel_table())))
    result += [
        kernels.unit(build, "atmm", part, isa.base, headers(isa, part), body(isa, part))
        for isa in ISAS
        for part in isa.parts
    ]
    kernels.write(build / "configurations.inc", configurations())
    kernels.write(build / "merge_configurations.inc", merge_configurations())
    return result
