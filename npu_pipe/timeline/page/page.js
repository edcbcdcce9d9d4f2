// The page alive: one view of time for all panels, moved by pointer, wheel, slider and keys.

const $ = (id) => document.getElementById(id);

readPage().then(start, (error) => {
  document.querySelector("footer").textContent = `This browser cannot unpack the page: ${error}`;
});

function start(page) {
  const whole = { from: 0, to: Math.max(...page.panels.map((panel) => panel.makespan)) || 1 };
  const least = whole.to / 5000;
  const plots = [...document.querySelectorAll(".plot")];
  const ceiling = Math.max(...page.panels.flatMap((panel) => panel.peak)) || 1;
  let [view, place, shapes, asked] = [{ ...whole }, null, [], false];

  function paintAll() {
    asked = false;
    page.panels.forEach((panel, i) => {
      const shape = (shapes[i] = shapeOf(panel, plots[i].clientWidth));
      const svg = plots[i].firstElementChild;
      svg.setAttribute("height", shape.height);
      const top = svg.getBoundingClientRect().top + TOP;
      const near = (rank) => Math.abs(top + rank * shape.pitch - innerHeight / 2) < innerHeight * 0.75;
      svg.innerHTML = paint(panel, view, shape, page.kinds, ceiling, near);
    });
    $("shown").textContent = `${number(view.from)} to ${number(view.to)} of ${number(whole.to)} ${page.symbol}`;
    $("zoom").value = (1000 * Math.log(whole.to / (view.to - view.from))) / Math.log(whole.to / least);
    overview();
    mark();
  }

  function repaint() {
    if (!asked) requestAnimationFrame(paintAll);
    asked = true;
  }

  function show(from, span) {
    const length = Math.min(Math.max(span, least), whole.to);
    const begin = Math.min(Math.max(from, 0), whole.to - length);
    view = { from: begin, to: begin + length };
    repaint();
  }

  // at: the time that stays where it is.
  function zoomBy(factor, at = (view.from + view.to) / 2) {
    const span = Math.min(Math.max((view.to - view.from) * factor, least), whole.to);
    show(at - ((at - view.from) / (view.to - view.from)) * span, span);
  }

  // The time in view where bars have room for the number of their microbatch.
  function readable() {
    const spans = page.panels.map((panel, i) => {
      const room = `${panel.microbatches - 1}`.length * LETTER + 4;
      return (usualLength(panel, inView(panel, whole)) * shapes[i].plot) / room;
    });
    return Math.min(...spans.filter((span) => span > 0), whole.to);
  }

  // The whole in small, with a window on what is shown.
  let back = "";
  function paintBack(width) {
    const all = page.panels.map((panel, i) => {
      const parts = shares(panel, whole, Math.ceil(width / 2), inView(panel, whole));
      return `<rect class="idle" y="${16 * i}" width="${width}" height="14"/>${stacked(page.kinds, parts, 16 * i, 14, width).join("")}`;
    });
    back = all.join("");
  }

  function overview() {
    const [svg, height] = [$("overview"), 16 * page.panels.length - 2];
    const width = svg.clientWidth;
    if (svg.getAttribute("viewBox") !== `0 0 ${width} ${height}`) {
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("height", height);
      paintBack(width);
    }
    const [x0, x1] = [view.from, view.to].map((time) => (time / whole.to) * width);
    svg.innerHTML = `${back}<rect class="veil" width="${x0}" height="${height}"/>` +
      `<rect class="veil" x="${x1}" width="${Math.max(width - x1, 0)}" height="${height}"/>` +
      `<rect class="window" x="${x0 + 0.75}" y=".75" width="${Math.max(x1 - x0 - 1.5, 3)}" height="${height - 1.5}"/>`;
  }

  function mark() {
    plots.forEach((plot, i) => {
      const group = plot.querySelector(".mark");
      group.innerHTML = place && place.panel === page.panels[i] ? markOf(place, view, shapes[i]) : "";
    });
  }

  // Tell of a place, beside a point of the window; null: of none.
  function point(at, x, y) {
    place = at;
    mark();
    $("tip").hidden = !at;
    if (!at) return;
    const [title, rows] = tell(at, page);
    const heading = Object.assign(document.createElement("h3"), { textContent: title });
    const list = document.createElement("dl");
    for (const pair of rows) {
      list.append(...pair.map((text, i) => Object.assign(document.createElement(i ? "dd" : "dt"), { textContent: text })));
    }
    $("tip").replaceChildren(heading, list);
    const { offsetWidth: width, offsetHeight: height } = $("tip");
    const below = y + 22 + height < innerHeight ? y + 22 : y - 18 - height;
    $("tip").style.left = `${Math.max(Math.min(x + 14, innerWidth - width - 8), 8)}px`;
    $("tip").style.top = `${Math.max(below, 8)}px`;
  }

  // Go to a row by key: into view first where it is not.
  function goTo(panel, i, row) {
    if (row < 0 || row >= panel.size) return;
    const [from, to] = [panel.start[row], panel.end[row]];
    if (from < view.from || to > view.to) {
      const span = view.to - view.from;
      show(from - span / 3, span);
      paintAll();
    }
    const box = plots[i].getBoundingClientRect();
    const rank = panel.rank[row];
    const top = TOP + rank * shapes[i].pitch;
    const x = LEFT + xOf(view, shapes[i], (from + to) / 2);
    point({ panel, rank, row, time: from, isIdle: false }, box.left + x, box.top + top + shapes[i].bar);
  }

  plots.forEach((plot, i) => {
    const panel = page.panels[i];
    let drag = null;
    const timeAt = (event) => {
      const x = event.clientX - plot.getBoundingClientRect().left - LEFT;
      return view.from + (x / shapes[i].plot) * (view.to - view.from);
    };
    const pointed = (event) => {
      const box = plot.getBoundingClientRect();
      return placeAt(panel, view, shapes[i], event.clientX - box.left, event.clientY - box.top);
    };
    plot.addEventListener("pointermove", (event) => {
      if (!drag) return point(pointed(event), event.clientX, event.clientY);
      const moved = ((event.clientX - drag.x) / shapes[i].plot) * (view.to - view.from);
      plot.classList.add("moving");
      point(null);
      return show(drag.from - moved, view.to - view.from);
    });
    plot.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      drag = { x: event.clientX, from: view.from };
      plot.setPointerCapture(event.pointerId);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      plot.addEventListener(end, () => {
        drag = null;
        plot.classList.remove("moving");
      });
    }
    plot.addEventListener("pointerleave", () => point(null));
    plot.addEventListener("dblclick", (event) => zoomBy(0.5, timeAt(event)));
    plot.addEventListener("wheel", (event) => {
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (event.ctrlKey || event.metaKey) zoomBy(1.0015 ** event.deltaY, timeAt(event));
      else if (Math.abs(sideways) > (event.shiftKey ? 0 : Math.abs(event.deltaY))) {
        show(view.from + (sideways / shapes[i].plot) * (view.to - view.from), view.to - view.from);
      } else return;
      point(null);
      event.preventDefault();
    }, { passive: false });
    plot.addEventListener("blur", () => point(null));
    plot.addEventListener("keydown", (event) => {
      const here = place?.panel === panel && place.row >= 0 ? place.row : -1;
      const rank = here < 0 ? 0 : panel.rank[here];
      const beside = (other) => {
        if (other < 0 || other >= panel.ranks || panel.first[other] === panel.first[other + 1]) return here;
        const row = firstRow(panel, other, (each) => panel.end[each] > panel.start[here]);
        return Math.min(row, panel.first[other + 1] - 1);
      };
      const first = firstRow(panel, 0, (row) => panel.start[row] >= view.from);
      const moves = {
        ArrowRight: () => Math.min(here + 1, panel.first[rank + 1] - 1),
        ArrowLeft: () => Math.max(here - 1, panel.first[rank]),
        ArrowDown: () => beside(rank + 1),
        ArrowUp: () => beside(rank - 1),
        Enter: () => (panel.giver[here] < 0 ? here : panel.giver[here]),
      };
      if (event.key in moves) goTo(panel, i, here < 0 ? first : moves[event.key]());
      else if (event.key === "Escape") point(null);
      else return;
      event.preventDefault();
    });
  });

  $("in").onclick = () => zoomBy(0.5);
  $("out").onclick = () => zoomBy(2);
  $("whole").onclick = () => show(0, whole.to);
  $("readable").onclick = () => show(view.from, readable());
  $("zoom").oninput = () => zoomBy((whole.to * (least / whole.to) ** ($("zoom").value / 1000)) / (view.to - view.from));
  document.addEventListener("keydown", (event) => {
    const button = { "+": "in", "=": "in", "-": "out", 0: "whole", 1: "readable" }[event.key];
    if (button && !event.ctrlKey && !event.metaKey && !event.altKey) $(button).click();
  });
  for (const kind of ["pointerdown", "pointermove"]) {
    $("overview").addEventListener(kind, (event) => {
      if (!(event.buttons & 1)) return;
      const box = $("overview").getBoundingClientRect();
      const span = view.to - view.from;
      show(((event.clientX - box.left) / box.width) * whole.to - span / 2, span);
      $("overview").setPointerCapture(event.pointerId);
    });
  }
  addEventListener("resize", repaint);
  addEventListener("scroll", () => document.querySelector(".share:not(#overview *)") && repaint());

  paintAll();
  // Numbers at first sight, unless that would leave most of the time out of it. The first painting
  // has given the panels their height, and so the page perhaps a scroll bar: paint again.
  if (readable() * 8 >= whole.to) show(0, readable());
  repaint();
}
