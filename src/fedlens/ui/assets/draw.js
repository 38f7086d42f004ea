// Small drawings of the live page; the larger charts are those of the report.
function spark(values, colour) {
  const low = Math.min(...values), high = Math.max(...values), step = 100 / Math.max(1, values.length - 1);
  const path = values.map((value, at) => `${(at * step).toFixed(1)},${(29 - (28 * (value - low)) / (high - low || 1)).toFixed(1)}`).join(" ");
  return drawn("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" },
    values.length > 1 && drawn("polyline", { class: `line c${colour}`, points: path }));
}

// Lines of any height from 0 up, for losses: series of group, xs, ys.
function heights(about, xName, xText, yName, visible) {
  return chart(about, (width, frame) => {
    const series = visible().map((one) => ({ ...one, at: one.xs.map((x, number) => [x, one.ys[number]]).filter(([, y]) => known(y)) })).filter((one) => one.at.length);
    const height = Math.round(Math.max(250, Math.min(400, width * 0.42))), box = { left: 44, right: width - 14, top: 24, bottom: height - 42 };
    const image = canvas(width, height, { tabindex: 0 });
    if (!series.length) return fill(image, {}, [text(width / 2, height / 2, "nothing was measured", { "text-anchor": "middle" })]);
    const all = series.flatMap((one) => one.at), xs = all.map(([x]) => x), highX = Math.max(...xs), lowX = Math.min(...xs), highY = Math.max(...all.map(([, y]) => y)) || 1;
    const x = (value) => box.left + ((value - lowX) / (highX - lowX || 1)) * (box.right - box.left), y = (value) => box.bottom - (value / highY) * (box.bottom - box.top);
    for (const at of ticks(0, highY, 4)) image.append(drawn("line", { class: "rule", x1: box.left, x2: box.right, y1: y(at), y2: y(at) }), text(box.left - 8, y(at) + 4, +at.toPrecision(3), { "text-anchor": "end" }));
    for (const at of ticks(lowX, highX, width < 500 ? 3 : 6, xName === "rounds" ? 1 : 0)) image.append(text(x(at), box.bottom + 18, xText(at), { "text-anchor": "middle" }));
    image.append(text(box.left - 36, 12, yName), text(box.right, height - 6, xName, { "text-anchor": "end" }));
    for (const { group, at } of series) {
      if (at.length > 1) image.append(drawn("polyline", { class: `line c${group.colour}`, "stroke-dasharray": dashOf(group), points: at.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
      else image.append(drawn("circle", { class: `dot c${group.colour}`, cx: x(at[0][0]), cy: y(at[0][1]), r: 5 }));
    }
    follow(image, frame, width, () => [...new Set(xs)].sort((a, b) => a - b).map((value) => [x(value), value]), (value, place) => {
      if (!known(value)) return tip(frame);
      const near = series.map(({ group, at }) => ({ group, point: at.reduce((best, other) => (Math.abs(other[0] - value) < Math.abs(best[0] - value) ? other : best)) })).filter(({ point }) => Math.abs(x(point[0]) - place) < 40);
      tip(frame, place, box.top, [element("div", {}, element("span", {}, `${xName}: ${xText(value)}`)), ...near.slice(0, 14).map(({ group, point }) => tipRow(swatch(group), group.label, String(+point[1].toPrecision(4))))]);
    });
    return image;
  });
}

// How many images of each class a client owns.
function mix(about, counts, classes) {
  return chart(about, (width, frame) => {
    const height = 190, image = canvas(width, height, { class: "mix" }), most = Math.max(...counts, 1), wide = (width - 44) / counts.length;
    for (const at of ticks(0, most, 3, 1)) image.append(drawn("line", { class: "rule", x1: 36, x2: width, y1: 150 - (126 * at) / most, y2: 150 - (126 * at) / most }), text(30, 154 - (126 * at) / most, at, { "text-anchor": "end" }));
    const room = Math.max(26, Math.min(90, 10 + 6.8 * Math.max(...classes.map((name) => name.length)))), skipped = Math.ceil(counts.length / (width / room));
    counts.forEach((count, label) => {
      const bar = drawn("rect", { x: 38 + label * wide, y: 150 - (126 * count) / most, width: Math.max(1, wide - 2), height: (126 * count) / most, rx: 2 });
      bar.addEventListener("pointermove", () => tip(frame, 38 + label * wide, 20, [tipRow(null, `class ${classes[label]}`, `${count} images`)]));
      bar.addEventListener("pointerleave", () => tip(frame));
      image.append(bar);
      if (label % skipped === 0) image.append(text(38 + (label + 0.5) * wide, 168, short(classes[label], (skipped * wide) / 6.8), { "text-anchor": "middle" }));
    });
    return fill(image, {}, [text(2, 12, "images"), text(width, 186, "class", { "text-anchor": "end" })]);
  });
}
