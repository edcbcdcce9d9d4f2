// The data of the page, unfolded into one array per column, and how its numbers are written.

async function readPage() {
  const packed = atob(document.getElementById("data").textContent);
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const page = await new Response(stream).json();
  return { symbol: page.symbol, kinds: page.kinds, panels: page.panels.map(unfold) };
}

// Rows are steps, rank after rank; those of rank r are first[r] to first[r + 1] - 1.
function unfold(packed) {
  const { rows, counts, tick } = packed;
  const size = rows.sort.length;
  const [start, end, sent, arrived, during, after] =
    Array.from({ length: 6 }, () => new Float64Array(size));
  const [giver, rank] = [new Int32Array(size), new Int32Array(size)];
  const first = [0];
  counts.forEach((count, r) => {
    let row = first[r];
    let clock = 0;
    let held = packed.before[r];
    for (const stop = row + count; row < stop; row++) {
      rank[row] = r;
      start[row] = clock + rows.gap[row];
      clock = end[row] = start[row] + rows.length[row];
      during[row] = held + rows.rise[row];
      held = after[row] = during[row] + rows.fall[row];
    }
    first.push(row);
  });
  for (let row = 0; row < size; row++) {
    giver[row] = rows.giver[row] ? row - rows.giver[row] : -1;
    if (giver[row] < 0) continue;
    sent[row] = end[giver[row]] + rows.sent[row];
    arrived[row] = sent[row] + rows.late[row];
  }
  for (const times of [start, end, sent, arrived]) times.forEach((t, row) => (times[row] = t * tick));
  return {
    ...packed, size, first, rank, start, end, sent, arrived, during, after, giver,
    ranks: counts.length,
    makespan: end.reduce((a, b) => Math.max(a, b), 0),
    peak: counts.map((_, r) =>
      during.subarray(first[r], first[r + 1]).reduce((a, b) => Math.max(a, b), packed.before[r])),
    busy: counts.map((_, r) => {
      let busy = 0;
      for (let row = first[r]; row < first[r + 1]; row++) busy += end[row] - start[row];
      return busy;
    }),
    moreStages: packed.stages.some((held) => held.length > 1),
  };
}

// The actions of a row: one, or the two of a fused pair.
function partsOf(panel, row) {
  const microbatches = [panel.rows.microbatch[row], panel.rows.second[row]];
  return panel.sorts[panel.rows.sort[row]].map(([kind, stage, fill, ink], part) =>
    ({ kind, stage, fill, ink, microbatch: microbatches[part] }));
}

function nameOf(panel, row) {
  const names = partsOf(panel, row).map((part) => `${part.stage}${part.kind}${part.microbatch}`);
  return names.length > 1 ? `(${names.join(";")})OVERLAP_F_B` : names[0];
}

// The first row of a rank for which `late` holds; it holds for all rows after one that it holds for.
function firstRow(panel, rank, late) {
  let low = panel.first[rank];
  let high = panel.first[rank + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (late(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Up to four digits, without trailing zeros.
function number(value) {
  const digits = 3 - (Math.abs(value) > 1e-12 ? Math.floor(Math.log10(Math.abs(value))) : 0);
  return String(Number(value.toFixed(Math.min(Math.max(digits, 0), 6))));
}

function amount(panel, value) {
  if (panel.unit !== "bytes") return `${value}`;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (power < 4 && value >= 1024 ** (power + 1)) power++;
  return `${Number((value / 1024 ** power).toPrecision(4))} ${units[power]}`;
}
