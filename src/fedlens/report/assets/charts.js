// Charts are drawn for the width there is, so that letters keep their size, and again when it changes. With a name, a
// chart can be kept as SVG and PNG.
function chart(about, draw, name = "") {
  const frame = element("div", { class: "chart" });
  let width = 0, image = null;
  function redraw() {
    if (!width) return;
    const tip = frame.querySelector(".tip");
    if (tip) tip.remove();
    const next = draw(width, frame);
    fill(next, { role: "img", "aria-label": about() }, []);
    if (image) image.replaceWith(next); else frame.append(next);
    image = next;
  }
  new ResizeObserver(() => {
    const wide = Math.round(frame.clientWidth);
    if (wide && wide !== width) { width = wide; redraw(); }
  }).observe(frame);
  return { frame: name ? element("div", { class: "drawing" }, frame, keepers(name, () => image, about)) : frame, redraw };
}

// ---- charts as files ----
const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity", "fill-opacity", "font-family", "font-size", "font-weight", "paint-order"];
function keepers(name, image, about) {
  const said = element("span", { role: "status", "aria-live": "polite" });
  const button = (kind, save) => element("button", { type: "button", class: "plain", "data-save": kind, "aria-label": `Download as ${kind}: ${name}`, onclick: async () => {
    if (!image()) return;
    await save();
    said.textContent = `Saved as ${kind}.`;
  } }, kind);
  return element("div", { class: "foot" }, element("span", {}, "Download"), button("SVG", () => handOver(`${slug(name)}.svg`, standalone(image(), about()).text, "image/svg+xml")),
    button("PNG", async () => handOver(`${slug(name)}.png`, await pixels(standalone(image(), about())), "image/png")), said);
}

// The same picture without this page: colours and letters are written into it, dark on white whatever the page's theme.
function standalone(image, about) {
  const root = document.documentElement, { theme } = root.dataset;
  root.dataset.theme = "light";
  try {
    return coloured(image, about);
  } finally {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
  }
}
function coloured(image, about) {
  const copy = image.cloneNode(true), [, , width, height] = image.getAttribute("viewBox").split(" ").map(Number);
  const theirs = [image, ...image.querySelectorAll("*")], ours = [copy, ...copy.querySelectorAll("*")];
  theirs.forEach((node, at) => {
    const style = getComputedStyle(node);
    if (style.display === "none" || style.visibility === "hidden") { ours[at].remove(); return; }
    for (const name of ["class", "role", "aria-label", "aria-hidden", "tabindex"]) ours[at].removeAttribute(name);
    for (const name of KEPT) ours[at].setAttribute(name, style.getPropertyValue(name));
  });
  fill(copy, { xmlns: SVG, width, height, overflow: "visible" }, []);
  copy.prepend(drawn("title", {}, about), drawn("rect", { width, height, fill: "#ffffff" }));
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

function pixels({ text, width, height }, scale = 3) {
  return new Promise((done, failed) => {
    const picture = new Image(), area = fill(document.createElement("canvas"), { width: scale * width, height: scale * height }, []);
    picture.onload = () => { area.getContext("2d").drawImage(picture, 0, 0, area.width, area.height); area.toBlob(done, "image/png"); };
    picture.onerror = failed;
    picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  });
}

function canvas(width, height, attributes = {}) {
  return drawn("svg", { viewBox: `0 0 ${width} ${height}`, width, height, ...attributes });
}
const text = (x, y, words, attributes = {}) => drawn("text", { x, y, ...attributes }, words);

function ticks(low, high, count, least = 0) {
  const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * step; at++) found.push(at * step);
  return found;
}

function tip(frame, x, y, rows) {
  let box = frame.querySelector(".tip");
  if (!rows) { if (box) box.remove(); return; }
  if (!box) frame.append(box = element("div", { class: "tip", role: "status" }));
  box.replaceChildren(...rows);
  const room = frame.clientWidth - box.offsetWidth;
  box.style.left = `${Math.max(0, Math.min(room, x + 14 + box.offsetWidth > frame.clientWidth ? x - 14 - box.offsetWidth : x + 14))}px`;
  box.style.top = `${Math.max(0, y)}px`;
}
const tipRow = (mark, name, value) => element("div", {}, element("span", {}, mark, name), element("b", {}, value));

// The pointer, a finger or the arrow keys choose the nearest of some places.
function follow(image, frame, width, places, show) {
  let stops = null, at = -1;
  const choose = (number) => { at = number; show(stops[at] && stops[at][1], stops[at] && stops[at][0]); };
  const ready = () => (stops = stops || places());
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect(), place = ((event.clientX - box.left) / box.width) * width;
    ready();
    choose(stops.reduce((best, stop, number) => (best < 0 || Math.abs(stop[0] - place) < Math.abs(stops[best][0] - place) ? number : best), -1));
  });
  const leave = () => { ready(); at = -1; show(null); };
  image.addEventListener("pointerleave", leave);
  image.addEventListener("blur", leave);
  image.addEventListener("keydown", (event) => {
    ready();
    const to = { ArrowRight: at + 1, ArrowLeft: at < 0 ? stops.length - 1 : at - 1, Home: 0, End: stops.length - 1 }[event.key];
    if (event.key === "Escape") leave();
    if (to === undefined || !stops.length) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(stops.length - 1, to)));
  });
}

// ---- a row of clients for each run ----
// rows: name, group, clients, names (or none), accuracy, mean, worst_decile, split
function strips(about, rows, name = "accuracy of clients", unit = "accuracy of each client, %") {
  return chart(about, (width, frame) => {
    const above = width < 620, left = above ? 4 : Math.min(230, 24 + 6.8 * Math.max(...rows.map((row) => row.name.length)));
    const step = above ? 46 : 30, height = rows.length * step + 40, image = canvas(width, height, { tabindex: 0 });
    const low = Math.max(0, Math.floor(10 * Math.min(...rows.flatMap((row) => row.accuracy)) - 0.2) / 10);
    const x = (value) => left + 8 + ((value - low) / (1 - low || 1)) * (width - left - 20);
    for (const at of ticks(low, 1, width < 500 ? 4 : 8)) {
      image.append(drawn("line", { class: "rule", x1: x(at), x2: x(at), y1: 0, y2: height - 34 }), text(x(at), height - 18, Math.round(100 * at), { "text-anchor": "middle" }));
    }
    image.append(text(width - 12, height - 2, unit, { "text-anchor": "end" }));
    const dots = new Map();
    rows.forEach((row, number) => {
      const middle = number * step + (above ? 30 : 15);
      image.append(above ? text(4, middle - 15, row.name, { class: "name" }) : text(left, middle + 4, row.name, { class: "name", "text-anchor": "end" }));
      row.clients.forEach((client, at) => {
        const dot = drawn("circle", { class: `client c${row.group.colour}`, cx: x(row.accuracy[at]).toFixed(1), cy: middle, r: 5 });
        const key = `${row.split} ${client}`;
        dots.set(key, [...(dots.get(key) || []), { dot, row, value: row.accuracy[at], called: row.names ? row.names[at] : `client ${client}`, middle }]);
        image.append(dot);
      });
      for (const [kind, value] of [["mean", row.mean], ["tenth", row.worst_decile]])
        image.append(drawn("line", { class: kind, x1: x(value), x2: x(value), y1: middle - 11, y2: middle + 11 }));
    });
    let chosen = [];
    function choose(same, place) {
      for (const { dot } of chosen) dot.classList.remove("chosen");
      image.classList.toggle("dimmed", Boolean(same));
      chosen = same || [];
      for (const { dot } of chosen) dot.classList.add("chosen");
      if (!same) return tip(frame);
      tip(frame, place[0], place[1], [element("div", {}, element("span", {}, same[0].called)), ...same.slice(0, 14).map(({ row, value }) => tipRow(swatch(row.group), row.name, `${percent(value)} %`))]);
    }
    const all = [...dots.values()];
    image.addEventListener("pointermove", (event) => {
      const box = image.getBoundingClientRect(), scale = width / box.width, at = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
      let near = null, least = 14 ** 2;
      for (const same of all) for (const one of same) {
        const away = (one.dot.cx.baseVal.value - at[0]) ** 2 + (one.middle - at[1]) ** 2;
        if (away < least) { least = away; near = same; }
      }
      choose(near, [at[0], at[1] + 14]);
    });
    image.addEventListener("pointerleave", () => choose(null));
    image.addEventListener("blur", () => choose(null));
    let number = -1;
    image.addEventListener("keydown", (event) => {
      const to = { ArrowRight: number + 1, ArrowLeft: number - 1, Home: 0, End: all.length - 1 }[event.key];
      if (event.key === "Escape") choose(null);
      if (to === undefined) return;
      event.preventDefault();
      number = Math.max(0, Math.min(all.length - 1, to));
      choose(all[number], [all[number][0].dot.cx.baseVal.value, all[number][0].middle + 14]);
    });
    return image;
  }, name);
}

// ---- bars made of parts ----
// rows: name, parts {kind: value}; kinds: kind -> mark's class
function bars(about, rows, kinds, write) {
  return chart(about, (width, frame) => {
    const above = width < 620, left = above ? 0 : Math.min(230, 24 + 6.8 * Math.max(...rows.map((row) => row.name.length)));
    const step = above ? 48 : 34, height = rows.length * step + 8, image = canvas(width, height);
    const total = (row) => Object.values(row.parts).reduce((sum, value) => sum + value, 0);
    const most = Math.max(...rows.map(total), 1), room = width - left - 90;
    rows.forEach((row, number) => {
      const top = number * step + (above ? 20 : 4);
      let x = left + 8;
      image.append(above ? text(8, top - 5, row.name, { class: "name" }) : text(left, top + 17, row.name, { class: "name", "text-anchor": "end" }));
      for (const [kind, value] of Object.entries(row.parts)) {
        const wide = (value / most) * room;
        const part = drawn("rect", { class: `part ${kinds[kind]}`, x, y: top, width: Math.max(0, wide - 1), height: 24, rx: 2 });
        part.addEventListener("pointermove", () => tip(frame, x, top + 28, [tipRow(drawn("svg", { width: 10, height: 10 }, drawn("rect", { class: `part ${kinds[kind]}`, width: 10, height: 10 })), kind, write(value))]));
        part.addEventListener("pointerleave", () => tip(frame));
        image.append(part);
        x += wide;
      }
      image.append(text(x + 6, top + 17, write(total(row))));
    });
    return image;
  }, "bytes by kind of message");
}

// ---- who owns what: clients along, classes up, area by count ----
function bubbles(about, split) {
  return chart(about, (width, frame) => {
    const classes = split.counts[0].length, longest = (words) => Math.max(...words.map((word) => word.length));
    const left = Math.max(44, Math.min(0.3 * width, 16 + 6.8 * longest(split.classes))), step = Math.max(5, Math.min(22, 420 / classes));
    const slant = longest(split.ticks) > 4 ? -35 : 0, below = slant ? 4.5 * longest(split.ticks) : 0; // words need room that numbers do not
    const height = Math.round(classes * step + 58 + below), image = canvas(width, height);
    const across = (width - left - 10) / split.counts.length, most = Math.max(...split.counts.flat());
    const widest = Math.min(across, step) * 0.98;
    const x = (number) => left + (number + 0.5) * across, y = (label) => (classes - label - 0.5) * step + 20;
    const each = Math.ceil(classes / (420 / 18)), skipped = Math.ceil(split.counts.length / (width / 34));
    for (let label = 0; label < classes; label += each) image.append(text(left - 8, y(label) + 4, short(split.classes[label], left / 6.8 - 2), { "text-anchor": "end" }));
    split.ticks.forEach((tick, number) => { if (number % skipped === 0) image.append(text(x(number), classes * step + 38, tick, slant ? { "text-anchor": "end", transform: `rotate(${slant} ${x(number)} ${classes * step + 34})` } : { "text-anchor": "middle" })); });
    image.append(text(width - 10, height - 4, "client", { "text-anchor": "end" }), text(2, 12, "class"));
    split.counts.forEach((row, number) => row.forEach((count, label) => {
      if (!count) return;
      const dot = drawn("circle", { class: "bubble k0", cx: x(number).toFixed(1), cy: y(label).toFixed(1), r: Math.max(0.7, (widest / 2) * Math.sqrt(count / most)).toFixed(2) });
      dot.addEventListener("pointermove", () => tip(frame, x(number), y(label) + 12, [element("div", {}, element("span", {}, split.names[number])), tipRow(null, `class ${split.classes[label]}`, `${count} images`)]));
      dot.addEventListener("pointerleave", () => tip(frame));
      image.append(dot);
    }));
    return image;
  }, `who owns what, ${split.data}`);
}

// ---- what an attack finds, between chance and no defence ----
function intervals(about, verdict) {
  return chart(about, (width) => {
    const kinds = [["by chance", "grey", verdict.chance], ["without defence", "k0", verdict.undefended], ["found", "alarm", verdict.found]];
    const measured = kinds.map(([name, mark, by]) => [name, mark, by[verdict.decisive]]).filter(([, , one]) => one);
    const image = canvas(width, 26 * measured.length + 24), left = 116;
    const high = Math.max(1, ...measured.map(([, , one]) => one.high)), low = Math.min(0, ...measured.map(([, , one]) => one.low));
    const x = (value) => left + ((value - low) / (high - low)) * (width - left - 16);
    for (const at of ticks(low, high, 5)) image.append(drawn("line", { class: "rule", x1: x(at), x2: x(at), y1: 0, y2: 26 * measured.length }), text(x(at), 26 * measured.length + 16, +at.toFixed(2), { "text-anchor": "middle" }));
    measured.forEach(([name, mark, one], number) => {
      const middle = 26 * number + 13;
      image.append(text(left - 10, middle + 4, name, { class: "name", "text-anchor": "end" }), drawn("line", { class: `range ${mark}`, x1: x(one.low), x2: x(one.high), y1: middle, y2: middle }),
        drawn("circle", { class: `dot ${mark}`, cx: x(one.value), cy: middle, r: 5.5 }));
    });
    return image;
  }, `attack ${verdict.attack}`);
}
