"""Checks of a model's instance groups in `config.pbtxt`, and the GPU that they name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from vlora.config import AUTO, Options
from vlora.errors import InvalidArgument

ON_GPU = ("GPU", "KIND_GPU")
"""Kinds of an instance that has a GPU of its own, as Triton spells them."""


def require_one_instance(args: Mapping[str, str]) -> None:
    """Raise InvalidArgument if the model has several instances.

    A cancellation must reach the engine of its request, so a server has one engine.

    args: the argument that Triton passes to `initialize`.
    """
    groups = json.loads(args.get("model_config") or "{}").get("instance_group", [])
    count = sum(group.get("count", 1) * max(1, len(group.get("gpus", ()))) for group in groups)
    if count > 1:
        raise InvalidArgument(
            f"the instance groups of '{args['model_name']}' have {count} instances; a server has"
            " one engine, so start a server for each GPU"
        )


def options_of_instance(options: Options, args: Mapping[str, str]) -> Options:
    """Return the options with the GPU that the model's instance group names.

    An instance group of KIND_GPU chooses the number of the GPU. The option `device` must be "auto",
    "cuda" or that GPU. Groups of any other kind leave the choice to the option.

    args: the argument that Triton passes to `initialize`.

    Raises InvalidArgument if the option names another device.
    """
    if args.get("model_instance_kind") not in ON_GPU:
        return options
    gpu = f"cuda:{args['model_instance_device_id']}"
    if options.device not in (AUTO, "cuda", gpu):
        raise InvalidArgument(
            f"the instance group of '{args['model_name']}' names '{gpu}', but 'device' ="
            f' \'{options.device}\'; set it to "auto", "cuda" or "{gpu}"'
        )
    return replace(options, device=gpu)
