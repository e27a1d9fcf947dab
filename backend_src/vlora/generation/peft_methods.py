"""Conversion of PEFT's methods other than LoRA to changes of the base model's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vlora.errors import Unsupported
from vlora.ids import MatrixId
from vlora.lora.keys import UnknownKey, parse_key
from vlora.lora.model_shape import ModelShape
from vlora.lora.peft_config import ErrorFactory

ADAPTER = "default"


def changes_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    checkpoint: Path,
    shape: ModelShape,
    invalid: ErrorFactory,
) -> dict[MatrixId, Callable[[], torch.Tensor]]:
    """Return functions that compute the change of each matrix, [d_out, d_in] fp32.

    The whole model is loaded in fp32.

    config, tensors: config and tensors of an adapter in PEFT's format.
    checkpoint: folder of the base model.
    invalid: function that creates the InvalidArgument for a message.

    Raises InvalidArgument if PEFT cannot load the adapter or cannot express its type as a change,
    or if it changes anything but matrices of the language model. Raises Unsupported if PEFT is not
    installed.
    """
    try:
        from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise Unsupported(
            f"converting this adapter needs {error.name}: pip install 'vlora[train]'"
        ) from error
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise invalid(f"has NaN or Inf in '{name}'")
    if config.get("bias", "none") != "none":
        raise invalid(f"has bias {config['bias']!r}, which no LoRA can express")
    try:
        parsed = PeftConfig.from_peft_type(**config)
        model = get_peft_model(_stock_model(checkpoint), parsed, ADAPTER)
        loaded = set_peft_model_state_dict(model, dict(tensors), ADAPTER)
    except Exception as error:
        # PEFT raises exceptions of any type for an invalid adapter.
        raise invalid(
            f"of type {config.get('peft_type')!r} cannot be loaded by PEFT:"
            f" {type(error).__name__}: {error}"
        ) from error
    missing = [key for key in loaded.missing_keys if model.base_model.prefix in key]
    if missing or loaded.unexpected_keys:
        strange = (missing or loaded.unexpected_keys)[0]
        raise invalid(
            f"{'lacks' if missing else 'holds'} '{strange}', which PEFT"
            f" {'expects' if missing else 'does not know'} for this checkpoint"
        )
    changes: dict[MatrixId, Callable[[], torch.Tensor]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if not module.supports_lora_conversion(ADAPTER):
            raise invalid(
                f"is of type {config.get('peft_type')!r}, which PEFT cannot convert to LoRA"
            )
        try:
            matrix = parse_key(f"{path}.weight", shape).matrix
        except UnknownKey as reason:
            raise invalid(f"changes '{path}', {reason}") from None
        if matrix is None:
            raise invalid(f"changes '{path}', the embeddings, which no LoRA can express")
        changes[matrix] = partial(_change, module)
    return changes


def _change(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        change: torch.Tensor = module.get_delta_weight(ADAPTER).to(torch.float32)
    return change


def _stock_model(checkpoint: Path) -> Any:
    """Return transformers' model of a checkpoint in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    multimodal = type(AutoConfig.from_pretrained(checkpoint)) in (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )
    model = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    return model.from_pretrained(checkpoint, dtype=torch.float32)
