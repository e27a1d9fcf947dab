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

DIGITS_BODY = """\
DigitGemms digit_gemms() { return {{digit_gemm_of<4>(), digit_gemm_of<2>()}}; }
"""


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
    all_units = [Unit(CSRC / "quantized" / f"{name}.cpp") for name in ("quantized", "quantize")]
    for isa in ISAS:
        unpack = isa.registers.replace("runtime/register_", "quantized/unpack_")
        headers = (unpack, "quantized/gemv_quantized.h", "quantized/quantize_rows.h")
        if isa is kernels.AVX2:
            headers = (*headers, "quantized/panels_avx2.h")
        all_units.append(kernels.unit(build, "quantized", "vectors", isa, headers, body(isa)))
    for isa in TILES:
        headers = (
            f"runtime/tile_{isa.name}.h",
            f"quantized/lines_{isa.name}.h",
            "quantized/gemm_amx_quantized.h",
        )
        all_units.append(kernels.unit(build, "quantized", "tiles", isa, headers, AMX_BODY))
        headers = (f"quantized/digits_{isa.name}.h", "quantized/gemm_amx_digits.h")
        all_units.append(kernels.unit(build, "quantized", "digits", isa, headers, DIGITS_BODY))
    header = "quantized/quantized.h"
    amx_table = kernels.pointer_table(build, "quantized", header, "gemm::AmxGemm", "amx_gemm")
    digits = kernels.pointer_table(build, "quantized", header, "DigitGemms", "digit_gemms")
    return [*all_units, kernels.table(build, "quantized", header), amx_table, digits]
