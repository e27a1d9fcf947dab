"""Translation units of csrc/quantized: one for each instruction set."""

from __future__ import annotations

from pathlib import Path

import kernels
from kernels import CSRC, ISAS, TILES, Isa, Unit

AMX_BODY = """\
gemm::AmxGemm amx_gemm() {
  return {{pack_fp32_rows, pack_bf16_rows}, {multiply_fp32_rows, multiply_bf16_rows}};
}
"""
TILE_ROWS, REDUCED_TILE_ROWS = (1, 4, 8, 12, 16), (4, 16)
"""Numbers of rows of x in a tile for which there are kernels for panels. The last must be 16."""

DIGITS_BODY = """\
DigitGemms digit_gemms() { return {{digit_gemm_of<4>(), digit_gemm_of<2>()}, fewest_digits}; }
"""

SOURCES = ("quantized", "quantize", "dynamic", "dynamic_int4")

VNNI = Isa(
    "avx512_vnni", "kAvx512", kernels.AVX512.registers, (*kernels.AVX512.flags, "-mavx512vnni"), ()
)
"""AVX-512 with products of bytes. The kernels of other products need no set between AVX512 and
AVX512_BF16."""
DYNAMIC = {VNNI: "avx512", kernels.AVX2: "avx2", kernels.SCALAR: "scalar"}
"""Instruction sets whose vectors multiply bytes, with the name of their header."""


def dynamic_units(build: Path) -> list[Unit]:
    """Return the units of the kernels that quantize x, and their table."""
    units = []
    for isa, name in DYNAMIC.items():
        headers = (f"quantized/dynamic_{name}.h", "quantized/dynamic_vectors.h")
        source = "DynamicKernels dynamic_kernels() { return dynamic_kernels_of_vectors(); }\n"
        units.append(kernels.unit(build, "quantized", "dynamic", isa, headers, source))
        headers = (f"quantized/dynamic_int4_{name}.h", "quantized/dynamic_int4_rows.h")
        source = "Int4Kernels int4_kernels() { return int4_kernels_of_vectors(); }\n"
        units.append(kernels.unit(build, "quantized", "dynamic_int4", isa, headers, source))
    for isa in TILES:
        headers = (f"runtime/tile_{isa.name}.h", "quantized/dynamic_tiles.h")
        source = "DynamicKernels dynamic_kernels() { return dynamic_kernels_of_tiles(); }\n"
        units.append(kernels.unit(build, "quantized", "dynamic", isa, headers, source))
    for header, names, isas in (
        ("quantized/dynamic.h", ("DynamicKernels", "dynamic_kernels"), (*DYNAMIC, *TILES)),
        ("quantized/dynamic_int4.h", ("Int4Kernels", "int4_kernels"), (*DYNAMIC,)),
    ):
        units.append(kernels.pointer_table(build, "quantized", header, *names, isas))
    return units


def body(isa: Isa) -> str:
    """Return the source of the function that returns an instruction set's table of kernels."""
    has_pairs = "VLORA_HAS_BF16_PRODUCTS" in isa.defines
    pairs = "{pack_pairs, gemv_pairs}" if has_pairs else "{nullptr, nullptr}"
    panels = "{}, {}"
    if isa is kernels.AVX2:
        panels = "{pack_panels, gemv_panels}, {widen_panels<float>, widen_panels<uint16_t>}"
    return (
        "Kernels table() {\n"
        f"  return {{{{pack, gemv}}, {pairs}, kMaxRows, {{widen<float>, widen<uint16_t>}},\n"
        f"          {panels}, quantize_rows}};\n}}\n"
    )


def units(build: Path) -> list[Unit]:
    """Return all units, writing generated ones into `build`."""
    all_units = [Unit(CSRC / "quantized" / f"{name}.cpp") for name in SOURCES]
    for isa in ISAS:
        unpack = isa.registers.replace("runtime/register_", "quantized/unpack_")
        headers = (unpack, "quantized/gemv_quantized.h", "quantized/quantize_rows.h")
        if isa is kernels.AVX2:
            headers = (*headers, "quantized/panels_avx2.h")
        all_units.append(kernels.unit(build, "quantized", "vectors", isa, headers, body(isa)))
    rows = ", ".join(map(str, REDUCED_TILE_ROWS if kernels.REDUCED_TILES else TILE_ROWS))
    panels_body = f"TilePanels tile_panels() {{ return tile_panels_of<{rows}>(); }}\n"
    for isa in TILES:
        tiles = (f"runtime/tile_{isa.name}.h", f"quantized/lines_{isa.name}.h")
        for part, header, source in (
            ("tiles", "quantized/gemm_amx_quantized.h", AMX_BODY),
            ("panels", "quantized/panels_tiles.h", panels_body),
        ):
            all_units.append(kernels.unit(build, "quantized", part, isa, (*tiles, header), source))
        headers = (f"quantized/digits_{isa.name}.h", "quantized/gemm_amx_digits.h")
        all_units.append(kernels.unit(build, "quantized", "digits", isa, headers, DIGITS_BODY))
    vnni = kernels.AVX512_BF16
    headers = ("quantized/unpack_avx512.h", "quantized/panels_digits.h")
    source = "PanelDigits panel_digits() { return panel_digits_of_vectors(); }\n"
    all_units.append(kernels.unit(build, "quantized", "panel_digits", vnni, headers, source))
    headers = (headers[0], "quantized/digits_avx512.h", "quantized/gemv_digits.h")
    source = "DigitGemv digit_gemv() { return digit_gemv_of_vectors(); }\n"
    all_units.append(kernels.unit(build, "quantized", "digits", vnni, headers, source))
    header = "quantized/quantized.h"
    tables = [
        kernels.table(build, "quantized", header),
        kernels.pointer_table(build, "quantized", header, "gemm::AmxGemm", "amx_gemm"),
        kernels.pointer_table(build, "quantized", header, "TilePanels", "tile_panels"),
        kernels.pointer_table(build, "quantized", header, "DigitGemms", "digit_gemms"),
        kernels.pointer_table(build, "quantized", header, "PanelDigits", "panel_digits", (vnni,)),
        kernels.pointer_table(build, "quantized", header, "DigitGemv", "digit_gemv", (vnni,)),
    ]
    return [*all_units, *tables, *dynamic_units(build)]
