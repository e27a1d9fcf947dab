"""The units of attention: one for each instruction set."""

from __future__ import annotations

from pathlib import Path

import kernels
from kernels import CSRC, ISAS, Unit

BODY = (
    "Kernels table() {\n"
    "  return {{attend<float>, attend<uint16_t>}, {write<float>, write<uint16_t>},\n"
    "          combine};\n}\n"
)


def units(build: Path) -> list[Unit]:
    found = [Unit(CSRC / "attention" / "attention.cpp")]
    for isa in ISAS:
        headers = kernels.register_headers(isa, ("attention/tiles.h",))
        found.append(kernels.unit(build, "attention", "tiles", isa, headers, BODY))
    return [*found, kernels.table(build, "attention", "attention/attention.h")]
