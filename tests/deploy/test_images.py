"""The Dockerfiles: linted, and replayed instruction by instruction in a clean root.

No registry is needed: Debian's own root with its Python stands in for the base image. Needs root
(mounts) and the ports 8000 to 8002. REPLAY_SHARED: files and folders of this machine, separated by
colons, that its settings of pip need; TORCH_INDEX: the build argument; REPLAY_WHEEL: a wheel that
stands for the build stage, which takes minutes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
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
"""What python:3.11-slim has, of Debian; the environment that is made of it stands at /usr/local."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "make", "nvcc")
LIBRARY = "wheels/lib/libvlora_atmm_cuda.so"
STOP_SECONDS = 60


@pytest.mark.parametrize("file", FILES)
def test_hadolint_has_no_complaint(tools: Path, file: str) -> None:
    assert (
        kit.output_of([tools / "hadolint", "--failure-threshold", "style", kit.DOCKER / file]) == ""
    )


def stand_in() -> Path:
    """A clean root in the place of python:3.11-slim-bookworm."""
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


def replayed(stages: list[Stage], folder: Path) -> Iterator[Replay]:
    """Every instruction of every stage, in roots under `folder`."""
    listed = kit.output_of(["git", "ls-files"], cwd=kit.ROOT).splitlines()
    context = folder / "context"
    for name in listed:
        if (kit.ROOT / name).is_file():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(kit.ROOT / name, context / name)
    arguments = {key: os.environ[key] for key in ("TORCH_INDEX",) if key in os.environ}
    shared = [Path(one) for one in os.environ.get("REPLAY_SHARED", "").split(":") if one]
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
        kit.output_of(["cp", "--archive", "--reflink=auto", stand_in(), root])
        replay = Replay(root, context, roots, arguments, shared)
        for one in stage.instructions:
            started = time.monotonic()
            replay.do(one)
            if one.keyword == "RUN":
                print(f"RUN {one.value[:70]}… {time.monotonic() - started:.0f} s")
        roots[stage.name] = root
        yield replay


def without(one: Instruction, words: str) -> Instruction:
    """A RUN without the command that has these words; what that would have made is there, empty."""
    commands = [command for command in one.value.split("&&") if words not in command]
    made = [f"mkdir -p /wheels/lib && touch /{LIBRARY}"] if "cuda_build" in words else commands
    return Instruction("RUN", " && ".join(made))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not under /tmp: the roots take gigabytes."""
    place = kit.WORK / "roots" / f"run-{os.getpid()}"
    place.mkdir(parents=True)
    yield place
    shutil.rmtree(place)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
def test_the_cpu_image_builds_and_serves_read_only_as_a_user_without_compilers(
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

        where = ["nsenter", f"--target={served.pid}", "--mount", "--pid"]

        def look(words: list[str]) -> int:
            return subprocess.run([*where, *final.inside(words)], capture_output=True).returncode

        until(lambda: served.cmdline()[2:3] == ["serve"])  # after mounts and `exec`
        assert look(["/usr/bin/test", "-w", "/tmp"]) == 0
        write = [*where, "chroot", str(final.root), "/usr/bin/touch", "/written"]
        wrote = subprocess.run(write, capture_output=True, text=True)
        assert "Read-only file system" in wrote.stderr, wrote.stderr
        health = last.last("HEALTHCHECK").words

        def asked(command: list[str], status: int) -> bool:
            assert outer.poll() is None, log.read_text()[-3000:]
            return look(command) == status

        until(lambda: asked(health, 0), seconds=120)  # alive from the start on
        question = [word for word in health if word != "--alive"]
        until(lambda: asked(question, Health.READY), seconds=300)
        assert ask_all("127.0.0.1:8001", print) == (15, 15)
        served.send_signal(getattr(signal, last.last("STOPSIGNAL").value))
        assert outer.wait(STOP_SECONDS) == 0, log.read_text()[-3000:]


@pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
def test_the_gpu_images_own_steps_but_those_of_nvidias_images(folder: Path) -> None:
    """Not run: nvcc and tritonserver, which only NVIDIA's images have. Their compilers are Debian's
    here, to be seen gone."""
    build, run = read((kit.DOCKER / "Dockerfile").read_text())
    left_out = {"tools.tile_search.cuda_build": 0, "tritonserver --help": 0}
    for stage in (build, run):
        for index, one in enumerate(stage.instructions):
            for words in left_out:
                if one.keyword == "RUN" and words in one.value:
                    left_out[words] += 1
                    stage.instructions[index] = without(one, words)
    assert set(left_out.values()) == {1}
    compilers = "apt-get update && apt-get install --yes --no-install-recommends g++ make"
    run.instructions.insert(0, Instruction("RUN", compilers))
    *_, final = replayed([build, run], folder)
    for name in COMPILERS:
        found = subprocess.run(
            final.command(["/bin/sh", "-c", f"command -v {name}"]), capture_output=True, text=True
        )
        assert found.stdout == "", found.stdout
    health = run.last("HEALTHCHECK").words
    done = subprocess.run(final.command(health, read_only=True), capture_output=True, text=True)
    assert done.returncode == Health.DEAD, done.stderr
    entry = [*run.last("ENTRYPOINT").words, *run.last("CMD").words]
    done = subprocess.run(final.command(entry, read_only=True), capture_output=True, text=True)
    assert "tritonserver was not found on PATH" in done.stderr
