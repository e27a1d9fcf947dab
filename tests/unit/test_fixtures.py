"""Tests of the shared fixtures."""

from pathlib import Path

from tests.support.make_adapters import SPECS


def test_every_adapter_is_a_folder_of_safetensors(adapters_dir: Path) -> None:
    for spec in SPECS:
        names = {path.name for path in (adapters_dir / spec.name).iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= names
        assert ("head.safetensors" in names) == bool(spec.labels)
