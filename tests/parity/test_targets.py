"""Parity with PEFT of the modules that an adapter's config targets, their ranks and scales."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from transformers import LlavaForConditionalGeneration

from tests.support.oracle import Oracle, Question
from vlora.adapters.errors import ErrorFactory
from vlora.adapters.peft import PeftConfig, read_config
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.errors import InvalidArgument
from vlora.request import Request
from vlora.sampling import SamplingParams

BLOCKS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "down_proj")}
MODULES = [
    *(
        f"model.language_model.layers.{layer}.{block}.{target}"
        for layer in (0, 1, 2, 11)
        for block, targets in BLOCKS.items()
        for target in targets
    ),
    "lm_head",
]
names = st.sampled_from(
    [
        *("q_proj", "self_attn.q_proj", "down_proj", "lm_head", "proj", "layers.1.mlp.gate_proj"),
        *("model.language_model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.v_proj"),
    ]
)
patterns = st.sampled_from(
    [
        r".*language_model\.layers\.\d+\.(self_attn\.q_proj|mlp\.\w+_proj)",
        r"(?!.*lm_head).*_proj",
        r"(?:.*\.)?(k_proj|lm_head)",
        r".*layers\.[02]\.self_attn\.(q|v)_proj$",
        *("q_proj", "all-linear", ".*", r".*layers\.\d{1,2}\.mlp.*", r"(?i).*Q_PROJ"),
    ]
)
ends = st.sampled_from(
    [
        *("q_proj", "mlp.gate_proj", "layers.1.self_attn.q_proj", r"layers\.\d+\.mlp\..*"),
        *("layers.1.*", ".*v_proj", "o_proj|k_proj", "layers.11.mlp.down_proj", "x", "q.proj"),
    ]
)
by_names = st.fixed_dictionaries(
    {"target_modules": st.lists(names, min_size=1, max_size=3)},
    optional={
        "exclude_modules": st.one_of(st.lists(names, max_size=2), patterns),
        "layers_to_transform": st.one_of(st.integers(0, 3), st.lists(st.integers(0, 12))),
    },
)
by_pattern = st.fixed_dictionaries(
    {"target_modules": patterns}, optional={"exclude_modules": st.lists(names, max_size=2)}
)


def read(folder: Path, config: Mapping[str, Any]) -> PeftConfig:
    full = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config
    (folder / "adapter_config.json").write_text(json.dumps(full))
    return read_config(folder, ErrorFactory("x"))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    config=st.one_of(by_names, by_pattern),
    layers_pattern=st.sampled_from([None, "layers", ["blocks", "layers"], "h"]),
)
def test_targets_equal_those_of_peft(
    tmp_path: Path, config: dict[str, Any], layers_pattern: str | list[str] | None
) -> None:
    if config.get("layers_to_transform") is not None and layers_pattern:
        config = config | {"layers_pattern": layers_pattern}
    ours, theirs = read(tmp_path, config), LoraConfig(**config)
    if theirs.target_modules == "all-linear":  # PEFT replaces it by the names of all linear layers
        theirs.target_modules = {path for path in MODULES if path != "lm_head"}
    for path in MODULES:
        expected = bool(check_target_module_exists(theirs, path))
        if type(check_target_module_exists(theirs, path)).__name__ == "_ExcludedModule":
            expected = False
        assert ours.targets([path]) == expected, path


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ranks=st.dictionaries(ends, st.integers(1, 64), max_size=4),
    alphas=st.dictionaries(ends, st.integers(1, 64), max_size=4),
    rslora=st.booleans(),
)
def test_ranks_and_scales_equal_those_of_peft(
    tmp_path: Path, ranks: dict[str, int], alphas: dict[str, int], rslora: bool
) -> None:
    ours = read(
        tmp_path,
        {
            "target_modules": ".*",
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "use_rslora": rslora,
        },
    )
    for path in MODULES:
        rank = ranks.get(get_pattern_key(list(ranks), path), 4)
        alpha = alphas.get(get_pattern_key(list(alphas), path), 8)
        assert ours.rank_of([path]) == rank
        assert ours.scale_of([path]) == alpha / (rank**0.5 if rslora else rank)


ADAPTERS: dict[str, dict[str, Any]] = {
    "some-layers": {
        "target_modules": ["o_proj", "up_proj"],
        "layers_to_transform": [0, 3],
        "layers_pattern": "layers",
        "alpha_pattern": {"layers.3.mlp.up_proj": 24},
    },
    "with-exclusions": {
        "target_modules": ["o_proj", "gate_proj", "lm_head"],
        "exclude_modules": r".*layers\.[12]\.mlp.*",
        "use_rslora": True,
    },
    "by-full-names": {
        "target_modules": [f"model.language_model.layers.{i}.self_attn.q_proj" for i in range(4)],
        "rank_pattern": {"layers.2.self_attn.q_proj": 9},
    },
}


@pytest.fixture(scope="module")
def saved(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of adapters saved by PEFT, whose configs name modules in special ways."""
    root = tmp_path_factory.mktemp("targets")
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        config = LoraConfig(r=4, lora_alpha=16, init_lora_weights=False, **options)
        peft = get_peft_model(model, config)
        peft.save_pretrained(root / name, save_embedding_layers=False)
    return root


@pytest.fixture(scope="module")
def adapters(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of `saved` with one more adapter, whose config has a target without weights."""
    root = tmp_path_factory.mktemp("stripped") / "adapters"
    shutil.copytree(saved, root)
    shutil.copytree(saved / "by-full-names", root / "target-without-weights")
    path = root / "target-without-weights" / "adapter_config.json"
    config = json.loads(path.read_text())
    config["init_lora_weights"] = True  # otherwise PEFT initialises missing weights with noise
    config["target_modules"] += ["down_proj", "vision_tower.encoder.layers.0.mlp.fc1", "wq"]
    path.write_text(json.dumps(config))
    return root


def test_adapters_with_special_targets_answer_as_with_peft(
    checkpoint: Path, adapters: Path
) -> None:
    oracle = Oracle(checkpoint, adapters)
    engine = Engine(Options(model=checkpoint, adapters=adapters))
    assert not engine.adapters.table.broken
    answers = set()
    for name in (*ADAPTERS, "target-without-weights"):
        question = Question("<s>how many circles are there? Answer:", name, None)
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=False)
        engine.add(engine.prepare(Request("q", question.prompt, sampling, name)), arrival=0.0)
        tokens: list[int] = []
        while not engine.idle:
            tokens += [token for output in engine.step() for token in output.token_ids]
        oracle.near_ties(question, oracle.greedy(question, 24), tokens)
        answers.add(tuple(tokens))
    assert len(answers) == len(ADAPTERS), "all adapters but the copy must answer differently"


def test_weights_outside_the_targets_are_refused_where_peft_ignores_them(
    checkpoint: Path, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "with-exclusions", tmp_path / "narrowed")
    path = tmp_path / "narrowed" / "adapter_config.json"
    narrowed = {"target_modules": ["o_proj", "lm_head"], "exclude_modules": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | narrowed))
    oracle = Oracle(checkpoint, tmp_path)
    oracle.attach("narrowed")
    applied = [name for name, _ in oracle.model.named_parameters() if "lora_A" in name]
    assert any("o_proj" in name for name in applied)
    assert not any("gate_proj" in name for name in applied)
    engine = Engine(Options(model=checkpoint, adapters=tmp_path))
    with pytest.raises(InvalidArgument, match=r"gate_proj.*does not target"):
        engine.adapters.slot("narrowed")
