// Small drawings of the live page.
// A name that may go on in the next line after a sign such as / and not within a word.
const foldable = (words) => words.split(/(?<=[/_.,=-])/).flatMap((part, at) => (at ? [element("wbr"), part] : [part]));

function spark(curves, colour) {
  const [low, high] = extent(curves.flat()), longest = Math.max(...curves.map((values) => values.length));
  const path = (values) => values.map((value, at) => `${((100 * at) / Math.max(1, longest - 1)).toFixed(1)},${(29 - (28 * (value - low)) / (high - low || 1)).toFixed(1)}`).join(" ");
  return drawn("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" },
    curves.filter((values) => values.length > 1).map((values) => drawn("polyline", { class: `line c${colour}`, points: path(values) })));
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

// Replies that a round went on without, by kind; a bar is a round, or several of a long run.
const LOST = { missing: "no reply", late: "late", refused: "refused" };
function setbackBars(found, rounds) {
  const kinds = Object.keys(LOST).filter((kind) => found[kind].some(Boolean)), total = (at) => kinds.reduce((sum, kind) => sum + found[kind][at], 0);
  const sum = (kind) => found[kind].reduce((a, b) => a + b, 0), sums = kinds.map((kind) => `${LOST[kind]}: ${sum(kind)}`), voids = sum("void") ? [`shaded: rounds that left the model as it was, ${sum("void")}`] : [];
  const figure = chart(() => `Lost replies by round. ${[...sums, ...voids].join("; ")}`, (width, frame) => {
    const height = 190, box = { left: 36, right: width - 4, bottom: 150 }, image = canvas(width, height, { tabindex: 0 }), most = Math.max(1, ...found.first.map((_, at) => total(at)));
    const x = (round) => box.left + ((round - 1) / rounds) * (box.right - box.left), tall = (count) => (126 * count) / most;
    for (const at of ticks(0, most, 3, 1)) image.append(drawn("line", { class: "rule", x1: box.left, x2: box.right, y1: box.bottom - tall(at), y2: box.bottom - tall(at) }), text(30, box.bottom + 4 - tall(at), at, { "text-anchor": "end" }));
    for (const at of ticks(1, rounds, width < 500 ? 3 : 8, 1)) if (at >= 1) image.append(text((x(at) + x(at + 1)) / 2, 168, at, { "text-anchor": "middle" }));
    found.first.forEach((first, at) => {
      let top = box.bottom;
      if (found.void[at]) image.append(drawn("rect", { class: "void", x: x(first), y: 14, width: Math.max(1, x(found.last[at] + 1) - x(first)), height: box.bottom - 8 }));
      kinds.forEach((kind) => { const high = tall(found[kind][at]); if (high) image.append(drawn("rect", { class: `part k${Object.keys(LOST).indexOf(kind)}`, x: x(first), y: (top -= high), width: Math.max(1, x(found.last[at] + 1) - x(first) - 1), height: high })); });
    });
    follow(image, frame, width, () => found.first.map((first, at) => [(x(first) + x(found.last[at] + 1)) / 2, at]), (at, place) => {
      if (!known(at)) return tip(frame);
      const span = found.first[at] === found.last[at] ? `round ${found.first[at]}` : `rounds ${found.first[at]} to ${found.last[at]}`;
      tip(frame, place, 20, [element("div", {}, element("span", {}, span)), ...kinds.filter((kind) => found[kind][at]).map((kind) => tipRow(null, LOST[kind], String(found[kind][at]))), found.void[at] ? element("div", {}, "left the model as it was") : ""]);
    });
    return fill(image, {}, [text(2, 12, "replies"), text(width, 186, "round", { "text-anchor": "end" })]);
  });
  const mark = (kind) => drawn("svg", { width: 12, height: 12, "aria-hidden": "true" }, drawn("rect", { class: `part k${Object.keys(LOST).indexOf(kind)}`, width: 12, height: 12, rx: 2 }));
  return element("figure", { id: "setbacks" }, element("div", { class: "chips" }, kinds.map((kind, number) => element("span", { class: "chip" }, mark(kind), sums[number])), voids.map((words) => element("span", { class: "chip" }, words))), figure.frame);
}
