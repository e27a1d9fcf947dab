"""Translation units of csrc/attention, one for each instruction set."""

from __future__ import annotations

from pathlib import Path

import kernels
from kernels import CSRC, ISAS, TILES, Unit

HEADERS = ("attention/attention_vector.h",)

BODY = """\
Kernels table() {
  return {{attend<float>, attend<uint16_t>}, {write<float>, write<uint16_t>}, combine, kMaxQueries};
}
"""
# Tiles multiply bf16 only, so pages of fp32 use the kernels of vectors.
AMX_BODY = """\
Kernels table() {
  return {{nullptr, attend_bf16}, {nullptr, write<uint16_t>}, combine, kMaxAmxQueries};
}
"""


def units(build: Path) -> list[Unit]:
    """Return all units, writing generated ones into `build`."""
    all_units = [Unit(CSRC / "attention" / "attention.cpp")]
    for isa in ISAS:
        all_units.append(kernels.unit(build, "attention", "vectors", isa, HEADERS, BODY))
    for isa in TILES:
        tiles = (f"runtime/tile_{isa.name}.h", "runtime/tile_product.h")
        headers = (*tiles, "attention/attention_amx.h")
        all_units.append(kernels.unit(build, "attention", "tiles", isa, headers, AMX_BODY))
    table = kernels.table(build, "attention", "attention/attention.h", (*ISAS, *TILES))
    return [*all_units, table]
