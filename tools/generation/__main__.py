"""Export items (docs/generation.md) and generate adapters for the demo model from them."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import yaml

from tools.generation.data import CONVERSATIONS, QUICK, SOURCES, TRUTH, Source
from vlora import paths
from vlora.cli import app

QUICK_EXAMPLES = 800
"""Maximum number of pictures per item in the short version."""
TRAINING = {
    "rank": 16, "learning_rate": 0.003, "batch_size": 32, "max_steps": 600, "evaluate_every": 40,
    "margin": 1.64,
}  # fmt: skip


def export(folder: Path, names: tuple[str, ...], most: int | None = None) -> Path:
    """Write the items' pictures, at most `most` of each, and the specification. Return its path.

    An item whose package is missing is left out, and the reason is printed.
    """
    listed = []
    for name in names:
        source = SOURCES[name]
        try:
            _export(source, folder / name, min(source.examples, most or source.examples))
        except (ImportError, OSError) as error:
            print(f"left out: {name} needs {source.needs} ({error})", file=sys.stderr)
            shutil.rmtree(folder / name, ignore_errors=True)
            continue
        item = {"name": name, "images": name, **source.spec}
        for key, file in (("conversations", CONVERSATIONS), ("truth", TRUTH)):
            if (folder / name / file).is_file():
                item[key] = f"{name}/{file}"
        listed.append(item)
    path = folder / "spec.yaml"
    checkpoint = str(paths.root() / "tools" / "demo" / "checkpoint")
    spec = {"base": checkpoint, "items": listed, "training": TRAINING}
    path.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    return path


def _export(source: Source, folder: Path, count: int) -> None:
    part = folder.with_name(folder.name + ".part")
    if not folder.exists():
        shutil.rmtree(part, ignore_errors=True)
        source.export(part, count)
        part.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.generation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four items only, under 15 minutes")
    parser.add_argument("--out", type=Path, default=Path("out/generated"), metavar="FOLDER")
    parser.add_argument("--paper", action="store_true", help="use the heuristic of the paper")
    parser.add_argument("--export-only", action="store_true", help="write data and spec.yaml only")
    arguments = parser.parse_args()
    data = arguments.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    names, most = (QUICK, QUICK_EXAMPLES) if arguments.quick else (tuple(SOURCES), None)
    spec = export(data, names, most)
    if not arguments.export_only:
        more = ["--paper"] if arguments.paper else []
        app(["adapters", "generate", str(spec), "--out", str(arguments.out / "adapters"), *more])


if __name__ == "__main__":
    main()
