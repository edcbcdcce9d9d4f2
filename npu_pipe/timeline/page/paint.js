// A panel as the text of an SVG: what of it is in view, and never more elements than a page bears.

const LEFT = 78, RIGHT = 96, TOP = 22, BOTTOM = 20;
const MOST_BARS = 3000; // of a panel; of more only what is on the screen is bars, the rest shares
const LEAST_BAR = 2.5; // pixels; what is narrower becomes shares too
const LETTER = 6.9; // about the width of one at 11 pixels

function shapeOf(panel, width) {
  const [bar, strip, gap] = panel.ranks > 24 ? [14, 10, 5] : [26, 22, 13];
  const pitch = bar + 2 + strip + gap;
  const rows = panel.ranks * pitch - gap;
  return { width, bar, strip, pitch, rows, plot: Math.max(width - LEFT - RIGHT, 50), height: TOP + rows + BOTTOM };
}

function xOf(view, shape, time) {
  return ((time - view.from) / (view.to - view.from)) * shape.plot;
}

// Per rank, the rows in view: [from, to).
function inView(panel, view) {
  return Array.from({ length: panel.ranks }, (_, rank) => [
    firstRow(panel, rank, (row) => panel.end[row] > view.from),
    firstRow(panel, rank, (row) => panel.start[row] >= view.to),
  ]);
}

function usualLength(panel, ranges) {
  const lengths = [];
  for (const [from, to] of ranges) {
    const step = Math.ceil((to - from) / 200) || 1; // a sample will do
    for (let row = from; row < to; row += step) {
      if (panel.end[row] > panel.start[row]) lengths.push(panel.end[row] - panel.start[row]);
    }
  }
  return lengths.sort((a, b) => a - b)[Math.floor(lengths.length / 10)] ?? 0;
}

// near: whether a rank is on the screen, or nearly.
function paint(panel, view, shape, kinds, ceiling, near) {
  const ranges = inView(panel, view);
  const inBars = rangesOfBars(panel, view, shape, ranges, near);
  return [
    ...margins(panel, shape),
    ...axis(view, shape),
    `<svg x="${LEFT}" y="${TOP}" width="${shape.plot}" height="${shape.rows + 2}">`,
    ...ranges.map((_, rank) =>
      `<rect class="idle" y="${rank * shape.pitch}" width="${shape.plot}" height="${shape.bar}"/>`),
    ...memory(panel, view, shape, ranges, ceiling),
    ...ranges.flatMap((range, rank) => (inBars.includes(range) ? [] : stacks(panel, view, shape, kinds, range, rank))),
    ...bars(panel, view, shape, inBars),
    '<g class="mark"></g></svg>',
  ].join("");
}

// All where there is room, else those on the screen, else none.
function rangesOfBars(panel, view, shape, ranges, near) {
  const few = (some) => some.reduce((sum, [from, to]) => sum + to - from, 0) <= MOST_BARS;
  const narrow = xOf(view, shape, view.from + usualLength(panel, ranges)) < LEAST_BAR;
  const onScreen = ranges.filter((_, rank) => near(rank));
  return [ranges, onScreen].find((some) => few(some) && !(narrow && panel.size > 200)) ?? [];
}

function margins(panel, shape) {
  const found = [];
  const wide = shape.bar > 20;
  for (let rank = 0; rank < panel.ranks; rank++) {
    const y = TOP + rank * shape.pitch;
    const right = LEFT + shape.plot + 10;
    const busy = panel.makespan ? panel.busy[rank] / panel.makespan : 1;
    const [idle, peak] = [`idle ${(100 - 100 * busy).toFixed(1)}%`, `peak ${amount(panel, panel.peak[rank])}`];
    const held = panel.stages[rank];
    found.push(`<text x="${LEFT - 10}" y="${y + shape.bar / 2}" text-anchor="end">rank ${rank}</text>`);
    if (panel.moreStages && wide) {
      const stages = `${held.slice(0, 4).join(" ")}${held.length > 4 ? " .." : ""}`;
      found.push(`<text class="small" x="${LEFT - 10}" y="${y + shape.bar + 8}" text-anchor="end">stages ${stages}</text>`);
    }
    found.push(`<text class="small" x="${right}" y="${y + shape.bar / 2}">${idle}</text>`);
    found.push(`<text class="small peak" x="${right}" y="${y + shape.bar + 2 + shape.strip / 2}">${peak}</text>`);
  }
  return found;
}

function axis(view, shape) {
  const [found, span] = [[], view.to - view.from];
  const least = span / Math.max(shape.plot / 80, 1);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= least * 0.999999);
  for (let tick = Math.ceil(view.from / step - 1e-6); tick * step <= view.to * (1 + 1e-9); tick++) {
    const x = LEFT + xOf(view, shape, tick * step);
    found.push(`<line class="grid" x1="${x}" x2="${x}" y1="${TOP - 6}" y2="${TOP + shape.rows + 6}"/>`);
    for (const y of [TOP - 14, TOP + shape.rows + 13]) {
      found.push(`<text class="small" x="${x}" y="${y}" text-anchor="middle">${number(tick * step)}</text>`);
    }
  }
  return found;
}

function bars(panel, view, shape, ranges) {
  const found = ['<g class="names">'];
  const shown = [];
  const misfits = [0, 0];
  for (const [from, to] of ranges) {
    for (let row = from; row < to; row++) {
      const x = xOf(view, shape, panel.start[row]);
      const width = Math.max(xOf(view, shape, panel.end[row]) - x - 1, 0.75);
      const parts = partsOf(panel, row).map((part) => {
        const short = `${part.kind}${part.microbatch}`;
        const whole = panel.moreStages ? `${part.stage}${short}` : short;
        return { ...part, forms: [whole, short, `${part.microbatch}`] };
      });
      shown.push({ row, x: x + 0.5, width, parts });
      for (const form of misfits.keys()) {
        misfits[form] += parts.some((part) => part.forms[form].length * LETTER + 3 > width);
      }
    }
  }
  // Bars shall look alike: all carry the longest form of the name that nearly all have room for.
  const usual = misfits.findIndex((misfit) => misfit <= shown.length / 10);
  for (const { row, x, width, parts } of shown) {
    const y = panel.rank[row] * shape.pitch;
    const height = shape.bar / parts.length;
    const size = Math.min(11, height * 0.78);
    found.push(`<g class="bar" data-row="${row}">`);
    parts.forEach(({ fill, ink, forms }, part) => {
      const top = y + part * height;
      found.push(`<rect x="${x.toFixed(2)}" y="${top}" width="${width.toFixed(2)}" height="${height}" fill="${fill}"/>`);
      const name = forms.slice(usual).find((form) => (form.length * LETTER * size) / 11 + 2 <= width);
      if (name === undefined) return;
      const smaller = size < 11 ? `;font-size:${size.toFixed(1)}px` : "";
      found.push(`<text x="${(x + width / 2).toFixed(2)}" y="${top + height / 2 + 0.5}" style="fill:${ink}${smaller}">${name}</text>`);
    });
    found.push("</g>");
  }
  return [...found, "</g>"];
}

// Per kind, its share of each column of time, from 0 to 1; rows of several ranks are averaged.
function shares(panel, view, columns, ranges) {
  const found = new Map();
  const width = (view.to - view.from) / columns;
  for (const [from, to] of ranges) {
    for (let row = from; row < to; row++) {
      const parts = panel.sorts[panel.rows.sort[row]];
      const [start, end] = [(panel.start[row] - view.from) / width, (panel.end[row] - view.from) / width];
      for (const [kind] of parts) {
        if (!found.has(kind)) found.set(kind, new Float64Array(columns));
        const share = found.get(kind);
        for (let c = Math.max(Math.floor(start), 0); c < Math.min(end, columns); c++) {
          share[c] += (Math.min(end, c + 1) - Math.max(start, c)) / (parts.length * ranges.length);
        }
      }
    }
  }
  return found;
}

// Areas, one on the other, of what `shares` gives.
function stacked(kinds, byKind, top, height, width) {
  const columns = byKind.values().next().value?.length ?? 1;
  const floor = new Float64Array(columns).fill(top + height);
  const each = width / columns;
  return Object.keys(kinds).filter((kind) => byKind.has(kind)).map((kind) => {
    const below = [];
    const above = [];
    byKind.get(kind).forEach((share, c) => {
      const [x0, x1] = [(c * each).toFixed(1), ((c + 1) * each).toFixed(1)];
      below.unshift(`L${x1} ${floor[c].toFixed(1)}L${x0} ${floor[c].toFixed(1)}`);
      floor[c] -= share * height;
      above.push(`${c ? "L" : "M"}${x0} ${floor[c].toFixed(1)}L${x1} ${floor[c].toFixed(1)}`);
    });
    return `<path class="share" fill="${kinds[kind][1]}" d="${above.join("")}${below.join("")}Z"/>`;
  });
}

function stacks(panel, view, shape, kinds, range, rank) {
  const columns = Math.max(Math.floor(shape.plot / 3), 1);
  return stacked(kinds, shares(panel, view, columns, [range]), rank * shape.pitch, shape.bar, shape.plot);
}

// What each rank holds, as an area below its bars; where steps are too many, the most per column.
function memory(panel, view, shape, ranges, ceiling) {
  return ranges.map(([from, to], rank) => {
    const base = rank * shape.pitch + shape.bar + 2 + shape.strip;
    const y = (level) => (base - (level / ceiling) * shape.strip).toFixed(1);
    let level = from > panel.first[rank] ? panel.after[from - 1] : panel.before[rank];
    const pieces = [[0, level]]; // from an x on, a level
    for (let row = from; row < to; row++) {
      pieces.push([xOf(view, shape, panel.start[row]), panel.during[row]]);
      pieces.push([xOf(view, shape, panel.end[row]), panel.after[row]]);
    }
    const steps = pieces.filter(([x], i) => !(pieces[i + 1]?.[0] - x < 0.01)); // release, then take
    const shown = steps.length > shape.plot ? coarse(steps, shape.plot) : steps;
    const line = shown.map(([x, held]) => `H${Math.min(Math.max(x, 0), shape.plot).toFixed(1)}V${y(held)}`);
    return `<path class="held" data-rank="${rank}" d="M-2 ${base}${line.join("")}H${shape.plot + 2}V${base}Z"/>`;
  });
}

function coarse(pieces, width) {
  const columns = new Float64Array(Math.ceil(width / 2) + 1);
  pieces.forEach(([x, level], i) => {
    const last = Math.min((pieces[i + 1]?.[0] ?? width) / 2, columns.length - 1);
    for (let c = Math.max(Math.floor(x / 2), 0); c <= last; c++) columns[c] = Math.max(columns[c], level);
  });
  return Array.from(columns, (level, c) => [2 * c, level]);
}
