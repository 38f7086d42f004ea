// ---- lines over rounds, bytes or seconds ----
// series: group (its mark), label, result (written at its end), xs, ys, low, high, preparation (its cost on this axis),
// unfinished, other (it is drawn with another model than the rest). axis: name, write, whole (rounds)
function lines(about, axis, yName, visible, name, averaged = () => 1) {
  return chart(about, (width, frame) => {
    const series = visible().map((one) => ({ ...one, at: one.xs.map((x, number) => [x, one.ys[number], number]).filter(([x, y]) => known(x) && known(y)) })).filter((one) => one.at.length);
    const height = Math.round(Math.max(270, Math.min(400, width * 0.42))), image = canvas(width, height, { tabindex: 0 });
    if (!series.length) return fill(image, {}, [text(width / 2, height / 2, "nothing was measured", { "text-anchor": "middle" })]);
    const labelled = width >= 560 && series.length <= 10, wide = (words) => 24 + 7 * words.length, names = (one) => (series.length > 1 ? one.label : ""), ended = (one) => `${names(one)} ${one.result}`.trim();
    const label = series.every((one) => wide(ended(one)) <= width / 3) ? ended : names, right = labelled ? Math.min(width / 3, Math.max(...series.map((one) => wide(label(one))))) : 14;
    const box = { left: 44, right: width - right, top: 26, bottom: height - 44 };
    const prepared = Math.max(0, ...series.map((one) => one.preparation || 0));
    const highX = Math.max(...series.flatMap((one) => one.at.map(([x]) => x)), 1e-9), start = box.left + (axis.whole && prepared ? Math.min(44, 0.12 * width) : 0); // where round 0 is
    const heights = series.flatMap((one) => one.at.flatMap(([, y, number]) => [y, one.low?.[number], one.high?.[number]])).filter(known);
    const pad = Math.max(0.005, 0.06 * (Math.max(...heights) - Math.min(...heights)));
    const lowY = Math.max(0, Math.min(...heights) - pad), highY = Math.min(1, Math.max(...heights) + pad);
    const x = (value) => start + (value / highX) * (box.right - start);
    const y = (value) => box.bottom - ((value - lowY) / (highY - lowY || 1)) * (box.bottom - box.top);
    for (const at of ticks(lowY, highY, 6)) image.append(drawn("line", { class: "rule", x1: box.left, x2: box.right, y1: y(at), y2: y(at) }), text(box.left - 8, y(at) + 4, +(100 * at).toFixed(2), { "text-anchor": "end" }));
    for (const at of ticks(0, highX, width < 500 ? 4 : 8, axis.whole ? 1 : 0)) image.append(text(x(at), box.bottom + 20, axis.write(at), { "text-anchor": "middle", class: "x-tick" }));
    image.append(text(box.left - 36, 12, yName), text(box.right, height - 6, axis.name, { "text-anchor": "end" }));
    preparations(image, series.filter((one) => one.preparation), axis, x, box);
    const layers = ["bands", "whiskers", "paths", "marks"].map((kind) => drawn("g", { class: kind }));
    image.append(...layers);
    const seeded = series.filter((one) => one.low);
    for (const one of series) one.parts = trace(layers, one, x, y, (seeded.indexOf(one) - (seeded.length - 1) / 2) * 4);
    if (labelled) endLabels(image, series.map((one) => ({ label: label(one), x: x(one.at.at(-1)[0]), y: y(one.at.at(-1)[1]), wide: wide(label(one)), colour: one.group.colour })), box);
    if (axis.whole && averaged() > 1) ranking(image, series, averaged(), x, box, axis.name);
    pointing(image, frame, { width, height, series, axis, x, y, box });
    if (series.length === 1) chosenLine(series, series[0]);
    return image;
  }, name);
}

// Rounds before those that count: shaded before round 0, not to scale; on other axes what they cost, as bars along it.
function preparations(image, series, axis, x, box) {
  if (!series.length) return;
  if (axis.whole) {
    const wide = x(0) - box.left, words = `preparation: ${series.map((one) => `${one.group.label} ${Math.round(one.preparation)}`).join(", ")}`;
    image.append(drawn("rect", { class: "preparation", x: box.left, y: box.top, width: wide, height: box.bottom - box.top }),
      text(0, 0, short(words, (box.bottom - box.top) / 6.6), { transform: `translate(${box.left + wide / 2 + 4} ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }));
    return;
  }
  series.forEach((one, number) => image.append(drawn("rect", { class: `part c${one.group.colour}`, x: x(0), y: box.bottom - 5 * (number + 1), width: Math.max(2, x(one.preparation) - x(0)), height: 4 })));
}

// Which evaluations the mean that ranks is over, where all lines have the same: a bracket, and words below, where no line is.
function ranking(image, series, count, x, box, beside) {
  const from = new Set(series.map((one) => one.at.at(-Math.min(count, one.at.length))[0])), to = new Set(series.map((one) => one.at.at(-1)[0]));
  if (from.size > 1 || to.size > 1) return;
  const [left, right] = [x([...from][0]), x([...to][0])], words = `└┘ ranked by ${report.averaged}`, end = box.right - 7 * beside.length - 18;
  image.append(drawn("path", { class: "window", d: `M${left},${box.bottom - 7} v4 H${right} v-4` }));
  if (6.5 * words.length < end) image.append(text(end, box.bottom + 38, words, { "text-anchor": "end" })); // else the words below the chart say it
}

// A line, a mark for every evaluation, and from the lowest to the highest seed: thin intervals, or a band where asked.
function trace([bands, whiskers, paths, marks], one, x, y, aside) {
  const mark = `c${one.group.colour}`, edge = (values) => one.at.map(([value, , number]) => `${x(value).toFixed(1)},${y(values[number]).toFixed(1)}`);
  const parts = { band: null, path: null };
  if (one.low) {
    bands.append(parts.band = drawn("polygon", { class: `band ${mark}`, points: [...edge(one.high), ...edge(one.low).reverse()].join(" ") }));
    const each = Math.ceil(one.at.length / 12);
    one.at.forEach(([value, , number], at) => {
      if ((one.at.length - 1 - at) % each === 0) whiskers.append(drawn("line", { class: `whisker ${mark}`, x1: x(value) + aside, x2: x(value) + aside, y1: y(one.low[number]), y2: y(one.high[number]) }));
    });
  }
  if (one.at.length > 1) paths.append(parts.path = drawn("polyline", { class: `line ${mark}${one.unfinished ? " unfinished" : ""}`, points: edge(one.ys).join(" "), "stroke-dasharray": dashOf(one.group) }));
  const gap = one.at.length > 1 ? (x(one.at.at(-1)[0]) - x(one.at[0][0])) / (one.at.length - 1) : 20, r = one.at.length > 1 ? Math.max(1.1, Math.min(3.4, 0.3 * gap)) : 5;
  for (const [value, level] of one.at) marks.append(drawn("circle", { class: `${one.other ? "hollow" : "dot"} ${mark}`, cx: x(value).toFixed(1), cy: y(level).toFixed(1), r: r.toFixed(1) }));
  return parts;
}

function chosenLine(series, chosen) {
  for (const one of series) {
    one.parts.band?.classList.toggle("shown", one === chosen);
    one.parts.path?.classList.toggle("chosen", one === chosen);
  }
}

// Values where one points, and the band of the line at the pointer; up and down choose another line.
function pointing(image, frame, { width, height, series, axis, x, y, box }) {
  const cursor = drawn("g", { class: "cursors", "aria-hidden": "true" });
  let level = null, chosen = null, last = [];
  image.append(cursor);
  image.addEventListener("pointermove", (event) => { const place = image.getBoundingClientRect(); level = ((event.clientY - place.top) / place.height) * height; });
  const show = (value, place) => {
    last = [value, place];
    cursor.replaceChildren();
    if (!known(value)) { level = chosen = null; chosenLine(series, series.length === 1 ? series[0] : null); return tip(frame); }
    const near = series.map((one) => ({ one, point: one.at.reduce((best, other) => (Math.abs(x(other[0]) - place) < Math.abs(x(best[0]) - place) ? other : best)) }))
      .filter(({ point }) => Math.abs(x(point[0]) - place) < 40).sort((a, b) => b.point[1] - a.point[1]);
    if (level !== null && near.length) chosen = near.reduce((best, other) => (Math.abs(y(other.point[1]) - level) < Math.abs(y(best.point[1]) - level) ? other : best)).one;
    chosenLine(series, chosen || (series.length === 1 ? series[0] : null));
    cursor.append(drawn("line", { class: "cursor", x1: place, x2: place, y1: box.top, y2: box.bottom }), ...near.map(({ one, point }) => drawn("circle", { class: `dot c${one.group.colour}`, cx: x(point[0]), cy: y(point[1]), r: 4.5 })));
    tip(frame, place, box.top, [element("div", {}, element("span", {}, `${axis.name}: ${axis.write(value)}`)), ...near.slice(0, 14).map(({ one, point: [, found, number] }) =>
      tipRow(swatch(one.group), one.label, `${percent(found)} %` + (one.low ? ` (${percent(one.low[number])} to ${percent(one.high[number])})` : "")))]);
  };
  image.addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step || !known(last[0])) return;
    event.preventDefault();
    level = null;
    const order = series.slice().sort((a, b) => b.at.at(-1)[1] - a.at.at(-1)[1]);
    chosen = order[(order.indexOf(chosen) + step + order.length) % order.length];
    show(...last);
  });
  follow(image, frame, width, () => [...new Set(series.flatMap((one) => one.at.map(([value]) => value)))].sort((a, b) => a - b).map((value) => [x(value), value]), show);
}

// Names at the ends of their lines, moved apart by as little as it takes, with a thread to the end where they moved.
const ROW = 15;
function endLabels(image, labels, box) {
  for (const label of labels) label.from = label.x + 10;
  const columns = [];
  for (const label of labels.slice().sort((a, b) => a.x - b.x)) {
    const beside = columns.find((column) => column.some((other) => other.from < label.from + label.wide && label.from < other.from + other.wide));
    if (beside) beside.push(label); else columns.push([label]);
  }
  for (const column of columns) spaced(column.sort((a, b) => a.y - b.y), box.top, box.bottom);
  for (const { label, x, y, at, from, colour } of labels) {
    const moved = Math.abs(at - y) > 3;
    if (moved) image.append(drawn("polyline", { class: `thread c${colour}`, points: `${x + 4},${y} ${from + 5},${at}` }));
    image.append(text(from + (moved ? 8 : 0), at + 4, label, { class: "name end" }));
  }
}

function spaced(labels, top, bottom) { // each at its height, or as near to it as the others let it
  const blocks = [];
  for (const label of labels) {
    let block = { labels: [label], first: label.y };
    while (blocks.length && blocks.at(-1).first + ROW * blocks.at(-1).labels.length > block.first) {
      const joint = [...blocks.pop().labels, ...block.labels];
      block = { labels: joint, first: joint.reduce((sum, one, at) => sum + one.y - ROW * at, 0) / joint.length };
    }
    block.first = Math.max(top, Math.min(bottom - ROW * (block.labels.length - 1), block.first));
    blocks.push(block);
  }
  let least = top;
  for (const block of blocks) block.labels.forEach((label, at) => { label.at = Math.max(least, block.first + ROW * at); least = label.at + ROW; });
}

// ---- one number for each method ----
// rows: name, group, value, low, high, words
function levels(about, rows, yName, name) {
  return chart(about, (width) => {
    const above = width < 620, left = above ? 0 : Math.min(260, 24 + 6.8 * Math.max(...rows.map((row) => row.name.length)));
    const step = above ? 46 : 30, height = rows.length * step + 40, image = canvas(width, height), room = Math.max(...rows.map((row) => 20 + 7 * row.words.length));
    const x = (share) => left + 8 + share * (width - left - 8 - room);
    for (const at of ticks(0, 1, width < 500 ? 4 : 10)) image.append(drawn("line", { class: "rule", x1: x(at), x2: x(at), y1: 14, y2: height - 20 }), text(x(at), height - 4, Math.round(100 * at), { "text-anchor": "middle" }));
    image.append(text(left + 8, 10, yName));
    rows.forEach((row, number) => {
      const top = 14 + number * step + (above ? 20 : 5), mark = `c${row.group.colour}`;
      image.append(above ? text(8, top - 5, row.name, { class: "name" }) : text(left, top + 15, row.name, { class: "name", "text-anchor": "end" }),
        drawn("rect", { class: `level ${mark}`, x: x(0), y: top, width: x(row.value) - x(0), height: 20, rx: 2 }));
      if (known(row.low) && row.high > row.low) image.append(drawn("line", { class: "span", x1: x(row.low), x2: x(row.high), y1: top + 10, y2: top + 10 }));
      image.append(text(x(Math.max(row.value, row.high ?? 0)) + 8, top + 15, row.words, { class: "name" }));
    });
    return image;
  }, name);
}

// ---- shares of one, row by row ----
// values[row][column] in 0..1 or null
function heat(about, rows, columns, values, yName, xName, name) {
  return chart(about, (width, frame) => {
    const longest = (words) => Math.max(...words.map((word) => word.length)), left = Math.max(40, Math.min(0.28 * width, 16 + 6.8 * longest(rows)));
    const across = Math.min(54, (width - left - 4) / columns.length), step = Math.max(10, Math.min(28, 560 / rows.length)), slant = longest(columns) > 4 && across < 7 * longest(columns);
    const top = slant ? Math.min(90, 20 + 5 * longest(columns)) : 38, image = canvas(width, Math.round(top + step * rows.length + 6));
    const each = Math.ceil(13 / step), along = Math.ceil(20 / across);
    image.append(text(2, 12, `${yName} ↓  ${xName} →`));
    columns.forEach((word, at) => { if (at % along === 0) { const place = left + (at + 0.5) * across; image.append(text(place, top - 6, short(word, 16), slant ? { transform: `rotate(-40 ${place} ${top - 6})` } : { "text-anchor": "middle" })); } });
    rows.forEach((word, row) => {
      if (row % each === 0) image.append(text(left - 8, top + (row + 0.5) * step + 4, short(word, left / 6.8 - 2), { "text-anchor": "end", class: "name" }));
      columns.forEach((other, at) => {
        const share = values[row][at];
        if (!known(share)) return;
        const cell = drawn("rect", { class: "cell", x: left + at * across, y: top + row * step, width: Math.max(1, across - 1), height: Math.max(1, step - 1), "fill-opacity": (0.04 + 0.62 * share).toFixed(3) });
        cell.addEventListener("pointermove", () => tip(frame, left + (at + 1) * across, top + (row + 1) * step, [tipRow(null, `${word}, ${other}`, `${percent(share)} %`)]));
        cell.addEventListener("pointerleave", () => tip(frame));
        image.append(cell);
        if (across > 24 && step > 13 && share >= 0.005) image.append(text(left + (at + 0.5) * across, top + (row + 0.5) * step + 4, Math.round(100 * share), { "text-anchor": "middle", class: "in-cell" }));
      });
    });
    return image;
  }, name);
}
