// Lines that can be looked at closely: drag over rounds to zoom, or + - 0 on the keyboard; both axes may be logarithmic.
// how(): x, xName, xText, yName, yText, share (of 1), logx, logy, from, to, waiting; series: group, xs, ys, low, high, raw, unfinished
let plots = 0;
function plot(name, about, how, visible, zoom) {
  const id = `clip${plots++}`;
  return chart(about, (width, frame) => {
    const { xName, xText, yName, yText, share, logx, logy, from, to } = how(), fits = (value, log) => known(value) && (!log || value > 0);
    const all = visible().map((one) => ({ ...one, at: one.xs.map((x, number) => [x, one.ys[number], number]).filter(([x, y]) => fits(x, logx) && fits(y, logy)) })).filter((one) => one.at.length);
    const height = Math.round(Math.max(250, Math.min(400, width * 0.46))), box = { left: 48, right: width - 14, top: 24, bottom: height - 42 };
    const image = canvas(width, height, { tabindex: 0, class: "plot" });
    if (!all.length) return fill(image, {}, [text(width / 2, height / 2, how().waiting ? "reading …" : "nothing was measured", { "text-anchor": "middle" })]);
    const xs = extent(all.flatMap((one) => one.at.map(([x]) => x))), whole = [logx ? xs[0] : 0, xs[1]];
    const [lowX, highX] = [Math.max(from ?? -Infinity, whole[0]), Math.min(to ?? Infinity, whole[1])], zoomed = known(from);
    const within = all.map((one) => ({ ...one, at: one.at.filter(([x], number) => x >= lowX && x <= highX || near(one.at, number, lowX, highX)) })).filter((one) => one.at.length);
    const inside = within.flatMap((one) => one.at.filter(([x]) => x >= lowX && x <= highX).flatMap(([, y, number]) => [y, one.low?.[number], one.high?.[number]])).filter((y) => fits(y, logy));
    let [lowY, highY] = extent(inside.length ? inside : [0, 1]);
    if (!logy) { const pad = Math.max(1e-6, 0.06 * (highY - lowY) || 0.02); lowY = Math.max(0, lowY - pad); highY = share ? Math.min(1, highY + pad) : highY + pad; if (!share && !zoomed) lowY = 0; }
    const x = scale(lowX, highX, box.left, box.right, logx), y = scale(lowY, highY, box.bottom, box.top, logy);
    for (const at of (logy ? powers(lowY, highY) : ticks(lowY, highY, 5))) image.append(drawn("line", { class: "rule", x1: box.left, x2: box.right, y1: y(at), y2: y(at) }), text(box.left - 8, y(at) + 4, share ? +(100 * at).toFixed(2) : +at.toPrecision(3), { "text-anchor": "end" }));
    for (const at of (logx ? powers(lowX, highX) : ticks(lowX, highX, Math.max(5, Math.min(8, Math.round(width / 90))), how().x === "round" ? 1 : 0))) image.append(text(x(at), box.bottom + 18, xText(at), { "text-anchor": "middle" }));
    image.append(text(0, 12, yName + (logy ? ", log" : "")), text(box.right, height - 6, xName + (logx ? ", log" : ""), { "text-anchor": "end" }));
    const inner = drawn("g", { "clip-path": `url(#${id})` }), few = within.length <= 8, cursor = drawn("g", { "aria-hidden": "true" });
    image.append(drawn("clipPath", { id }, drawn("rect", { x: box.left - 3, y: box.top - 4, width: box.right - box.left + 6, height: box.bottom - box.top + 8 })), inner, cursor);
    const point = (a, b) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`;
    for (const one of within) {
      const mark = `c${one.group.colour}`, banded = one.low ? one.at.filter(([, , number]) => fits(one.low[number], logy) && fits(one.high[number], logy)) : [];
      if (banded.length > 1) inner.append(drawn("polygon", { class: `band ${mark}${within.length > 5 ? " aside" : ""}`, "data-name": one.group.label, points: [...banded.map(([a, , number]) => point(a, one.high[number])), ...banded.map(([a, , number]) => point(a, one.low[number])).reverse()].join(" ") }));
      if (one.raw) inner.append(drawn("polyline", { class: `line raw ${mark}`, points: one.at.filter(([, , number]) => fits(one.raw[number], logy)).map(([a, , number]) => point(a, one.raw[number])).join(" ") }));
      if (one.at.length > 1) inner.append(drawn("polyline", { class: `line ${mark}${one.unfinished ? " unfinished" : ""}${few ? "" : " many"}`, "data-name": one.group.label, points: one.at.map(([a, b]) => point(a, b)).join(" "), "stroke-dasharray": within.length > 40 ? null : dashOf(one.group) })); // in a crowd dashes tell nothing, and take long to draw
      if (one.at.length === 1 || (within.length <= 4 && one.at.length <= 40)) for (const [a, b] of one.at) inner.append(drawn("circle", { class: `dot ${mark}`, cx: x(a), cy: y(b), r: one.at.length === 1 ? 5 : 3.2 }));
    }
    let height0 = 0;
    image.addEventListener("pointermove", (event) => { const place = image.getBoundingClientRect(); height0 = ((event.clientY - place.top) / place.height) * height; });
    follow(image, frame, width, () => [...new Set(within.flatMap((one) => one.at.map(([a]) => a)))].filter((a) => a >= lowX && a <= highX).sort((a, b) => a - b).map((value) => [x(value), value]), (value, place) => {
      cursor.replaceChildren();
      if (!known(value)) return tip(frame);
      cursor.append(drawn("line", { class: "cursor", x1: place, x2: place, y1: box.top, y2: box.bottom }));
      let found = within.map((one) => ({ one, best: nearest(one.at, value) })).filter(({ best }) => Math.abs(x(best[0]) - place) < 40);
      if (found.length > 12) found = found.sort((a, b) => Math.abs(y(a.best[1]) - height0) - Math.abs(y(b.best[1]) - height0)).slice(0, 12); // those at the pointer
      found.sort((a, b) => b.best[1] - a.best[1]);
      for (const { one, best } of found) cursor.append(drawn("circle", { class: `dot c${one.group.colour}`, cx: x(best[0]), cy: y(best[1]), r: 4.5 }));
      tip(frame, place, box.top, [element("div", {}, element("span", {}, `${xName}: ${xText(value)}`)), ...found.map(({ one, best }) => tipRow(swatch(one.group), one.group.label, yText(best[1]) + (one.low ? ` (${yText(one.low[best[2]])} to ${yText(one.high[best[2]])})` : "")))]);
    });
    zoomable(image, box, width, [lowX, highX], whole, x.back, logx, zoom);
    return image;
  }, name);
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}
function scale(low, high, start, end, log) {
  const [a, b] = log ? [Math.log(low), Math.log(high)] : [low, high], wide = b - a || 1;
  const to = (value) => start + (((log ? Math.log(value) : value) - a) / wide) * (end - start);
  to.back = (place) => { const value = a + ((place - start) / (end - start)) * wide; return log ? Math.exp(value) : value; };
  return to;
}
// 1, 2, 5, 10, ... or, of a narrow range, ordinary ticks.
function powers(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) for (const factor of high / low > 1000 ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
  const fit = found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
  return fit.length > 1 ? fit : ticks(low, high, 4);
}
// A neighbour outside the window, to which the line leads.
const near = (at, number, low, high) => (at[number][0] < low && at[number + 1]?.[0] > low) || (at[number][0] > high && at[number - 1]?.[0] < high);
function nearest(at, value) { // of rising places
  let low = 0, high = at.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (at[middle][0] > value) high = middle; else low = middle; }
  return Math.abs(at[low][0] - value) <= Math.abs(at[high][0] - value) ? at[low] : at[high];
}

function zoomable(image, box, width, [low, high], whole, back, log, zoom) {
  const inBox = (event) => { const place = image.getBoundingClientRect(); return Math.max(box.left, Math.min(box.right, ((event.clientX - place.left) / place.width) * width)); };
  let start = null, veil = null;
  image.addEventListener("pointerdown", (event) => { if (event.pointerType !== "touch" && event.button === 0) { start = inBox(event); image.setPointerCapture(event.pointerId); } });
  image.addEventListener("pointermove", (event) => {
    if (start === null) return;
    const now = inBox(event);
    veil?.remove();
    image.append(veil = drawn("rect", { class: "veil", x: Math.min(start, now), y: box.top, width: Math.abs(now - start), height: box.bottom - box.top }));
  });
  image.addEventListener("pointerup", (event) => {
    const from = start, now = inBox(event);
    start = null;
    veil?.remove();
    if (from !== null && Math.abs(now - from) > 6) zoom(back(Math.min(from, now)), back(Math.max(from, now)));
  });
  image.addEventListener("pointercancel", () => { start = null; veil?.remove(); });
  image.addEventListener("dblclick", () => zoom());
  image.addEventListener("keydown", (event) => {
    if (event.key === "0") zoom();
    else if (event.key === "+" || event.key === "=" || event.key === "-") zoom(...closer([low, high], whole, event.key === "-" ? 2 : 0.5, log));
  });
}
// Half or twice the range around its middle; nothing where that is all.
function closer([low, high], whole, factor, log) {
  const [a, b, c, d] = [low, high, ...whole].map((value) => (log ? Math.log(value) : value)), half = ((b - a) / 2) * factor, middle = Math.max(c + half, Math.min(d - half, (a + b) / 2));
  if (half * 2 >= d - c) return [];
  return [middle - half, middle + half].map((value) => (log ? Math.exp(value) : value));
}
