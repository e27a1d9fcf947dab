"""The units of the products and of what lies between them: one for each instruction set."""

from __future__ import annotations

from pathlib import Path

import kernels
from kernels import CSRC, ISAS, Isa, Unit

HEADERS = ("linear/few.h", "linear/many.h", "linear/small.h", "linear/sample.h")


def body(isa: Isa) -> str:
    """What fills the table of one instruction set."""
    pairs = "VLORA_HAS_BF16_PRODUCTS" in isa.defines
    few = "Pairs" if pairs else "Widened"
    pairs_many = "{pack_many<Bf16Pairs>, many<Bf16Pairs, false>}" if pairs else "{nullptr, nullptr}"
    return (
        "Kernels table() {\n"
        f"  return {{{{nullptr, pack_few<{few}>}}, {{few<Plain>, few<{few}>}},\n"
        f"          {{{{pack_many<Fp32>, many<Fp32, false>}}, {pairs_many}}},\n"
        "          {{pack_many<Fp32>, many<Fp32, true>},"
        " {pack_many<Widening>, many<Widening, true>}},\n"
        "          pack_many<Paired>, store_sums,\n"
        "          add_norm, gate, largest, sample};\n}\n"
    )


def units(build: Path) -> list[Unit]:
    found = [Unit(CSRC / "linear" / "linear.cpp")]
    for isa in ISAS:
        headers = kernels.register_headers(isa, HEADERS)
        found.append(kernels.unit(build, "linear", "tiles", isa, headers, body(isa)))
    return [*found, kernels.table(build, "linear", "linear/linear.h")]
