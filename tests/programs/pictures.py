"""Draw the documentation's pictures of the playground or of terminals, with the demo model.

usage: python -m tests.programs.pictures playground|terminals

The terminals show what the commands print, with servers on the default ports.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from tests.support.browser import Page, browser
from tests.support.gateway import running
from tests.support.polling import until
from vlora import paths
from vlora.launcher.server import TritonServer

PICTURES = Path(__file__).parents[2] / "docs" / "images"
ANSWERED = 40
"""Number of answers that the picture of the live mode shows."""

COUNT = "document.querySelector('#live-frames div:nth-child(2) dd')"
"""Element with the number of answers. The page replaces it when the number changes."""


DEMO = paths.root() / "tools/demo"
COLUMNS = 118
ERASED = re.compile(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")  # What stands between two live tables.
# Pages do not load the font that the format names.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
CAMERA = "  {1}: {{url: synthetic:{0}, seconds: 0.1, frames: 2, priority: 1}}\n"
CAMERAS = """server: 127.0.0.1:8001
page: {listen: "127.0.0.1:8090"}
defaults: {task: video}
cameras:
  gate: {url: synthetic:10, interval: 10, deadline_ms: 60000}
  yard: {url: synthetic:11, interval: 10, deadline_ms: 60000}
"""


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, line: str) -> None:
        self._line, self._file = line, Path(tempfile.mkstemp(dir=".")[1])
        command = f"stty rows 40 cols {COLUMNS}; exec bash -c {shlex.quote(line)}"
        self.process = subprocess.Popen(
            ["script", "-qfec", command, self._file], stdout=subprocess.DEVNULL
        )

    @property
    def text(self) -> str:
        """The command and its output so far, with this machine's paths shortened."""
        output = self._file.read_bytes().decode().partition("\n")[2].partition("\nScript done")[0]
        output = output.replace(str(Path.cwd()), "~").replace(str(paths.root()), "~/vlora")
        return f"\x1b[1m$ {self._line}\x1b[0m\n" + output.replace("\r\n", "\n")

    def wait(self, text: str) -> Terminal:
        until(lambda: text in self.text, 900, pause=0.5)
        return self


def run(line: str) -> str:
    terminal = Terminal(line)
    terminal.process.wait()
    return terminal.text


def draw(name: str, *texts: str) -> None:
    console = Console(record=True, file=io.StringIO(), width=COLUMNS + 4)
    for text in texts:
        console.print(Text.from_ansi(text.rstrip() + "\n"), width=COLUMNS)
    console.save_svg(str(PICTURES / f"{name}.svg"), title="", code_format=FORMAT)


def edit(path: str, old: str, new: str) -> None:
    Path(path).write_text(Path(path).read_text().replace(old, new))


def terminals() -> None:
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        for name in ("no-weights", "internvl"):
            shutil.copytree(DEMO / "checkpoint", name)
        Path("no-weights/model-00001-of-00002.safetensors").unlink()
        edit("internvl/config.json", '"llava"', '"internvl_chat"')
        faults = ("--model no-weights", "--model internvl", "--set quantisation=int8")
        draw("wrong-model", *(run(f"vlora serve {one}") for one in faults))
        shutil.copytree(DEMO / "adapters", "adapters")
        server = Terminal("vlora serve --adapters adapters").wait("Press Ctrl-C")
        for name in ("forklifts", "helmets"):
            shutil.copytree(DEMO / "adapters/counting", name)
        Path("forklifts/adapter_model.safetensors").unlink()
        edit("helmets/adapter_config.json", "vlora-demo", "llava-hf/llava-1.5-7b-hf")
        edit("helmets/adapter_config.json", '"r": 16', '"r": 8')
        for name in ("forklifts", "helmets"):
            Path(name).rename(f"adapters/{name}")
            server.wait(f"'{name}'")
        told = re.sub(r"(?s)\n.*(?=Press Ctrl-C)", "\n…\n", server.text, count=1)
        draw("broken-adapter", told, run("vlora adapters check --adapters adapters"))
        late = enumerate(("belt", "dock", "door", "hall", "lift", "ramp", "roof", "shop"))
        Path("cameras.yaml").write_text(CAMERAS + "".join(CAMERA.format(*one) for one in late))
        watch = Terminal("vlora watch cameras.yaml").wait("overloaded")
        time.sleep(60)
        names = "adapter_broken|requests_expired|watch_(chunks|dropped).*(gate|dock)"
        draw(
            "metrics", run(f"curl -s localhost:{{8002,8090}}/metrics | grep -E '^vlora.({names})'")
        )
        draw("overload", watch.text.partition("\n")[0] + "\n" + ERASED.split(watch.text)[-2])
        for one in (watch, server):
            psutil.Process(one.process.pid).children()[0].terminate()
            one.process.wait()


def main() -> None:
    {"playground": playground, "terminals": terminals}[sys.argv[1]]()


def playground() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer() as server,
        running(server.grpc_url, Path(folder), "--metrics-url", server.metrics_url) as gateway,
        browser() as driver,
    ):
        page = Page(driver, 1280)
        page.open(gateway.address)
        page.wait("#status", "7 adapters")
        page.resize(1280, 760)
        page.mode("compare")
        ask(page, "defects")
        page.answer("b")
        save(page, "playground")
        page.resize(360, 1180)
        page.scheme("dark")
        page.mode("ask")
        ask(page, "textures")
        page.run("document.querySelector('#ask-form').scrollIntoView()")
        save(page, "playground-phone")
        page.resize(768, 1000)
        page.scheme("light")
        page.mode("live")
        page.choose(".column-a .adapter", "textures")
        page.click("#live-start")
        until(lambda: int(page.run(f"return {COUNT}.textContent")) >= ANSWERED)
        page.run("scrollTo(0, document.querySelector('#live-frames').offsetTop - 420)")
        save(page, "playground-live")
        page.click("#live-stop")


def ask(page: Page, name: str) -> None:
    """Choose an example and wait for its answer."""
    page.wait(f"[data-example={name}]")
    page.click(f"[data-example={name}]")
    page.answer("a")
    page.run("document.activeElement.blur(); scrollTo(0, 0)")


def save(page: Page, name: str) -> None:
    """Write the visible part of the page."""
    shot = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    path = PICTURES / f"{name}.png"
    shot.quantize(256, kmeans=4, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main()
