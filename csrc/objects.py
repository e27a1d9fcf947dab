"""Object files that are compiled only if something that they depend on has changed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Object:
    """An object file, and the command that compiles it.

    The command is recorded in a file next to the object once the object is complete.
    """

    path: Path
    command: list[str]

    @property
    def rule(self) -> Path:
        """File in which the compiler lists the files that the object depends on."""
        return self.path.with_suffix(".d")

    @property
    def record(self) -> Path:
        return self.path.with_suffix(".command")

    def is_current(self) -> bool:
        """Return whether this command has compiled the object, and no source has changed since."""
        if not all(path.exists() for path in (self.path, self.rule, self.record)):
            return False
        if self.record.read_text() != shlex.join(self.command):
            return False
        sources = [Path(name) for name in self.rule.read_text().replace("\\\n", " ").split()[1:]]
        compiled = self.path.stat().st_mtime
        return all(source.exists() and source.stat().st_mtime <= compiled for source in sources)

    def compile(self, run: Callable[[list[str]], None]) -> None:
        """Compile the object. An interrupted compilation leaves no record."""
        self.record.unlink(missing_ok=True)
        run([*self.command, "-MMD", "-MF", str(self.rule), "-o", str(self.path)])
        self.record.write_text(shlex.join(self.command))
