"""Report of a run: figures from the results of its stages, in one folder and in one archive."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

KEPT = (
    "machine.json",
    "steps.json",
    "kernels.json",
    "switch.json",
    "bench_step.json",
    "bench_engine.json",
    "sanitize.json",
    "resources.json",
)
"""Results that are copied to the folder of figures, in addition to the tile tables."""


def report(out: Path) -> str:
    """Write the figures (see `write_figures`), and print the summary.

    Return a line for the log with the number of files and their folder.
    """
    count = write_figures(out)
    print((out / "figures" / "summary.md").read_text())
    return f"{count} files in {out / 'figures'}"


def write_figures(out: Path) -> int:
    """Write the results of all stages so far, and a summary, to `out`/figures.

    Return the number of files.
    """
    figures = out / "figures"
    figures.mkdir(exist_ok=True)
    found = [out / name for name in KEPT if (out / name).exists()] + sorted(out.glob("cuda-*.json"))
    for file in found:
        shutil.copyfile(file, figures / file.name)
    (figures / "summary.md").write_text(summary(out))
    return len(found) + 1


def archive(out: Path, to: Path) -> None:
    """Write all results and logs in `out` to the archive `to` (tar.gz), replacing an older one."""
    to.parent.mkdir(parents=True, exist_ok=True)
    draft = to.with_name(f"{to.name}.draft")
    with tarfile.open(draft, "w:gz") as file:
        file.add(out, arcname="gpu", filter=lambda one: None if one.name.endswith(".gz") else one)
    draft.replace(to)


def summary(out: Path) -> str:
    """Return the text of a page for docs/benchmarks, with the figures of all stages."""
    here, stages = read(out / "machine.json"), read(out / "stages.json").get("stages", {})
    lines = [f"# ATMM on {here.get('device', 'no GPU')}", ""]
    if "limits" in here:
        limits, driver = here["limits"], here.get("nvidia_smi", {}).get("driver_version")
        lines += [
            f"Copy {limits['copy'] / 1e12:.2f} TB/s, bf16 {limits['bf16'] / 1e12:.0f} and fp32"
            f" {limits['fp32'] / 1e12:.1f} TFLOP/s, measured in this run on random data;"
            f" torch {here['packages']['torch']}, driver {driver}.",
            "",
        ]
    lines += ["| stage | ended | s | result |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {one['ending']} | {one['seconds']:.0f} | {one['says'].replace('|', '/')} |"
        for name, one in stages.items()
    ]
    if figures := read(out / "kernels.json"):
        lines += ["", "| kernels (speed-ups, geometric means) | |", "|---|---|"]
        lines += [f"| {k} | {v} |" for k, v in figures["summary"].items() if k != "left_out"]
        left = figures["summary"]["left_out"]
        lines += [f"| left out: {name} | {why} |" for name, why in left.items()]
    if figures := read(out / "steps.json"):
        lines += [
            "",
            "| step | rows | needed ms | graph ms | single launches ms | difference of logits |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['model']} {r['kind']} | {r['rows']} | {r['needed_ms']} | {r['ms']['graph']} |"
            f" {r['ms']['eager']} | {r['difference']:.1e} |"
            for r in figures["rows"]
        ]
    if figures := read(out / "switch.json"):
        lines += [
            "",
            "| merge | limit ms | atmm | in place | addmm | copy |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['model']} r{r['rank']} | {r['limit_ms']} | {r['ms']['atmm']} |"
            f" {r['ms']['atmm_in_place']} | {r['ms']['addmm']} | {r['ms']['copy']} |"
            for r in figures["rows"]
        ]
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write(path: Path, value: object) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value, indent=1) + "\n")
    draft.replace(path)
