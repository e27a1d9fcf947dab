"""Tests of the Dockerfiles: they are linted, and replayed instruction by instruction.

No registry is needed: a root folder with Debian and its Python replaces the base image. The tests
need root permissions (for mounts) and the ports 8000 to 8002. Environment variables:

REPLAY_SHARED: files and folders that this machine's pip settings refer to, separated by colons.
TORCH_INDEX: value of the build argument.
REPLAY_WHEEL: wheel to use instead of running the build stage, which takes minutes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.support import deploy_kit as kit
from tests.support.dockerfile import Instruction, Replay, Stage, read
from tests.support.polling import until
from tools.dist.trial import ask_all
from vlora.launcher.probe import Health

FILES = ["Dockerfile", "Dockerfile.cpu"]
DEBIAN = "http://deb.debian.org/debian"
PYTHON = "ca-certificates,libpython3.11,python3,python3-dev,python3-venv"
"""Debian packages with the contents of python:3.11-slim; a virtual environment is at /usr/local."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "make", "nvcc")
LIBRARY = "wheels/lib/libvlora_atmm_cuda.so"
STOP_SECONDS = 60


@pytest.mark.parametrize("file", FILES)
def test_hadolint_reports_nothing(tools: Path, file: str) -> None:
    assert (
        kit.output_of([tools / "hadolint", "--failure-threshold", "style", kit.DOCKER / file]) == ""
    )


def base_root() -> Path:
    """Return a clean root that replaces python:3.11-slim-bookworm."""
    root = kit.WORK / "roots" / "python"
    if not (root / "usr" / "local" / "bin" / "pip").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        files = kit.debian("debootstrap")
        debootstrap = ["/bin/sh", files / "usr/sbin/debootstrap", "--variant=minbase"]
        kit.output_of(
            [*debootstrap, f"--include={PYTHON}", "bookworm", root, DEBIAN],
            env={**os.environ, "DEBOOTSTRAP_DIR": str(files / "usr/share/debootstrap")},
        )
        for name in ("resolv.conf", "hosts"):
            shutil.copy(Path("/etc") / name, root / "etc" / name)
        kit.output_of(["chroot", root, "/usr/bin/python3", "-m", "venv", "/usr/local"])
    return root


def replayed(
    stages: list[Stage], folder: Path, replaced: Mapping[str, str] | None = None
) -> Iterator[Replay]:
    """Replay all instructions of all stages, in roots under `folder`; yield each stage's replay.

    replaced: contents of files of the build context that differ from the source tree's.
    """
    listed = kit.output_of(["git", "ls-files"], cwd=kit.ROOT).splitlines()
    context = folder / "context"
    for name in listed:
        if (kit.ROOT / name).is_file():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(kit.ROOT / name, context / name)
    for name, text in (replaced or {}).items():
        (context / name).write_text(text)
    arguments = {key: os.environ[key] for key in ("TORCH_INDEX",) if key in os.environ}
    shared = [Path(name) for name in os.environ.get("REPLAY_SHARED", "").split(":") if name]
    roots: dict[str, Path] = {}
    wheel = os.environ.get("REPLAY_WHEEL")
    if wheel is not None:
        roots["build"] = folder / "build"
        (roots["build"] / "wheels").mkdir(parents=True)
        shutil.copy(wheel, roots["build"] / "wheels")
        (roots["build"] / LIBRARY).parent.mkdir()
        (roots["build"] / LIBRARY).touch()
        stages = stages[1:]
    for stage in stages:
        root = folder / (stage.name or "final")
        kit.output_of(["cp", "--archive", "--reflink=auto", base_root(), root])
        replay = Replay(root, context, roots, arguments, shared)
        for one in stage.instructions:
            started = time.monotonic()
            replay.do(one)
            if one.keyword == "RUN":
                print(f"RUN {one.value[:70]}… {time.monotonic() - started:.0f} s")
        roots[stage.name] = root
        yield replay


def without(one: Instruction, words: str) -> Instruction:
    """Return a RUN instruction without the command that contains `words`.

    If the command builds the CUDA library, an empty file replaces the library.
    """
    commands = [command for command in one.value.split("&&") if words not in command]
    replacement = (
        [f"mkdir -p /wheels/lib && touch /{LIBRARY}"] if "cuda.build" in words else commands
    )
    return Instruction("RUN", " && ".join(replacement))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder for the roots, which take gigabytes: too much for /tmp."""
    folder = kit.WORK / "roots" / f"run-{os.getpid()}"
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
def test_the_cpu_image_serves_read_only_as_a_user_and_has_no_compilers(
    folder: Path,
) -> None:
    stages = read((kit.DOCKER / "Dockerfile.cpu").read_text())
    *_, final = replayed(stages, folder)
    last = stages[-1]
    assert final.user == "10001:10001"
    for name in COMPILERS:
        found = subprocess.run(
            final.command(["/bin/sh", "-c", f"command -v {name}"]), capture_output=True, text=True
        )
        assert found.stdout == "", found.stdout

    entry = [*last.last("ENTRYPOINT").words, *last.last("CMD").words]
    log = folder / "serve.log"
    with kit.running(final.command(entry, read_only=True), log) as outer:
        served = until(lambda: psutil.Process(outer.pid).children())[0]

        enter = ["nsenter", f"--target={served.pid}", "--mount", "--pid"]

        def run_inside(words: list[str]) -> int:
            return subprocess.run([*enter, *final.inside(words)], capture_output=True).returncode

        # The process becomes the entry point after the mounts.
        until(lambda: served.cmdline() == entry)
        assert run_inside(["/usr/bin/test", "-w", "/tmp"]) == 0
        write = [*enter, "chroot", str(final.root), "/usr/bin/touch", "/written"]
        refused = subprocess.run(write, capture_output=True, text=True)
        assert "Read-only file system" in refused.stderr, refused.stderr
        assert run_inside(["/bin/sh", "-c", "sleep 3 >/dev/null 2>&1 &"]) == 0
        # PID 1 adopts and reaps it; a zombie would keep its name.
        until(lambda: "sleep" in [child.name() for child in served.children()])
        until(lambda: "sleep" not in [child.name() for child in served.children()])
        health = last.last("HEALTHCHECK").words

        def exits_with(command: list[str], status: int) -> bool:
            assert outer.poll() is None, log.read_text()[-3000:]
            return run_inside(command) == status

        # The server counts as alive while it starts.
        until(lambda: exits_with(health, 0), seconds=120)
        question = [word for word in health if word != "--alive"]
        until(lambda: exits_with(question, Health.READY), seconds=300)
        assert ask_all("127.0.0.1:8001", print) == (15, 15)
        served.send_signal(getattr(signal, last.last("STOPSIGNAL").value))
        assert outer.wait(STOP_SECONDS) == 0, log.read_text()[-3000:]


@pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
def test_the_gpu_image_builds_without_the_steps_that_need_nvidias_images(folder: Path) -> None:
    """Leave out the steps with nvcc and tritonserver, which only NVIDIA's images have.

    Debian's compilers are installed first, to check that the image removes all but the C compiler,
    which the package `triton` needs. The GPU image's packages are installed in the versions of the
    CPU image's lock file.
    """
    build, run = read((kit.DOCKER / "Dockerfile").read_text())
    left_out = {"csrc.atmm.cuda.build": 0, "tritonserver --help": 0}
    for stage in (build, run):
        for index, one in enumerate(stage.instructions):
            for words in left_out:
                if one.keyword == "RUN" and words in one.value:
                    left_out[words] += 1
                    stage.instructions[index] = without(one, words)
    assert set(left_out.values()) == {1}
    compilers = "apt-get update && apt-get install --yes --no-install-recommends g++ make"
    run.instructions.insert(0, Instruction("RUN", compilers))
    locks = {name: kit.DOCKER / f"requirements.{name}.txt" for name in ("cpu", "gpu")}
    named = {line.partition("==")[0] for line in locks["gpu"].read_text().splitlines()}
    lines = locks["cpu"].read_text().splitlines()
    lock = "\n".join(line for line in lines if line.partition("==")[0] in named)
    replaced = {str(locks["gpu"].relative_to(kit.ROOT)): lock}
    *_, final = replayed([build, run], folder, replaced)
    for name in COMPILERS:
        found = subprocess.run(
            final.command(["/bin/sh", "-c", f"command -v {name}"]), capture_output=True, text=True
        )
        assert (found.stdout != "") == (name in ("cc", "gcc")), found.stdout
    health = run.last("HEALTHCHECK").words
    done = subprocess.run(final.command(health, read_only=True), capture_output=True, text=True)
    assert done.returncode == Health.DEAD, done.stderr
    entry = [*run.last("ENTRYPOINT").words, *run.last("CMD").words]
    done = subprocess.run(final.command(entry, read_only=True), capture_output=True, text=True)
    assert "tritonserver was not found on PATH" in done.stderr
