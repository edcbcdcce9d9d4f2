"""The page in a browser: what is on it, and what it tells when pointed at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_pipe.api import simulate
from npu_pipe.cli.main import main
from npu_pipe.ir.action import FusedPair
from npu_pipe.lowering.lower import lower
from npu_pipe.schedules.registry import build_schedule
from npu_pipe.simulator.costs import Costs
from npu_pipe.timeline.html import Panel
from npu_pipe.timeline.picture import write_html
from npu_pipe.timeline.timeline import Timeline

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

BARS_IN_VIEW = """
    const plot = arguments[0];
    const box = plot.querySelector("svg svg").getBoundingClientRect();
    return [...plot.querySelectorAll(".bar")].map((bar) => {
      const [rect, text] = [bar.querySelector("rect"), bar.querySelector("text")];
      const [own, name] = [rect.getBoundingClientRect(), text?.getBoundingClientRect()];
      return {
        row: +bar.dataset.row, left: own.left - box.left, width: own.width,
        whole: own.left >= box.left && own.right <= box.right,
        text: text?.textContent ?? "", size: text ? parseFloat(getComputedStyle(text).fontSize) : 0,
        fits: !name || (name.left >= own.left - 1 && name.right <= own.right + 1),
      };
    });
"""


def predicted(name: str, ranks: int, microbatches: int, transfer: float = 0.5) -> Timeline:
    schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
    costs = Costs.uniform(schedule.stages, transfer=transfer)
    return simulate(lower(schedule, costs), costs)


class Page:
    """The open page, asked by selectors."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def text(self, selector: str) -> str:
        return str(self.all(selector)[0].text)

    def run(self, script: str, *values: object) -> Any:
        return self.browser.execute_script(script, *values)

    def bars(self, panel: int = 0) -> list[dict[str, Any]]:
        return list(self.run(BARS_IN_VIEW, self.all(".plot")[panel]))

    def when(self, true: Callable[[], Any]) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 20, 0.02).until(lambda _: true())

    def settle(self) -> None:
        """Until what was asked to be painted is painted; elements stay the same ones then."""
        self.browser.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)));"
        )

    def zoom(self, button: str) -> None:
        before = self.text("#shown")
        self.all(f"#{button}")[0].click()
        self.when(lambda: self.text("#shown") != before)
        self.settle()

    def point_at(self, row: int, panel: int = 0) -> dict[str, str]:
        from selenium.webdriver.common.action_chains import ActionChains

        plot = self.all(".plot")[panel]
        bar = plot.find_element("css selector", f'.bar[data-row="{row}"] rect')
        ActionChains(self.browser, duration=0).move_to_element(bar).perform()
        return self.tip()

    def point_beside(self, row: int, by: int) -> dict[str, str]:
        """by: pixels to the right of the middle of a bar."""
        from selenium.webdriver.common.action_chains import ActionChains

        bar = self.all(f'.bar[data-row="{row}"] rect')[0]
        ActionChains(self.browser, duration=0).move_to_element_with_offset(bar, by, 0).perform()
        return self.tip()

    def drag(self, where: Any, by: int) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        before = self.text("#shown")
        actions = ActionChains(self.browser, duration=20).move_to_element(where)
        actions.click_and_hold().move_by_offset(by, 0).release().perform()
        self.when(lambda: self.text("#shown") != before)
        self.settle()

    def wheel(self, where: Any, by: int) -> None:
        """With Ctrl held."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        before = self.text("#shown")
        actions = ActionChains(self.browser, duration=20).key_down("\ue009")
        actions.scroll_from_origin(ScrollOrigin.from_element(where), 0, by)
        actions.key_up("\ue009").perform()
        self.when(lambda: self.text("#shown") != before)
        self.settle()

    def view(self) -> tuple[float, float]:
        start, end = self.text("#shown").split(" of ")[0].split(" to ")
        return float(start), float(end)

    def press(self, *keys: str) -> dict[str, str]:
        from selenium.webdriver.common.keys import Keys

        for key in keys:
            self.browser.switch_to.active_element.send_keys(getattr(Keys, key))
        return self.tip()

    def tip(self) -> dict[str, str]:
        """What the tooltip says, its title under ""."""
        assert self.all("#tip")[0].is_displayed()
        names, values = self.all("#tip dt"), self.all("#tip dd")
        told = {a.text: b.text for a, b in zip(names, values, strict=True)}
        return {"": self.text("#tip h3"), **told}


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens timelines as a page; afterwards nothing may stand in the console."""

    def open_page(*timelines: Timeline) -> Page:
        path = tmp_path / "page.html"
        if timelines:
            write_html([Panel(timeline) for timeline in timelines], path)
        chromium.get(path.as_uri())
        page = Page(chromium)
        page.when(lambda: page.all(".bar, .share:not(#overview *)"))
        page.settle()
        return page

    yield open_page
    assert chromium.get_log("browser") == []
    assert chromium.execute_script("return performance.getEntriesByType('resource')") == []


def row_of(timeline: Timeline, name: str) -> int:
    return [str(span.action) for span in timeline.compute].index(name)


def test_each_step_is_a_bar_with_its_name(opened: Callable[..., Page]) -> None:
    timeline = predicted("1f1b", 4, 8)
    bars = opened(timeline).bars()
    assert len(bars) == len(timeline.compute) == 64
    for bar, span in zip(
        sorted(bars, key=lambda bar: int(bar["row"])), timeline.compute, strict=True
    ):
        assert str(span.action).endswith(bar["text"])
        assert len(bar["text"]) == 2
        assert bar["fits"]


def test_pointing_at_a_bar_tells_its_times_and_what_it_waits_for(
    opened: Callable[..., Page],
) -> None:
    timeline = predicted("1f1b", 4, 8)
    page = opened(timeline)
    assert page.point_at(row_of(timeline, "1F0")) == {
        "": "1F0 on rank 1",
        "does": "forward, stage 1, microbatch 0",
        "start": "1.5",
        "end": "2.5",
        "lasts": "1",
        "waits for": "0F0 on rank 0, which ends at 1",
        "brought by": "0SEND_F0 to 1RECV_F0, 1 to 1.5",
        "waited": "1.5",
        "holds": "1 activation",
    }
    assert len(page.all(".mark .here")) == len(page.all(".mark .giver")) == 1
    told = page.point_at(row_of(timeline, "3B0"))
    assert told["waits for"] == "3F0 on this rank, which ends at 5.5"
    assert told["waited"].startswith("0; it was there in time")
    assert "brought by" not in told
    assert page.point_at(0)["waits for"] == "nothing: it needs only the batch"
    for row in (20, 40, 63):
        told, span = page.point_at(row), timeline.compute[row]
        assert told[""] == f"{span.action} on rank {span.rank}"
        times = [float(told[name]) for name in ("start", "end", "lasts")]
        assert times == pytest.approx(
            [span.start_us, span.end_us, span.end_us - span.start_us], abs=0.01
        )


def test_keys_walk_from_bar_to_bar_and_to_what_one_waits_for(opened: Callable[..., Page]) -> None:
    page = opened(predicted("1f1b", 4, 8))
    page.run("arguments[0].focus()", page.all(".plot")[0])
    assert page.press("ARROW_RIGHT")[""] == "0F0 on rank 0"
    assert page.press("ARROW_RIGHT", "ARROW_RIGHT")[""] == "0F2 on rank 0"
    assert page.press("ARROW_DOWN")[""] == "1F0 on rank 1"
    assert page.press("ENTER")[""] == "0F0 on rank 0"
    page.browser.switch_to.active_element.send_keys("\ue00c")  # escape
    assert not page.all("#tip")[0].is_displayed()


def test_below_its_bars_each_rank_shows_what_it_holds(opened: Callable[..., Page]) -> None:
    page = opened(predicted("1f1b", 4, 8))
    assert [label.text for label in page.all(".peak")] == [f"peak {n}" for n in (4, 3, 2, 1)]
    heights = page.run(
        "return [...document.querySelectorAll('.held')].map((path) => path.getBBox().height)"
    )
    assert [height / heights[3] for height in heights] == pytest.approx([4, 3, 2, 1], rel=0.02)


def test_two_schedules_stand_on_one_scale_of_time(opened: Callable[..., Page]) -> None:
    page = opened(predicted("1f1b", 4, 8), predicted("zb-h1", 4, 8))
    assert [head.text.split(":")[0] for head in page.all("h2")] == ["1f1b", "zb-h1"]
    assert "against 1f1b: makespan -" in page.all(".summary")[1].text
    above, below = page.bars(0), page.bars(1)
    assert (len(above), len(below)) == (64, 96)
    assert above[0] == below[0], "0F0 has its place and width on both"
    upper, lower_plot = (plot.rect for plot in page.all(".plot"))
    assert upper["y"] + upper["height"] <= lower_plot["y"]
    assert page.point_at(1, panel=1)[""] == "0F1 on rank 0"


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_at_8_ranks_and_32_microbatches_every_bar_carries_text_that_can_be_read(
    opened: Callable[..., Page], name: str
) -> None:
    timeline = predicted(name, 8, 32, 0.2)
    page = opened(timeline)
    bars = page.bars()
    inside = [bar for bar in bars if bar["whole"]]
    assert len(inside) > len(timeline.compute) / 4
    assert [bar for bar in inside if not bar["text"] or not bar["fits"] or bar["size"] < 10] == []
    page.zoom("whole")
    assert len(page.bars()) == len(timeline.compute)


def test_wheel_drag_slider_and_buttons_move_the_view(opened: Callable[..., Page]) -> None:
    page = opened(predicted("1f1b", 4, 8))
    assert page.text("#shown") == "0 to 41 of 41"
    page.zoom("in")
    assert page.text("#shown") == "10.25 to 30.75 of 41"
    assert len(page.bars()) < 64
    page.drag(page.all(".plot")[0], -200)
    start, end = page.view()
    assert start > 11
    assert end - start == pytest.approx(20.5, abs=0.01)
    page.drag(page.all(".plot")[0], 400)
    assert page.view()[0] < 9
    page.wheel(page.all(".plot")[0], -300)
    start, end = page.view()
    assert end - start < 16
    page.run("const z = document.getElementById('zoom'); z.value = 0; z.oninput()")
    page.when(lambda: page.text("#shown") == "0 to 41 of 41")
    page.zoom("in")
    page.drag(page.all("#overview")[0], 300)
    assert page.view()[1] > 31
    page.zoom("whole")
    assert page.text("#shown") == "0 to 41 of 41"
    assert len(page.bars()) == 64


def test_64_ranks_and_512_microbatches_open_as_shares_and_zoom_to_bars(
    opened: Callable[..., Page],
) -> None:
    page = opened(predicted("1f1b", 64, 512))
    count = "return document.querySelectorAll('*').length"
    assert page.bars() == []
    assert len(page.all(".plot .share")) == 2 * 64
    assert page.run(count) < 2000
    page.zoom("readable")
    bars = page.bars()
    assert len(page.all(".plot .share")) == 0
    assert len(bars) > 300
    assert all(bar["text"] for bar in bars if bar["whole"])
    page.zoom("whole")
    page.run("const z = document.getElementById('zoom'); z.value = 360; z.oninput()")
    page.when(lambda: len(page.all(".plot .share")) > 0 and len(page.bars()) > 1000)
    assert len(page.bars()) <= 3000, "only what is on the screen"
    assert page.run(count) < 12_000
    page.run("scrollTo(0, document.body.scrollHeight)")
    last_rank = 63 * 2 * 512
    page.when(lambda: max(bar["row"] for bar in page.bars()) >= last_rank)


def test_a_fused_pair_is_one_bar_and_tells_both_of_its_halves(opened: Callable[..., Page]) -> None:
    timeline = predicted("dualpipe", 4, 8)
    page = opened(timeline)
    row = next(i for i, span in enumerate(timeline.compute) if isinstance(span.action, FusedPair))
    told = page.point_at(row)
    assert told[""] == f"{timeline.compute[row].action} on rank {timeline.compute[row].rank}"
    assert told["does"].startswith("forward, stage ")
    assert "; with backward, stage " in told["does"]
    assert len(page.all(f'.bar[data-row="{row}"] rect')) == 2


def test_idle_time_says_what_it_waits_for(opened: Callable[..., Page]) -> None:
    timeline = predicted("1f1b", 4, 8)
    page = opened(timeline)
    told = page.point_beside(row_of(timeline, "1F0"), -30)
    assert told[""] == "rank 1 idle"
    assert (told["start"], told["end"], told["until"]) == ("0", "1.5", "1F0 starts")
    assert told["waits for"] == "0F0 on rank 0, which ends at 1"
    assert page.point_beside(row_of(timeline, "3B7"), 150) == {
        "": "rank 3 has nothing left to do",
        "since": "33.5",
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_scheme_of_the_reader(opened: Callable[..., Page], scheme: str) -> None:
    page = opened(predicted("1f1b", 2, 4))
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    style = "return getComputedStyle(document.body)"
    ground, ink = (luma(page.run(f"{style}.{name}")) for name in ("backgroundColor", "color"))
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert (ground > 0.9 and ink < 0.3) if scheme == "light" else (ground < 0.2 and ink > 0.8)


def luma(colour: str) -> float:
    """0 to 1, of "rgb(1, 2, 3)"."""
    return sum(map(int, colour.strip("rgb()").split(","))) / 765


def test_show_writes_the_page_with_bytes(opened: Callable[..., Page], tmp_path: Path) -> None:
    words = ["show", "1f1b", "-p", "2", "-m", "2", "--activation-bytes", str(3 * 2**30)]
    assert main([*words, "--html", str(tmp_path / "page.html")]) == 0
    page = opened()
    assert [label.text for label in page.all(".peak")] == ["peak 6 GiB", "peak 3 GiB"]
    assert page.point_at(0)["holds"] == "3 GiB"
