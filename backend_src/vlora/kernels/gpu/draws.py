"""Launchers of the GPU kernels that choose tokens, by argmax or sampling. Logits are fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from vlora.kernels.gpu import sampling

CHUNK = 4096  # Number of logits per program of the sampling kernels.
BLOCK = 1024  # Number of candidates per pass of `pick_kernel`.


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.argmax`. The results stay on the device."""
    maxima, places, finite = _chunk_maxima(x)
    indices = torch.empty(len(x), dtype=torch.int64, device=x.device)
    all_finite = torch.empty(len(x), dtype=torch.bool, device=x.device)
    chunks = maxima.shape[1]
    if len(x):
        sampling.argmax_kernel[(len(x),)](
            maxima,
            places,
            finite,
            indices,
            all_finite,
            chunks,
            CHUNKS=triton.next_power_of_2(chunks),
        )
    return indices, all_finite


def _chunk_maxima(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, width = x.shape
    chunks = triton.cdiv(width, CHUNK)
    maxima = torch.empty(count, chunks, device=x.device)
    places, finite = torch.empty(2, count, chunks, dtype=torch.int32, device=x.device)
    if count:
        sampling.chunk_max_kernel[(count, chunks)](
            x, maxima, places, finite, width, chunks, CHUNK=CHUNK
        )
    return maxima, places, finite


@dataclass(frozen=True)
class Draws:
    """Parameters of the draws of a step, one entry per draw.

    rows: int32, row of the logits.
    top_ks: int32, 0 for all tokens.
    temperatures, min_ps: fp32.
    top_ps: fp64.
    uniforms: fp64, random numbers in [0, 1).
    """

    rows: torch.Tensor
    top_ks: torch.Tensor
    temperatures: torch.Tensor
    min_ps: torch.Tensor
    top_ps: torch.Tensor
    uniforms: torch.Tensor


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Return the drawn tokens, [draws] int64, on the device.

    Semantics: those of `sampler.draw_rows`.

    logits: [rows, vocabulary] fp32.
    """
    count, width = len(draws.rows), logits.shape[1]
    drawn = torch.empty(count, dtype=torch.int64, device=logits.device)
    if not count:
        return drawn
    maxima, _, _ = _chunk_maxima(logits)
    chunks = maxima.shape[1]
    sizes = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(chunks), "num_warps": 8}
    of_floors = count, chunks, sampling.FLOORS.value
    counts = torch.empty(of_floors, dtype=torch.int32, device=logits.device)
    masses = torch.empty(of_floors, dtype=torch.float64, device=logits.device)
    scaling = draws.temperatures, draws.min_ps
    sampling.chunk_mass_kernel[(count, chunks)](
        logits, draws.rows, maxima, *scaling, counts, masses, width, chunks, **sizes
    )
    weights = torch.empty(count, width, device=logits.device)
    tokens = torch.empty(count, width, dtype=torch.int32, device=logits.device)
    found = torch.empty(count, dtype=torch.int32, device=logits.device)
    sums = torch.empty(count, dtype=torch.float64, device=logits.device)
    limits = draws.top_ks, draws.top_ps
    sampling.compact_kernel[(count, chunks)](
        logits,
        draws.rows,
        maxima,
        *scaling,
        *limits,
        counts,
        masses,
        weights,
        tokens,
        found,
        sums,
        width,
        chunks,
        **sizes,
    )
    sampling.pick_kernel[(count,)](
        drawn, weights, tokens, found, sums, *limits, draws.uniforms, width, BLOCK=BLOCK
    )
    return drawn
