"""Trial of a distribution: install it into a fresh environment, serve, and ask questions.

The server runs in the new environment, outside the source tree. The questions are sent from the
source tree's environment, because the sample pictures are not part of a distribution.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from clients.common import ClientError, connect
from tools.demo.show import ask, is_right, load_samples
from vlora.net import choose_ports

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "dist"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
START_SECONDS = 180.0
STOP_SECONDS = 60.0
INHERITED = ("HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "SSL_CERT_FILE")
"""Environment variables passed on to the fresh environment, in addition to pip's."""


class TrialError(ClientError):
    """Raised if a step fails. The message contains the end of the command's output."""


def clean_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a shell in which only `folder`'s environment is active."""
    kept = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    kept |= {key: os.environ[key] for key in INHERITED if key in os.environ}
    return {**kept, "PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"}


def run(command: Sequence[str | Path], log: Path, **given: object) -> None:
    """Run `command` and append its output to `log`. Raise TrialError if the command fails."""
    with log.open("ab") as file:
        file.write(f"$ {' '.join(map(str, command))}\n".encode())
        file.flush()
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, **given)  # type: ignore[call-overload]
    if done.returncode != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise TrialError(
            f"{Path(command[0]).name} ended with status {done.returncode}; {log} ends with:\n{end}"
        )


def tools_of(work: Path, log: Path, requirements: Path = REQUIREMENTS) -> Path:
    """Return the `bin` folder of an environment with the build tools. It is created once."""
    folder = work / "tools"
    ready = folder / requirements.name
    if not ready.is_file() or ready.read_text() != requirements.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", folder], log)
        run([folder / "bin" / "pip", "install", "--quiet", "-r", requirements], log)
        shutil.copy(requirements, ready)
    return folder / "bin"


def install(distribution: Path, folder: Path, constraints: Path, log: Path) -> Path:
    """Create an environment at `folder` and install the distribution with its `server` extra.
    Return the environment's `bin`."""
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", folder], log)
    wanted = f"vlora[server] @ {distribution.resolve().as_uri()}"
    command = [folder / "bin" / "pip", "install", "--constraint", constraints.resolve(), wanted]
    run(command, log, cwd=folder, env=clean_environment(folder))
    return folder / "bin"


def check_installed(folder: Path, log: Path) -> None:
    """Check that Python imports the package from `folder`, with compiled kernels and data."""
    code = (
        "import vlora; from pathlib import Path;"
        "from vlora import backends, paths; import vlora._kernels;"
        f"root = Path({str(folder.resolve())!r});"
        "assert Path(vlora.__file__).resolve().is_relative_to(root), vlora.__file__;"
        "assert paths.model_repository().resolve().is_relative_to(root), paths.root()"
    )
    environment = clean_environment(folder)
    run([folder / "bin" / "python", "-c", code], log, cwd=folder, env=environment)
    for words in (["adapters", "check"], ["repository", str(folder / "repository")]):
        run([folder / "bin" / "vlora", *words], log, cwd=folder, env=environment)


@contextmanager
def serving(command: Sequence[str | Path], folder: Path, log: Path) -> Iterator[str]:
    """Start `vlora serve` as `command` in `folder`, and yield its gRPC address once it is ready.

    Raise TrialError if it does not become ready, or does not end with status 0 on SIGTERM.
    """
    ports = choose_ports({"http_port": 0, "grpc_port": 0, "metrics_port": 0})
    options = [f"--{name.replace('_', '-')}={port}" for name, port in ports.items()]
    environment = clean_environment(folder)
    address = f"127.0.0.1:{ports['grpc_port']}"
    with log.open("ab") as file:
        server = subprocess.Popen(
            [*command, "serve", "--log", "-", "--grace", "2", *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        probe = [*command, "probe", address, "--quiet", "--deadline", "10"]
        while subprocess.run(probe, cwd=folder, env=environment).returncode != 0:
            if server.poll() is not None or time.monotonic() > deadline:
                raise TrialError(f"the server did not become ready; see {log}")
            time.sleep(0.5)
        yield address
        server.send_signal(signal.SIGTERM)
        status = server.wait(STOP_SECONDS)
        if status != 0:
            raise TrialError(f"the server ended with status {status}; see {log}")
    finally:
        server.kill()
        server.wait()


def ask_all(address: str, tell: Callable[[str], None]) -> tuple[int, int]:
    """Ask the demo's questions. Return the numbers of right answers and of questions."""
    client = connect(address, "video_analytics")
    try:
        samples = load_samples()
        right = 0
        for sample in samples:
            answer = ask(client, sample)
            if answer.error is None and is_right(sample.expected, answer.text):
                right += 1
            else:
                tell(f"  {sample.name}: {answer.shown!r} should be {sample.expected!r}")
        return right, len(samples)
    finally:
        client.close()
