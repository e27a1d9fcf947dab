"""Debian's Chromium without a window, controlled by Selenium.

Tests that need it are skipped if the browser, its driver or Selenium is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.polling import until

AXE_VARIABLE = "VLORA_AXE"
"""Variable with the path of axe-core's `axe.min.js`. Without it, `node_modules` is searched."""

ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)


def axe() -> Path:
    """Return the file of axe-core. Skip the test if it is missing."""
    given = os.environ.get(AXE_VARIABLE)
    path = Path(given) if given else Path("node_modules/axe-core/axe.min.js")
    if not path.is_file():
        pytest.skip(f"axe-core is not installed (npm install axe-core, or {AXE_VARIABLE})")
    return path


@contextmanager
def browser() -> Iterator[Any]:
    """Yield a driver of a browser whose camera shows a test pattern."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in programs.items() if path is None]:
        pytest.skip(f"{' and '.join(missing)} not installed (apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(programs["chromedriver"])
    with webdriver.Chrome(options, service) as driver:
        driver.set_script_timeout(60)
        yield driver


class Page:
    """The playground in a browser. width: width of the window in pixels."""

    def __init__(self, driver: Any, width: int) -> None:
        self.driver = driver
        self.resize(width)
        self.scheme("light")

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the visible part of the page."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """Make the browser prefer `light` or `dark` colours."""
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, address: str) -> None:
        """Load the page, and discard earlier messages of the console."""
        self.driver.get(f"http://{address}/")
        self.faults()

    def find(self, selector: str) -> Any:
        """Return the first element for a CSS selector. It must exist."""
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        """Return all elements for a CSS selector."""
        return list(self.driver.find_elements("css selector", selector))

    def text(self, selector: str) -> str:
        """Return the visible text of the first element."""
        return str(self.find(selector).text)

    def click(self, selector: str) -> None:
        """Scroll to an element and click on it."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def mode(self, name: str) -> None:
        """Choose a mode with the keyboard, since its radio button is not visible."""
        self.find(f"input[value={name}]").send_keys(" ")

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a <select>."""
        self.click(f"{selector} option[value='{value}']")

    def write(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def press(self, *names: str) -> None:
        """Press keys, given by their names in Selenium, together on the focused element."""
        from selenium.webdriver import ActionChains, Keys

        actions = ActionChains(self.driver)
        for name in names:
            actions.key_down(getattr(Keys, name))
        for name in names:
            actions.key_up(getattr(Keys, name))
        actions.perform()

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript and return its result. If that is a promise, return its value."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, selector: str, text: str = "") -> Any:
        """Wait until an element is visible and contains this text. Return the element."""

        def found() -> Any:
            shown = [one for one in self.all(selector) if one.is_displayed() and text in one.text]
            return shown[0] if shown else None

        return until(found)

    def answer(self, column: str = "a") -> str:
        """Wait until a column's answer is complete, and return its text."""
        self.wait(f"#answers .column-{column} .meta", "Total")
        return self.text(f"#answers .column-{column} .answer")

    def faults(self) -> list[str]:
        """Return the warnings and errors that the console has shown since the last call."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]


def barriers(page: Page) -> list[tuple[str, str, str]]:
    """Return the rule, element and summary of each serious finding of axe-core. Skip the test if
    it is missing."""
    page.run(axe().read_text())
    return [
        (one["id"], node["html"], node["failureSummary"])
        for one in page.run("return (await axe.run()).violations")
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
