"""Translation units of csrc/gemm: one for each instruction set, and one for each tile unit."""

from __future__ import annotations

from pathlib import Path

import kernels
from kernels import CSRC, ISAS, TILES, Isa, Unit

HEADERS = ("gemm/gemv.h", "gemm/gemm_vector.h", "gemm/elementwise.h", "gemm/sample.h")
NONE = "{nullptr, nullptr}"

AMX_BODY = """\
AmxGemm amx_gemm() {
  return {{pack_limbs, pack_bf16}, {gemm_limbs, gemm_bf16}};
}
"""


def body(isa: Isa) -> str:
    """Return the source of the function that returns an instruction set's table of kernels."""
    pairs = "VLORA_HAS_BF16_PRODUCTS" in isa.defines
    gemv = "PairsGemv" if pairs else "WidenedGemv"
    in_place_bf16 = "{pack_panels<PairsGemm>, gemm_by_vectors<PairsGemm, false>}" if pairs else NONE
    # Tiles of AVX-512 read fp32 in place at any stride.
    in_place_only = "avx512" in isa.registers
    copied = "{pack_panels<Fp32Gemm>, gemm_by_vectors<Fp32Gemm, true>}"
    copied_fp32 = NONE if in_place_only else copied
    return (
        "Kernels table() {\n"
        f"  return {{{{nullptr, pack_gemv<{gemv}>}}, {{gemv<Fp32Gemv>, gemv<{gemv}>}},\n"
        f"          {{Fp32Gemv::kMaxRows, {gemv}::kMaxRows}},\n"
        "          {{pack_panels<Fp32Gemm>, gemm_by_vectors<Fp32Gemm, false>},"
        f" {in_place_bf16}}},\n"
        f"          {{{copied_fp32},"
        " {pack_panels<WidenedGemm>, gemm_by_vectors<WidenedGemm, true>}},\n"
        "          embed, add_norm, gate, argmax, sample};\n}\n"
    )


def units(build: Path) -> list[Unit]:
    """Return all units, writing generated ones into `build`."""
    all_units = [Unit(CSRC / "gemm" / "gemm.cpp")]
    for isa in ISAS:
        all_units.append(kernels.unit(build, "gemm", "vectors", isa, HEADERS, body(isa)))
    for isa in TILES:
        headers = (f"runtime/tile_{isa.name}.h", "gemm/gemm_amx.h", "gemm/gemm_amx_limbs.h")
        all_units.append(kernels.unit(build, "gemm", "tiles", isa, headers, AMX_BODY))
    amx_table = kernels.pointer_table(build, "gemm", "gemm/gemm.h", "AmxGemm", "amx_gemm")
    return [*all_units, kernels.table(build, "gemm", "gemm/gemm.h"), amx_table]
