"""Writes the translation units of the CPU kernels: one per instruction set and part.

Register tiles are template instances; which of them exist follows from the number of registers.
Nothing generated is committed: `setup.py` calls this for the build directory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Isa:
    """rows: most rows of a register tile with 1, 2, … panels of 16 columns.

    AVX-512 has 32 registers: rows x panels accumulators, the panels and one row value. AVX2 has
    16, two to a panel, and more rows serve it better than more panels. As many panels as the widest
    tile has are packed interleaved. accumulators: how many hide the latency of a multiply-add.
    """

    name: str
    vector: str
    flags: tuple[str, ...]
    rows: tuple[int, ...]
    accumulators: int
    registers_per_panel: int
    most_accumulators: int
    parts: tuple[str, ...] = ("fp32", "bf16", "merge", "rows")
    defines: tuple[str, ...] = ()


_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma")
_KEEP_512 = 'ATMM_KEEP(a)=asm volatile("" : "+v"((a).r))'
_KEEP_256 = 'ATMM_KEEP(a)=asm volatile("" : "+x"((a).lo), "+x"((a).hi))'
_KEEP_NONE = 'ATMM_KEEP(a)=asm volatile("" : : "r"(&(a)) : "memory")'

ISAS = (
    Isa(
        "avx512_bf16",
        "vector_avx512.h",
        (*_AVX512, "-mavx512bf16"),
        (24, 13, 9, 6),
        12,
        1,
        28,
        parts=("bf16", "merge", "rows"),
        defines=("ATMM_HAS_BF16_PRODUCTS", "kPeakAccumulators=16", _KEEP_512),
    ),
    Isa(
        "avx512",
        "vector_avx512.h",
        _AVX512,
        (24, 13, 9, 6),
        12,
        1,
        28,
        defines=("kPeakAccumulators=16", _KEEP_512),
    ),
    Isa(
        "avx2",
        "vector_avx2.h",
        ("-mavx2", "-mfma"),
        (6,),
        8,
        2,
        12,
        defines=("kPeakAccumulators=6", _KEEP_256),
    ),
    Isa(
        "scalar",
        "vector_scalar.h",
        (),
        (4,),
        1,
        4,
        4,
        defines=("kPeakAccumulators=4", _KEEP_NONE),
    ),
)

DIRECT_ROWS = 8
"""Rows that the general registers can address each by a pointer of its own."""
CHAINS = (8, 4, 2, 1)


def chains(isa: Isa, rows: int, panels: int) -> int:
    """Partial sums over the depth, for tiles with too few accumulators to hide the latency."""
    registers = rows * panels * isa.registers_per_panel
    for count in CHAINS[::-1]:
        if count * registers >= isa.accumulators:
            break
    while count > 1 and count * registers > isa.most_accumulators:
        count //= 2
    return count


def tiles(isa: Isa) -> Iterator[tuple[int, int]]:
    """(rows, panels) of every register tile."""
    for panels, most in enumerate(isa.rows, start=1):
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
        return
    dtype, storage = (0, "float") if part == "fp32" else (1, "uint16_t")
    pairs = "ATMM_HAS_BF16_PRODUCTS" in isa.defines
    product = "Fp32" if part == "fp32" else "Bf16Pairs" if pairs else "Bf16Widened"
    for side, end in (("shrink", "ToScratch"), ("expand", f"Added<{storage}, false>")):
        for rows, panels in tiles(isa):
            at = f"[{panels - 1}][{rows - 1}]"
            head = f"k.{side}[{dtype}]"
            shape = f"{product}, {end}, {rows}, {panels}"
            yield f"{head}.packed{at} = tile<{shape}, 1, kRowStride, false>;"
            if rows <= DIRECT_ROWS:
                yield f"{head}.direct{at} = tile<{shape}, 1, 0, false>;"
                yield f"{head}.stream{at} = tile<{shape}, {chains(isa, rows, panels)}, 0, true>;"
    narrow = product.replace("Bf16", "")
    for rows in range(1, isa.rows[0] + 1):
        at, head = f"[kNarrow][{rows - 1}]", f"k.shrink[{dtype}]"
        shape = f"Narrow{narrow}, NarrowToScratch, {rows}, 1"
        yield f"{head}.packed{at} = tile<{shape}, 1, kRowStride, false>;"
        if rows <= DIRECT_ROWS:
            yield f"{head}.direct{at} = tile<{shape}, 1, 0, false>;"
            yield f"{head}.stream{at} = tile<{shape}, {chains(isa, rows, 1)}, 0, true>;"


def unit(isa: Isa, part: str) -> str:
    """Source of one translation unit."""
    defines = "\n".join("#define " + d.replace("=", " ", 1) for d in isa.defines)
    head = (
        f"// Generated by csrc/atmm/cpu/generate.py.\n#define ATMM_ISA {isa.name}\n{defines}\n"
        f'#include "{isa.vector}"\n#include "{"rows.h" if part == "rows" else "tile.h"}"\n'
        f"namespace vlora::atmm::{isa.name} {{\n"
    )
    if part == "rows":
        body = (
            "  k.load_rows = load_rows;\n  k.round_rows = round_rows;\n"
            "  k.widen_panels = widen_panels;\n"
            "  k.peak = peak;\n  k.read = read;\n  k.pairs_in_registers = kPairs;\n"
        )
    else:
        body = "".join(f"  {line}\n" for line in instances(isa, part))
    return f"{head}void fill_{part}(Kernels& k) {{\n{body}}}\n}}  // namespace\n"


def dispatch() -> str:
    """Source of the table of instruction sets, best first."""
    lines = ['// Generated by csrc/atmm/cpu/generate.py.\n#include "dispatch.h"\n']
    for isa in ISAS:
        declared = "".join(f" void fill_{part}(Kernels&);" for part in isa.parts)
        lines.append(f"namespace vlora::atmm::{isa.name} {{{declared} }}\n")
    lines.append("namespace vlora::atmm {\nvoid fill(Kernels* k, bool (*runs)(const char*)) {\n")
    for index, isa in reversed(list(enumerate(ISAS))):
        at = f"k[{index}]"
        # Even filling a table may take the set's instructions: the compiler stores in vectors.
        lines.append(f'  if (runs("{isa.name}")) {{\n')
        if len(isa.parts) < 4:  # the rest is the next one's
            lines.append(f"  {at} = k[{index + 1}];\n")
        lines.append(f"  {at}.bundle = {len(isa.rows)};\n")
        lines += [f"  {at}.max_rows[{i}] = {rows};\n" for i, rows in enumerate(isa.rows)]
        lines += [f"  {isa.name}::fill_{part}({at});\n" for part in isa.parts]
        lines.append(f'  {at}.name = "{isa.name}";\n  }}\n')
    lines.append("}\n}  // namespace vlora::atmm\n")
    return "".join(lines)


def configurations() -> str:
    """Source of the tile configurations that the search chooses among (TileConfig's fields)."""
    rows = ["// Generated by csrc/atmm/cpu/generate.py."]
    # Few rows: adapters are streamed once, rows are read where they lie.
    for shrink, expand, prefetch in itertools.product((32, 64), (32, 64), (0, 24, 64, 128)):
        rows.append(f"{{8, {shrink}, {expand}, 0, {prefetch}, false, 0}},")
    # Many rows: blocks of both operands stay in cache.
    for block, shrink, expand, depth in itertools.product(
        (48, 96, 192), (32, 64), (32, 64), (128, 256)
    ):
        rows.append(f"{{{block}, {shrink}, {expand}, {depth}, 0, true, 0}},")
    for block, shrink, expand, depth in itertools.product(
        (24, 48, 96, 192), (32, 64), (32, 64), (128, 256, 512, 1024)
    ):
        rows.append(f"{{{block}, {shrink}, {expand}, {depth}, 0, false, 0}},")
    return "\n".join(rows) + "\n"


def merge_configurations() -> str:
    """The same for the merge: columns of A in cache at a time, lines of W fetched ahead."""
    rows = ["// Generated by csrc/atmm/cpu/generate.py."]
    for expand, columns, prefetch in itertools.product((32, 64), (1024, 2048, 4096), (0, 4, 8)):
        rows.append(f"{{8, 0, {expand}, 0, {prefetch}, true, {columns}}},")
    return "\n".join(rows) + "\n"


def write(folder: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """Write every generated file below `folder`; (source, its own compiler flags) of each."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [(folder / "dispatch_table.cpp", dispatch(), ())]
    for isa in ISAS:
        sources += [(folder / f"{isa.name}_{p}.cpp", unit(isa, p), isa.flags) for p in isa.parts]
    _write(folder / "configurations.inc", configurations())
    _write(folder / "merge_configurations.inc", merge_configurations())
    for path, text, _ in sources:
        _write(path, text)
    return [(path, flags) for path, _, flags in sources]


def _write(path: Path, text: str) -> None:
    """Leave an unchanged file alone, so that it is not compiled again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


if __name__ == "__main__":
    import sys

    for source, _ in write(Path(sys.argv[1])):
        print(source)
