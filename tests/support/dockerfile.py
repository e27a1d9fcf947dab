"""Parser of Dockerfiles, and a replay of one in a root folder instead of a container.

No registry is used: the caller provides a root folder in place of the base image.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

MOUNT = re.compile(r"^--mount=type=bind,from=(\w+),source=(\S+),target=(\S+)\s+")
VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NO_FILES = {"LABEL", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
"""Instructions that change no files."""
INHERITED = ("PIP_",)
"""Prefixes of environment variables that a replay inherits: pip's settings on this machine."""


@dataclass(frozen=True)
class Instruction:
    keyword: str
    value: str

    @property
    def words(self) -> list[str]:
        """The words of an instruction in JSON form, such as `CMD ["a", "b"]`."""
        words = re.search(r"\[.*\]$", self.value, re.DOTALL)
        assert words, f"{self.keyword} {self.value} is not in JSON form"
        return list(json.loads(words[0]))


@dataclass
class Stage:
    """The instructions from one FROM to the next."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, keyword: str) -> Instruction:
        return [one for one in self.instructions if one.keyword == keyword][-1]


def read(text: str) -> list[Stage]:
    """Parse the stages of a Dockerfile.

    ARG instructions before the first FROM are substituted in the FROM lines.
    """
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for one in _instructions(text):
        if one.keyword == "FROM":
            base, _, name = expand(one.value, arguments).partition(" AS ")
            stages.append(Stage(base.strip(), name.strip()))
        elif not stages:
            key, _, value = one.value.partition("=")
            arguments[key] = value
        else:
            stages[-1].instructions.append(one)
    return stages


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    for command in re.split(r"(?<!\\)\n", "\n".join(lines)):
        keyword, _, value = command.replace("\\\n", " ").partition(" ")
        yield Instruction(keyword.upper(), value.strip())


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Substitute variables in `text`."""
    return VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def settings(text: str) -> dict[str, str]:
    """Return the variables in the value of an instruction such as `ENV a=b c=d`, LABEL or ARG."""
    return dict(word.partition("=")[::2] for word in shlex.split(text))


class Replay:
    """Replay of one stage in the folder `root`, which holds a complete file system.

    context: source folder of COPY.
    stages: root folders of the earlier stages, by name.
    arguments: values of ARG instructions.
    shared: folders and files of this machine that are mounted at the same paths in the root.

    It needs root permissions.
    """

    def __init__(
        self,
        root: Path,
        context: Path,
        stages: Mapping[str, Path],
        arguments: Mapping[str, str],
        shared: Sequence[Path] = (),
    ) -> None:
        self.root = root
        self._context = context
        self._stages = stages
        self._arguments = dict(arguments)
        self._shared = shared
        self.environment = {"PATH": PATH}
        self.folder = "/"
        self.user = "0:0"

    def do(self, one: Instruction) -> None:
        """Execute one instruction."""
        match one.keyword:
            case "RUN":
                self._run(one.value)
            case "COPY":
                self._copy(one.value)
            case "ENV":
                self.environment |= settings(expand(one.value, self.environment))
            case "ARG":
                key, _, value = one.value.partition("=")
                self._arguments.setdefault(key, value)
            case "WORKDIR":
                self.folder = one.value
                self._inside(one.value).mkdir(parents=True, exist_ok=True)
            case "USER":
                self.user = one.value
            case keyword if keyword not in NO_FILES:
                pytest.fail(f"{keyword} cannot be replayed")

    def _inside(self, path: str) -> Path:
        return self.root / str(Path(self.folder) / path).lstrip("/")

    def _run(self, value: str) -> None:
        mount = MOUNT.match(value)
        if mount:
            source = self._stages[mount[1]] / mount[2].lstrip("/")
            shutil.copytree(source, self._inside(mount[3]))
        command = value[mount.end() :] if mount else value
        done = subprocess.run(
            self.command(["/bin/sh", "-c", f"cd {self.folder} && {command}"]),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        if mount:
            shutil.rmtree(self._inside(mount[3]))

    def _copy(self, value: str) -> None:
        origin = self._context
        if value.startswith("--from="):
            name, _, value = value.removeprefix("--from=").partition(" ")
            origin = self._stages[name]
        *sources, target = value.split()
        for source in sources:
            path = origin / source.lstrip("/")
            copy = self._inside(target)
            if path.is_dir():
                shutil.copytree(path, copy, dirs_exist_ok=True)
            else:
                if target.endswith("/") or copy.is_dir():
                    copy /= path.name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)

    def command(self, words: Sequence[str], read_only: bool = False) -> list[str]:
        """Return a command that runs `words` in the root folder as PID 1, with its own mounts.

        read_only: mount the root folder read-only, and /tmp as a tmpfs with Docker's options, like
            a container with `--read-only`.
        """
        root = shlex.quote(str(self.root))
        steps = [
            "mount --make-rprivate /",
            f"mount --bind {root} {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o size=1g tmpfs {root}/dev/shm",
        ]
        for path in self._shared:
            inside = f"{root}{path}"
            create = f"mkdir -p {inside}" if path.is_dir() else f"touch {inside}"
            steps.append(
                f"mkdir -p {root}{path.parent} && {create} && mount --bind {path} {inside}"
            )
        if read_only:
            steps.append(f"mount -t tmpfs -o noexec,nosuid,nodev,mode=1777 tmpfs {root}/tmp")
            steps.append(f"mount -o remount,bind,ro {root}")
        steps.append(f"exec {shlex.join(self.inside(words))}")
        script = " && ".join(steps)
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", script]

    def inside(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs `words` in the root folder, once its mounts exist."""
        inherited = {key: value for key, value in os.environ.items() if key.startswith(INHERITED)}
        variables = {**inherited, **self._arguments, **self.environment}
        pairs = [f"{key}={value}" for key, value in variables.items()]
        enter = ["chroot", f"--userspec={self.user}", str(self.root)]
        return [*enter, "/usr/bin/env", "-i", *pairs, *words]
