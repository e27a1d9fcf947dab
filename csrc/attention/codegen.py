"""The units of attention: one for each instruction set."""

from __future__ import annotations

from pathlib import Path

import kernels
from kernels import CSRC, ISAS, TILES, Unit

BODY = (
    "Kernels table() {\n"
    "  return {{attend<float>, attend<uint16_t>}, {write<float>, write<uint16_t>},\n"
    "          combine, kItems};\n}\n"
)
TILED_BODY = (
    "Kernels table() {\n"
    "  return {{nullptr, attend_by_size}, {nullptr, write<uint16_t>}, combine,\n"
    "          kTiledItems};\n}\n"
)
"""Of units that multiply tiles of bf16 pairs: what is fp32 has the vectors of another."""


def units(build: Path) -> list[Unit]:
    found = [Unit(CSRC / "attention" / "attention.cpp")]
    for isa in ISAS:
        headers = kernels.register_headers(isa, ("attention/attention_vector.h",))
        found.append(kernels.unit(build, "attention", "tiles", isa, headers, BODY))
    for isa in TILES:
        tiles = (f"runtime/tile_{isa.name}.h", "runtime/tile_product.h")
        headers = (*tiles, *kernels.register_headers(isa, ("attention/attention_amx.h",)))
        found.append(kernels.unit(build, "attention", "tiled", isa, headers, TILED_BODY))
    return [*found, kernels.table(build, "attention", "attention/attention.h", (*ISAS, *TILES))]
