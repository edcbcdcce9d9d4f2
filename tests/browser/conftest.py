"""One headless Chromium for all tests of the page; without one they are skipped.

Where CI is set and Chromium is installed they must run: then what else is missing is an error.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--window-size=1440,1000", "--force-device-scale-factor=1"),
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: opens a page in headless Chromium")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A WebDriver."""
    binary = next(filter(None, map(shutil.which, _NAMES)), None)
    if binary is None:
        pytest.skip("no Chromium is installed: apt-get install chromium chromium-driver")
    must_run = bool(os.environ.get("CI"))
    driver = shutil.which("chromedriver")
    if driver is None and not must_run:
        pytest.skip("Chromium has no chromedriver beside it: apt-get install chromium-driver")
    if not must_run:
        pytest.importorskip("selenium", reason="selenium is missing: pip install selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Both paths are given, so that nothing is looked up on the network.
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()
