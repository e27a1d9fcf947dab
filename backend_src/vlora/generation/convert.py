"""Conversion to a plain LoRA, for adapters that the server cannot load.

- A pickle becomes safetensors, and copies of the base model's own weights are dropped. This is
  exact.
- PiSSA and OLoRA change the base model by a product that can be computed from its weights. The
  negative product becomes further rows of A and columns of B, so that the adapter fits the
  unchanged base model. This is exact.
- DoRA scales each row of W + B A to a trained norm m. Its change m (W + B A) / |W + B A| - W has
  full rank. So the change is approximated: A and B are its truncated singular value decomposition,
  whose error is stated.
- A method that PEFT can express as a change of the weights is approximated in the same way.

The result is then loaded with the server's own loader, so it must pass all checks of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vlora.atmm.types import LoraPair
from vlora.atomic_file import new_folder
from vlora.errors import InvalidArgument
from vlora.generation import peft_methods
from vlora.generation.adapter_source import Tensors, base_of, open_tensors
from vlora.generation.base_weights import BaseWeights
from vlora.generation.low_rank import factorize, sufficient_rank
from vlora.generation.peft_folder import CONFIG, copy_head, write_adapter, write_config
from vlora.generation.weight_changes import dora_change, with_initial_change
from vlora.ids import VISION, MatrixId
from vlora.lora.adapter import OUTSIDE_LORA, WEIGHTS, AdapterFiles
from vlora.lora.keys import UnknownKey, parse_key
from vlora.lora.model_shape import LM_HEAD, ModelShape
from vlora.lora.peft_config import ErrorFactory, read_json
from vlora.lora.peft_options import KNOWN_CHANGES

DEFAULT_RANK = 64
DEFAULT_MAX_ERROR = 0.05
"""Default maximum error of each matrix's change, relative to the change."""
MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True)
class ConversionLimits:
    """Limits of a conversion that is not exact.

    rank: maximum rank of the result.
    error: maximum Frobenius norm of the error of a matrix's change, relative to the norm of the
        change.
    """

    rank: int = DEFAULT_RANK
    error: float = DEFAULT_MAX_ERROR


@dataclass
class Conversion:
    """Result of a conversion.

    method: method of the source, such as "DoRA".
    dropped: keys of tensors that were left out because they equal the base model's weights.
    errors: Frobenius norm of the error of each matrix's change, relative to the norm of the change.
    changes: Frobenius norm of the change of each matrix.
    ranks: ranks of the result.
    """

    method: str
    dropped: list[str] = field(default_factory=list)
    errors: dict[MatrixId, float] = field(default_factory=dict)
    changes: dict[MatrixId, float] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @property
    def error(self) -> float:
        """Frobenius norm of the errors of all matrices together, relative to the norm of all
        changes.
        """
        left = math.hypot(*(self.errors[m] * self.changes[m] for m in self.errors))
        change = math.hypot(*self.changes.values())
        return left / change if change else 0.0

    @property
    def worst(self) -> float:
        """Largest relative error of any matrix."""
        return max(self.errors.values(), default=0.0)


@dataclass(frozen=True)
class _Source:
    """Adapter to convert, and the checkpoint that it was trained for."""

    config: Mapping[str, Any]
    tensors: Tensors
    shape: ModelShape
    base: BaseWeights
    invalid: ErrorFactory

    @property
    def method(self) -> str:
        """Name of the adapter's training method."""
        if self.config.get("peft_type") != "LORA":
            return str(self.config.get("peft_type"))
        if self.config.get("use_dora"):
            return "DoRA"
        kind = self.config.get("init_lora_weights")
        return next((known for known in KNOWN_CHANGES if known == kind), "LoRA")

    def config_without(self, *keys: str) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key not in keys}

    def is_copy(self, key: str) -> bool:
        """Return whether a tensor is a copy of one of the base model's weights.

        Raises InvalidArgument if the tensor is a whole weight that differs from the base model's.
        """
        try:
            parsed = parse_key(key, self.shape)
        except UnknownKey:
            return False
        if parsed.part != "weight":
            return False
        own, stored = self.base.matrix(parsed.matrix), self.tensors.stored(key)
        if own.shape != stored.shape or not torch.equal(own, stored.to(torch.float32)):
            raise self.invalid(
                f"holds '{key}' {tuple(stored.shape)}, which differs from the base model's own"
                f" {tuple(own.shape)}: no LoRA can express it, train it as a LoRA target"
            )
        return True

    def magnitudes(self, matrices: Iterable[MatrixId]) -> dict[MatrixId, torch.Tensor]:
        """Return DoRA's magnitudes, [d_out] fp32 by matrix.

        Raises InvalidArgument unless there is exactly one for each of `matrices`.
        """
        wanted, found = set(matrices), {}
        for key, declared in self.tensors.shapes.items():
            if MAGNITUDE not in key:
                continue
            try:
                matrix = parse_key(key, self.shape).matrix
            except UnknownKey as reason:
                raise self.invalid(f"holds '{key}', {reason}") from None
            if matrix is None or matrix not in wanted or matrix in found:
                raise self.invalid(
                    f"holds '{key}', whose module has no LoRA, or already has a magnitude"
                )
            d_out = self.shape.shape_of(matrix)[0]
            if declared != (d_out,):
                raise self.invalid(f"has '{key}' {declared}; it must be ({d_out},)")
            found[matrix] = self.tensors.stored(key).to(torch.float32)
            if not bool(torch.isfinite(found[matrix]).all()):
                raise self.invalid(f"has NaN or Inf in '{key}'")
        if missing := wanted - found.keys():
            raise self.invalid(f"has no {MAGNITUDE} for {name_of(min(missing))}")
        return found


def convert(
    source: Path,
    out: Path,
    shape: ModelShape,
    base: BaseWeights,
    limits: ConversionLimits,
    progress: Callable[[str], None] = lambda _: None,
) -> Conversion:
    """Write the adapter in `source` to the new folder `out` as a plain LoRA; return how it was
    converted.

    shape, base: shape and weights of the checkpoint that the adapter was trained for.
    limits: limits of the approximation, if the conversion is not exact.
    progress: called with the name of each matrix before it is decomposed.

    Raises InvalidArgument, and writes nothing, if the adapter cannot be converted within the
    limits.
    """
    name = source.absolute().name
    invalid = ErrorFactory(name)
    if not source.is_dir():
        raise InvalidArgument(f"no adapter folder at {source}")
    if (source / OUTSIDE_LORA).exists():
        raise invalid.in_file(OUTSIDE_LORA)("holds weights that no LoRA can express")
    config = read_json(source / CONFIG, invalid)
    tensors, file = open_tensors(source, invalid)
    adapter = _Source(config, tensors, shape, base, invalid.in_file(file))
    result = Conversion(adapter.method)
    if config.get("alora_invocation_tokens") and adapter.method != "LoRA":
        raise invalid.in_file(CONFIG)(
            f"asks for {adapter.method} as an activated LoRA, which cannot be converted"
        )
    with new_folder(out) as part:
        copy_head(source, part)
        if config.get("peft_type") == "LORA":
            plain = _write_plain(adapter, part, name, result)
            pairs = _pairs_of_lora(adapter, plain, limits, result, progress)
        else:
            pairs = _pairs_by_peft(adapter, limits, result, progress)
        if pairs:
            write_adapter(part, pairs, shape, base_of(config))
        result.ranks = AdapterFiles(name, part, shape).read().info.ranks
    return result


def _write_plain(source: _Source, part: Path, name: str, result: Conversion) -> AdapterFiles:
    """Write A and B of the source unchanged to the folder `part`, with the config of a plain LoRA.

    Returns the written files, which have passed the checks of adapters.
    """
    factors = {}
    for key in source.tensors.shapes:
        if source.is_copy(key):
            result.dropped.append(key)
        elif MAGNITUDE not in key:
            factors[key] = source.tensors.stored(key).clone().contiguous()
        elif source.method != "DoRA":
            raise source.invalid(f"holds '{key}', but adapter_config.json does not set use_dora")
    save_file(factors, part / WEIGHTS, metadata={"format": "pt"})
    plain = source.config_without("use_dora", "modules_to_save")
    if source.method in KNOWN_CHANGES:
        plain["init_lora_weights"] = True
    write_config(part / CONFIG, plain)
    return AdapterFiles(name, part, source.shape)


def _pairs_of_lora(
    source: _Source,
    plain: AdapterFiles,
    limits: ConversionLimits,
    result: Conversion,
    progress: Callable[[str], None],
) -> Mapping[MatrixId, LoraPair]:
    """Return new A and B for an adapter of PEFT's type LORA; {} for a plain LoRA, which keeps its A
    and B.
    """
    if source.method == "LoRA":
        return {}
    if plain.description.vision is not None:
        raise source.invalid(_vision_stays(source))
    pairs, reader = plain.read().pairs, plain.description.reader
    assert reader is not None
    if source.method == "DoRA":
        magnitudes = source.magnitudes(pairs)

        def change_of(matrix: MatrixId) -> torch.Tensor:
            return dora_change(source.base.matrix(matrix), pairs[matrix], magnitudes[matrix])

        return _factorize(source, pairs, change_of, limits, result, progress)
    if source.base.config.tied and (-1, LM_HEAD) in pairs:
        raise source.invalid(
            f"was initialised with '{source.method}', which changes the lm_head and so the"
            " embeddings that this checkpoint ties to it: no LoRA can express it"
        )
    return {
        matrix: with_initial_change(pair, source.base.matrix(matrix), source.method, scale)
        for (matrix, pair), scale in zip(pairs.items(), reader.scales, strict=True)
    }


def _pairs_by_peft(
    source: _Source, limits: ConversionLimits, result: Conversion, progress: Callable[[str], None]
) -> Mapping[MatrixId, LoraPair]:
    """Return A and B for an adapter of another type, from the changes of weights that PEFT
    computes.
    """
    kept = {}
    for key in source.tensors.shapes:
        if source.is_copy(key):
            result.dropped.append(key)
        else:
            kept[key] = source.tensors.stored(key)
    config = source.config_without("modules_to_save")
    changes = peft_methods.changes_of(
        config, kept, source.base.folder, source.shape, source.invalid
    )
    return _factorize(source, changes, lambda m: changes[m](), limits, result, progress)


def _factorize(
    source: _Source,
    matrices: Collection[MatrixId],
    change_of: Callable[[MatrixId], torch.Tensor],
    limits: ConversionLimits,
    result: Conversion,
    progress: Callable[[str], None],
) -> Mapping[MatrixId, LoraPair]:
    """Return A and B for the changes of all matrices, and store their errors in `result`.

    change_of: returns the change of a matrix.

    Raises InvalidArgument if an error exceeds the limits.
    """
    pairs = {}
    if any(layer == VISION for layer, _ in matrices):
        raise source.invalid(_vision_stays(source))
    for matrix in sorted(matrices):
        progress(name_of(matrix))
        change = change_of(matrix)
        if not bool(torch.isfinite(change).all()):
            raise source.invalid(f"changes {name_of(matrix)} to values that are not finite")
        low = factorize(change, limits.rank)
        pairs[matrix] = low.pair
        result.errors[matrix], result.changes[matrix] = low.error, low.change
    if not pairs:
        raise source.invalid("changes no matrix of the language model")
    worst = max(result.errors, key=lambda matrix: result.errors[matrix])
    if result.errors[worst] > limits.error:
        rank = sufficient_rank(change_of(worst), limits.error)
        raise source.invalid(
            f"cannot be converted within the error: rank {limits.rank} loses"
            f" {result.errors[worst]:.3g} of the change of {name_of(worst)} and {result.error:.3g}"
            f" of all changes; the limit is {limits.error:g}. This matrix needs --rank {rank};"
            " --max-error sets the limit"
        )
    return pairs


def _vision_stays(source: _Source) -> str:
    return (
        f"changes the vision tower or connector by {source.method}, which is converted for the"
        " language model only; merge it into a checkpoint with PEFT's merge_and_unload, or train"
        " it again with target_modules of the language model"
    )


def name_of(matrix: MatrixId) -> str:
    """Return the name of a matrix for messages."""
    layer, target = matrix
    return target if layer < 0 else f"layers.{layer}.{target}"
