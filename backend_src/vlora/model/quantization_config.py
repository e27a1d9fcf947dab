"""Quantization of a checkpoint, as its `config.json` describes it. No torch is needed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlora.config import Options
from vlora.errors import InvalidArgument, shown
from vlora.kernels.formats import GROUPS as GROUP_SIZES
from vlora.kernels.formats import Format

# Supported values of `quant_method`, each with the variants that are supported.
METHODS = {
    "gptq": "gptq (4 and 8 bits)",
    "awq": "awq (4 bits, version 'gemm')",
    "compressed-tensors": "compressed-tensors (pack-quantized or int-quantized, 4 or 8 bits)",
}

# Alternatives to some unsupported methods, which are appended to the error message.
INSTEAD = {
    "bitsandbytes": "; NF4 and LLM.int8() have no integer weights: serve the checkpoint that it was"
    " made from with 'quantization': 'int4' or 'int8'",
    "fp8": "; serve the checkpoint that it was made from with 'quantization': 'int8'",
}


@dataclass(frozen=True)
class StoredQuantization:
    """Layout of a checkpoint's quantized matrices.

    method: a key of METHODS.
    bits: 4 or 8.
    group: number of inputs that share a scale in the files; None if all inputs of an output do.
    form: format in memory. A larger group in the files is split into several of at most 128 inputs.
        It is dynamic if the description quantizes activations, too.
    zero_offset: number to add to stored zeros: 1 for GPTQ before its version 2, else 0.
    """

    method: str
    bits: int
    group: int | None
    form: Format
    zero_offset: int = 0

    def in_memory(self, options: Options) -> Format:
        """Return the format of the weights with the option `quantization`, which may choose whether
        products quantize activations. Raises InvalidArgument for other bits or groups.
        """
        if options.quantization is None:
            return self.form
        forms = {f"int{self.bits}": replace(self.form, dynamic=False)}
        if _can_be_dynamic(self.form):
            forms[f"int{self.bits}-dynamic"] = replace(self.form, dynamic=True)
        stored = f"the checkpoint is stored by {self.method} as {self.form.name}"
        if options.quantization not in forms:
            raise InvalidArgument(
                f"'quantization' = '{options.quantization}', but {stored}; set it to"
                f" {' or '.join(map(repr, forms))}, remove the key to serve the checkpoint as it"
                " describes itself, or name the float checkpoint that it was made from"
            )
        default = Options.quantization_group_size
        if options.quantization_group_size not in (default, self.form.group):
            raise InvalidArgument(
                f"'quantization_group_size' = {options.quantization_group_size}, but {stored};"
                " remove the key"
            )
        return forms[options.quantization]


# Keys that describe how a checkpoint was made, or that the checks below read. Any other key of
# compressed-tensors may change what the stored numbers mean, so it must not be set.
COMPRESSED_KEYS = (
    *("quant_method", "format", "config_groups", "ignore", "version"),
    *("quantization_status", "global_compression_ratio", "run_compressed", "dequantize"),
)
COMPRESSED_FORMATS = ("pack-quantized", "int-quantized")
SCHEME_KEYS = ("targets", "weights", "format", "input_activations")
WEIGHTS_KEYS = (
    *("num_bits", "type", "symmetric", "strategy", "group_size", "actorder"),
    *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
)
# Keys of activations whose values change what is computed, each with the only one that is supported
# and the default. Scales are then computed for each token, so the files hold none.
ACTIVATIONS = {
    "num_bits": (8, 8),
    "type": ("int", "int"),
    "symmetric": (True, True),
    "dynamic": (True, False),
}
# Keys of GPTQ and AWQ that change the meaning of stored numbers, with the values that do not. Their
# writers add keys about the making of a checkpoint in every version, which have no effect.
DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "dynamic": (None, {}),
    "is_marlin_format": (None, False),
    "pack_dtype": (None, "int32"),
    "planar": (None, False),
    "rotation": (None, False, ""),
}


def stored_quantization(description: Mapping[str, Any] | None) -> StoredQuantization | None:
    """Return the quantization that a checkpoint's `quantization_config` describes; None for none.

    Raises InvalidArgument for anything that is not supported.
    """
    if not description:
        return None
    if not isinstance(description, Mapping):
        raise _unsupported(f"the value {shown(description)}", "an object")
    method = str(description.get("quant_method") or "unknown")
    if method not in METHODS:
        raise InvalidArgument(
            f"config.json has a 'quantization_config' of method '{method}'; supported:"
            f" {', '.join(METHODS.values())}{INSTEAD.get(method, '')}"
        )
    if method == "compressed-tensors":
        return _compressed_description(description)
    for key, harmless in DEFAULTS.items():
        if (value := description.get(key)) not in harmless:
            raise _unsupported(f"'{key}' = {shown(value)}", f"no '{key}'")
    bits, group = _integer(description, "bits"), _group(description.get("group_size", 128))
    if description.get("lm_head"):
        raise _unsupported("a quantized LM head", "'lm_head': false")
    if method == "awq":
        version = str(description.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise _unsupported(f"awq with {bits} bits, version '{version}'", METHODS["awq"])
        return StoredQuantization(method, 4, group, _format(4, group, zeros=True))
    version = str(description.get("checkpoint_format", "gptq")).lower()
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2"):
        raise _unsupported(
            f"gptq with {bits} bits, 'checkpoint_format' '{version}'",
            "4 or 8 bits in 'gptq' or 'gptq_v2'",
        )
    form = _format(bits, group, zeros=bits == 4 and not description.get("sym", False))
    return StoredQuantization(method, bits, group, form, int(version == "gptq"))


def _compressed_description(description: Mapping[str, Any]) -> StoredQuantization:
    layout = description.get("format")
    groups = description.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _unsupported("'config_groups' with other than one entry", "one entry")
    ((name, scheme),) = groups.items()
    if not isinstance(scheme, Mapping):
        raise _unsupported(f"'config_groups' with {shown(name)}: {shown(scheme)}", "an object")
    weights = scheme.get("weights")
    if not isinstance(weights, Mapping):
        raise _unsupported(f"'weights': {shown(weights)}", "an object")
    sparsity = description.get("sparsity_config")
    dense = isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"
    _check_keys(description, (*COMPRESSED_KEYS, *(["sparsity_config"] if dense else [])))
    _check_keys(scheme, SCHEME_KEYS)
    _check_keys(weights, WEIGHTS_KEYS)
    if scheme.get("format") not in (None, layout):
        raise _unsupported(f"'format' {shown(scheme['format'])} beside '{layout}'", "one format")
    bits, kind = _integer(weights, "num_bits"), weights.get("type")
    if kind != "int" or bits not in (4, 8) or layout not in COMPRESSED_FORMATS:
        raise _unsupported(
            f"compressed-tensors format '{layout}' with {bits} bits of type '{kind}'",
            METHODS["compressed-tensors"],
        )
    if (bits, layout) != (4, "pack-quantized") and not weights.get("symmetric", True):
        packed = "symmetric weights, or 4 bits in pack-quantized"
        raise _unsupported(f"'symmetric': false with {bits} bits in {layout}", packed)
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "group"):
        raise _unsupported(f"'strategy' '{strategy}'", "tensor, channel or group")
    group = _group(weights.get("group_size")) if strategy == "group" else None
    form = _format(bits, group, zeros=not weights.get("symmetric", True))
    if (activations := scheme.get("input_activations")) is not None:
        form = _dynamic(form, activations)
    return StoredQuantization("compressed-tensors", bits, group, form)


def _dynamic(form: Format, activations: Any) -> Format:
    """Return the dynamic format whose groups of activations divide those of the description."""
    if not isinstance(activations, Mapping):
        raise _unsupported(f"'input_activations': {shown(activations)}", "an object")
    valid = (
        "dynamic, symmetric integers of 8 bits, as in llm-compressor's schemes W8A8 and W4A8, or"
        " none"
    )
    for key, (needed, default) in ACTIVATIONS.items():
        if (value := activations.get(key, default)) != needed:
            raise _unsupported(f"'input_activations' with '{key}' = {shown(value)}", valid)
    _check_keys(activations, (*WEIGHTS_KEYS, "dynamic"))
    if not _can_be_dynamic(form):
        described = "with 8 bits, one scale for each output if activations are quantized"
        raise _unsupported(f"'input_activations' and weights of {form.name}", described)
    form = replace(form, dynamic=True)
    strategy, group = activations.get("strategy"), activations.get("group_size")
    if strategy == "group" and isinstance(group, int) and group > 0:
        fits = group % form.activation_group == 0
    else:
        fits = strategy in ("token", "tensor", None) and group in (None, -1)
    if not fits:
        groups = f"'strategy' {shown(strategy)} and 'group_size' {shown(group)}"
        raise _unsupported(
            f"'input_activations' with {groups}",
            f"token, tensor, or groups of a multiple of {form.activation_group} inputs",
        )
    return form


def _can_be_dynamic(form: Format) -> bool:
    return form.bits == 4 or form.group is None


def _check_keys(given: Mapping[str, Any], known: Iterable[str]) -> None:
    for key, value in given.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise _unsupported(f"'{key}' = {shown(value)}", f"no '{key}'")


def _format(bits: int, group: int | None, *, zeros: bool) -> Format:
    """Return the format that represents the weights of the files exactly."""
    if group is None:
        return Format(bits, None if bits == 8 else max(GROUP_SIZES), zeros)
    return Format(bits, max(size for size in GROUP_SIZES if group % size == 0), zeros)


def _group(size: Any) -> int | None:
    if size in (-1, None):
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0 or size % min(GROUP_SIZES):
        raise _unsupported(f"'group_size' {size!r}", f"-1 or a multiple of {min(GROUP_SIZES)}")
    return size


def _integer(description: Mapping[str, Any], key: str) -> int:
    value = description.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _unsupported(f"'{key}' {value!r}", "a number")
    return value


def _unsupported(what: str, valid: str) -> InvalidArgument:
    return InvalidArgument(
        f"config.json has a 'quantization_config' with {what}, which is not supported; supported:"
        f" {valid}"
    )
