"""Options of PEFT's LoRA: those that are used, those without effect at inference, and those that
are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlora.errors import shown
from vlora.lora.keys import CONVERT

REFUSED_WHEN_SET: dict[str, str] = {
    "modules_to_save": "'modules_to_save' (whole replaced modules)",
    "trainable_token_indices": "'trainable_token_indices' (trained embeddings)",
    "use_dora": "DoRA",
    "target_parameters": "'target_parameters'",
    "layer_replication": "'layer_replication'",
    "lora_bias": "'lora_bias'",
    "fan_in_fan_out": "'fan_in_fan_out'",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
CONVERTIBLE: dict[str, str] = {
    "use_dora": f"make it a plain LoRA with {CONVERT}",
    "modules_to_save": f"if they are the base model's own, {CONVERT} drops them",
}
"""Remedy that the error message names, by option. The options are keys of REFUSED_WHEN_SET. An
adapter with one of these options can be converted.
"""

PLAIN = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base model unchanged."""
KNOWN_CHANGES = ("pissa", "olora")
"""Values of `init_lora_weights` that change the base model by an amount that can be computed from
its weights.
"""
CHANGES_THE_BASE = (*KNOWN_CHANGES, "corda", "lora_ga", "loftq")
"""Beginnings of the values of `init_lora_weights` that change the base model.

An adapter with such a value fits only the changed model, unless PEFT converts it. PEFT saves a
converted adapter with the value `true`.
"""

USED = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Keys of `adapter_config.json` that change nothing at inference."""


def option_fault(config: Mapping[str, Any]) -> str | None:
    """Return why an option of an adapter's config is not supported, with the remedy, or None."""
    fault = _initialisation_fault(config.get("init_lora_weights"))
    if fault is not None:
        return fault
    for key, value in config.items():
        if key not in USED and key not in HARMLESS and value:
            what = REFUSED_WHEN_SET.get(key, f"'{key}'")
            remedy = f"; {CONVERTIBLE[key]}" if key in CONVERTIBLE else ""
            return f"asks for {what}, which is not supported{remedy}"
    return None


def _initialisation_fault(kind: Any) -> str | None:
    """Return why a value of `init_lora_weights` is refused, or None if it is not.

    A value is refused if it changes the base model or is unknown.
    """
    if kind is None or isinstance(kind, bool):
        return None
    name = kind.lower() if isinstance(kind, str) else ""
    if name.startswith(CHANGES_THE_BASE):
        remedy = (
            "save it with PEFT's save_pretrained(OUT, path_initial_model_for_weight_conversion="
            "INITIAL), where INITIAL holds the adapter as it was before training"
        )
        if kind in KNOWN_CHANGES:
            remedy = f"make it a plain LoRA with {CONVERT}"
        elif name.startswith("loftq"):
            remedy = "train on the base model itself: PEFT cannot convert it"
        return (
            f"was initialised with {shown(kind)}, which changes the base model, so it does not fit"
            f" the unchanged one; {remedy}"
        )
    if name not in PLAIN:
        known = ", ".join((*PLAIN, *CHANGES_THE_BASE))
        return f"has init_lora_weights = {shown(kind)}; known: {known}"
    return None
