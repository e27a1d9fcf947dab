"""Tests of the device that a model's instance group names, and of the number of instances."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlora.config import Options
from vlora.errors import InvalidArgument
from vlora.serving.model_process import options_of_instance, require_one_instance


def _args(*groups: dict[str, Any], kind: str = "MODEL", gpu: int = 0) -> dict[str, str]:
    return {
        "model_name": "lmm",
        "model_config": json.dumps({"name": "lmm", "instance_group": groups}),
        "model_instance_kind": kind,
        "model_instance_device_id": str(gpu),
    }


@pytest.mark.parametrize("kind", ["MODEL", "CPU", "KIND_CPU"])
@pytest.mark.parametrize("device", ["cpu", "auto", "cuda:3"])
def test_the_option_chooses_the_device_of_other_groups(kind: str, device: str) -> None:
    options = Options(device=device)
    assert options_of_instance(options, _args(kind=kind, gpu=1)) == options
    assert options_of_instance(options, {"model_name": "lmm"}) == options


@pytest.mark.parametrize("kind", ["GPU", "KIND_GPU"])
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_a_group_on_a_gpu_chooses_its_number(kind: str, device: str) -> None:
    args = _args({"kind": "KIND_GPU", "gpus": [1]}, kind=kind, gpu=1)
    assert options_of_instance(Options(device=device), args).device == "cuda:1"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_group_and_an_option_with_different_devices_are_refused(device: str) -> None:
    with pytest.raises(InvalidArgument, match=f"names 'cuda:1', but 'device' = '{device}'"):
        options_of_instance(Options(device=device), _args(kind="GPU", gpu=1))


def test_an_engine_has_one_instance() -> None:
    require_one_instance(_args())
    require_one_instance(_args({"count": 1, "kind": "KIND_MODEL"}))
    require_one_instance(_args({"count": 1, "gpus": [2]}))
    for groups in ([{"count": 2}], [{"gpus": [0, 1]}], [{"count": 1}, {"count": 1}]):
        with pytest.raises(InvalidArgument, match="have 2 instances; a server has one engine"):
            require_one_instance(_args(*groups))
