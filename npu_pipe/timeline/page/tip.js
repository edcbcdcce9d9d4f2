// What is told of the place that somebody points at, and how it is marked.

// A row there, or the idle time before one: {panel, rank, row, time, isIdle}. Null beside the plot.
function placeAt(panel, view, shape, x, y) {
  const rank = Math.floor((y - TOP) / shape.pitch);
  const time = view.from + ((x - LEFT) / shape.plot) * (view.to - view.from);
  if (x < LEFT || x > LEFT + shape.plot || rank < 0 || rank >= panel.ranks) return null;
  if ((y - TOP) % shape.pitch > shape.bar + 2 + shape.strip) return null;
  const row = firstRow(panel, rank, (other) => panel.end[other] > time);
  if (row === panel.first[rank + 1]) return { panel, rank, row: -1, time, isIdle: true };
  return { panel, rank, row, time, isIdle: panel.start[row] > time };
}

function tell({ panel, rank, row, time, isIdle }, page) {
  const unit = page.symbol ? ` ${page.symbol}` : "";
  const last = panel.first[rank + 1] - 1;
  if (row < 0) {
    const from = last < panel.first[rank] ? 0 : panel.end[last];
    return [`rank ${rank} has nothing left to do`, [["since", `${number(from)}${unit}`]]];
  }
  const before = row > panel.first[rank] ? row - 1 : -1;
  const free = before < 0 ? 0 : panel.end[before];
  const level = isIdle ? (before < 0 ? panel.before[rank] : panel.after[before]) : panel.during[row];
  const [start, end] = isIdle ? [free, panel.start[row]] : [panel.start[row], panel.end[row]];
  const name = nameOf(panel, row);
  return [
    isIdle ? `rank ${rank} idle` : `${name} on rank ${rank}`,
    [
      isIdle ? ["until", `${name} starts`] : ["does", partsOf(panel, row).map(describe(page)).join("; with ")],
      ["start", `${number(start)}${unit}`],
      ["end", `${number(end)}${unit}`],
      ["lasts", `${number(end - start)}${unit}`],
      ...waited(panel, row, free, unit),
      ["holds", panel.unit === "bytes" ? amount(panel, level) : `${level} activation${level === 1 ? "" : "s"}`],
    ],
  ];
}

function describe(page) {
  return ({ kind, stage, microbatch }) => `${page.kinds[kind][0]}, stage ${stage}, microbatch ${microbatch}`;
}

// What it needs, what brought that, and how long it stood still for it. free: since when it could.
function waited(panel, row, free, unit) {
  const giver = panel.giver[row];
  const idle = panel.start[row] - free;
  const tiny = panel.makespan * 1e-7;
  if (giver < 0) {
    return [["waits for", idle > tiny ? `nothing; idle ${number(idle)}${unit} before it` : "nothing: it needs only the batch"]];
  }
  const near = panel.rank[giver] === panel.rank[row];
  const told = [["waits for", `${nameOf(panel, giver)} on ${near ? "this rank" : `rank ${panel.rank[giver]}`}, which ends at ${number(panel.end[giver])}${unit}`]];
  const transfer = near ? null : transferOf(panel, giver, row);
  if (transfer && panel.arrived[row] - panel.end[giver] > tiny) {
    told.push(["brought by", `${transfer}, ${number(panel.sent[row])} to ${number(panel.arrived[row])}${unit}`]);
  } else if (transfer) {
    told.push(["brought by", `${transfer}, at once`]);
  }
  const wait = Math.min(Math.max(panel.arrived[row] - free, 0), idle);
  const early = Math.max(panel.start[row] - panel.arrived[row], 0);
  if (wait <= tiny) {
    const when = early > tiny ? `there ${number(early)}${unit} before` : "there in time";
    told.push(["waited", `0${unit}; it was ${when}${idle > tiny ? `, the rank idle ${number(idle)}${unit}` : ""}`]);
  } else {
    told.push(["waited", `${number(wait)}${unit}${idle - wait > tiny ? `, and ${number(idle - wait)}${unit} after it came` : ""}`]);
  }
  return told;
}

// "1SEND_F3 to 2RECV_F3": of the two rows, the actions that follow each other.
function transferOf(panel, giver, taker) {
  for (const to of partsOf(panel, taker)) {
    const step = to.kind === "F" ? -1 : 1;
    const from = partsOf(panel, giver).find((part) =>
      part.microbatch === to.microbatch && part.stage === to.stage + step && (part.kind === "F") === (to.kind === "F"));
    const lane = to.kind === "F" ? "F" : "B";
    if (from) return `${from.stage}SEND_${lane}${from.microbatch} to ${to.stage}RECV_${lane}${to.microbatch}`;
  }
  return null;
}

// The row outlined, the one that it waits for too, and an arrow from there.
function markOf({ panel, row, rank, time, isIdle }, view, shape) {
  const x = (at) => xOf(view, shape, at);
  const outline = (which, name) => {
    const width = Math.max(x(panel.end[which]) - x(panel.start[which]), 2);
    return `<rect class="${name}" x="${x(panel.start[which])}" y="${panel.rank[which] * shape.pitch}" width="${width}" height="${shape.bar}"/>`;
  };
  const found = [`<line class="now" x1="${x(time)}" x2="${x(time)}" y1="0" y2="${shape.rows}"/>`];
  if (row < 0) return found.join("");
  found.push(outline(row, "here"));
  const giver = panel.giver[row];
  if (giver >= 0) {
    found.push(outline(giver, "giver"));
    const down = Math.sign(rank - panel.rank[giver]);
    const edge = (of, below) => panel.rank[of] * shape.pitch + (below ? shape.bar : 0);
    if (down) {
      const [x0, y0] = [x(panel.end[giver]), edge(giver, down > 0)];
      const [x1, y1] = [x(panel.arrived[row]), edge(row, down < 0)];
      const tip = y1 - 6 * down;
      const bend = (tip - y0) / 2;
      found.push(`<path d="M${x0} ${y0}C${x0} ${y0 + bend} ${x1} ${tip - bend} ${x1} ${tip}"/>`);
      found.push(`<path class="head" d="M${x1 - 4} ${tip}h8L${x1} ${y1}Z"/>`);
    }
  }
  return found.join("");
}
