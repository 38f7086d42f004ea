// Points of runs and of groups of runs, asked for as they are needed, and the figure that draws them.
const AXES = { round: ["rounds", (value) => String(Math.round(value))], bytes: ["bytes sent", size], seconds: ["seconds of running", duration] };
const SMOOTH = { "": "none", 0.6: "some", 0.9: "much" };
const TOGETHER = 100; // runs in one question
const known_curves = new Map(); // of single runs
const means = new Map(); // of groups
let detail = { key: "", curves: new Map() }; // of the window that is zoomed to

const versionOf = (name) => { const row = rows.get(name); return row ? `${row.generation} ${row.read} ${row.done}` : ""; };
const pointsFor = (count) => (count > 40 ? 100 : count > 12 ? 200 : 400);
const asked = (names) => names.map((name) => ["run", name]);

// All points of some runs that are not known yet; whether there were any.
async function refreshCurves(names, points) {
  const spent = shown.axis === "bytes", needed = [];
  for (const name of names.filter((each) => rows.has(each))) {
    const mine = known_curves.get(name), enough = mine && mine.points >= points && (mine.spent || !spent);
    if (!enough) needed.push([name, { read: 0, generation: 0, curves: {}, points, spent }]);
    else if (mine.seen !== versionOf(name)) needed.push([name, mine]);
  }
  for (let at = 0; at < needed.length; at += TOGETHER) {
    const some = needed.slice(at, at + TOGETHER), seen = some.map(([name]) => versionOf(name)), bytes = spent || some.some(([, mine]) => mine.spent);
    const found = await ask("curves", [...asked(some.map(([name]) => name)), ...some.flatMap(([, mine]) => [["after", mine.read], ["generation", mine.generation]]), ["points", points], ...(bytes ? [["bytes", 1]] : [])]);
    some.forEach(([name, mine], number) => { if (found[name]) known_curves.set(name, merged(mine, found[name], seen[number])); });
  }
  return needed.length > 0;
}
function merged(mine, news, seen) {
  const curves = { ...(news.after ? mine.curves : {}) };
  for (const [model, points] of Object.entries(news.curves)) {
    const before = curves[model], kept = before ? before.round.filter((round) => round <= news.after).length : 0;
    curves[model] = Object.fromEntries(Object.entries(points).map(([what, values]) => [what, kept ? [...before[what].slice(0, kept), ...values] : values]));
  }
  const long = Object.values(curves).some((points) => points.round.length > 3 * mine.points); // asked for again, thinned
  return { ...mine, curves, read: long ? 0 : news.read, generation: news.generation, seen };
}
async function refreshMeans(items) {
  const spent = shown.axis === "bytes", points = pointsFor(items.length);
  const needed = items.filter((item) => { const mine = means.get(item.key); return !mine || mine.seen !== seenOf(item) || (spent && !mine.spent); });
  await Promise.all(needed.map(async (item) => {
    const seen = seenOf(item), curves = await ask("means", [...asked(item.members.slice(0, 2 * TOGETHER)), ["points", points], ...(spent ? [["bytes", 1]] : [])]);
    means.set(item.key, { curves, seen, spent });
  }));
  return needed.length > 0;
}
const seenOf = (item) => item.members.map((name) => `${name} ${versionOf(name)}`).join("\n");
const curvesOf = (item) => (detail.key === windowKey() && detail.curves.get(item.key)) || (item.many ? means : known_curves).get(item.key)?.curves || {};
const windowKey = () => (shown.from === "" ? "" : `${shown.from} ${shown.to} ${shown.axis}`);

// Rounds of a window that is given in bytes or seconds, and all points in it.
async function refreshDetail(items, model) {
  const key = windowKey();
  if (!key) { detail = { key: "", curves: new Map() }; return; }
  const from = Number(shown.from), to = Number(shown.to), rounds = [];
  for (const item of items) {
    const points = (item.many ? means : known_curves).get(item.key)?.curves[model];
    if (points) points[shown.axis].forEach((x, at) => { if (x >= from && x <= to) rounds.push(points.round[at]); });
  }
  const [low, high] = shown.axis === "round" ? [Math.max(0, Math.floor(from)), Math.ceil(to)] : rounds.length ? extent(rounds) : [0, 0];
  const window = [["from", low], ["to", high], ["points", pointsFor(items.length)], ...(shown.axis === "bytes" ? [["bytes", 1]] : [])], curves = new Map();
  const alone = items.filter((item) => !item.many).map((item) => item.key);
  for (let at = 0; at < alone.length; at += TOGETHER) for (const [name, found] of Object.entries(await ask("curves", [...asked(alone.slice(at, at + TOGETHER)), ...window]))) curves.set(name, found.curves);
  for (const item of items.filter((each) => each.many)) curves.set(item.key, await ask("means", [...asked(item.members.slice(0, 2 * TOGETHER)), ...window]));
  if (key === windowKey()) detail = { key, curves };
}

// The marks of runs drawn together: a method has its colour, and each further run of it another dash.
function marked(names) {
  const count = {};
  return names.map((name) => rows.get(name)).filter(Boolean).map((row) => ({ key: row.name, members: [row.name], label: brief(row.name), colour: row.colour, dash: row.dash, variant: (count[row.method] = (count[row.method] ?? -1) + 1), unfinished: !["done", "running"].includes(row.state) }));
}
function markedGroups(names) {
  return groupsOf(names.map((name) => rows.get(name)).filter(Boolean)).map((group) => ({ ...group, members: group.members.map((row) => row.name), many: true, label: groupLabel(group) }));
}
const groupLabel = (group) => (group.members.length > 1 ? `${group.label} (${group.members.length} runs)` : group.label);

function smoothed(values, weight) {
  let mean = 0, sum = 0;
  return values.map((value) => { if (!known(value)) return value; mean = weight * mean + (1 - weight) * value; sum = weight * sum + (1 - weight); return mean / sum; });
}

// Accuracy and loss of runs or groups; `draw` asks for what is new first.
function curveFigure(items) {
  let built = null, busy = false, again = false;
  const controls = element("div", { class: "controls" }), whole = element("div", { class: "controls zoom" }), without = element("p", { class: "note", hidden: "" }), banded = element("span", { hidden: "" }, " Bands go from the lowest to the highest run; of many groups, point at one to see its band.");
  const having = () => [...new Set(items().flatMap((item) => Object.keys((item.many ? means : known_curves).get(item.key)?.curves || {})))];
  const model = () => { const all = having(); return all.includes(shown.model) ? shown.model : Object.keys(WORDS).find((name) => all.includes(name)) || all[0] || "global"; };
  const series = (what) => (of = model()) => items().map((item) => ({ item, points: curvesOf(item)[of] })).filter(({ points }) => points && points.round.length).map(({ item, points }) => {
    const ys = shown.smooth ? smoothed(points[what], Number(shown.smooth)) : points[what], raw = shown.smooth && points.round.length > 2 ? points[what] : null;
    return { group: item, xs: points[shown.axis], ys, raw, low: raw ? null : points[`${what}_low`], high: points[`${what}_high`], unfinished: item.unfinished };
  });
  const numbers = () => ({ waiting: busy, x: shown.axis, xName: AXES[shown.axis][0], xText: AXES[shown.axis][1], logx: shown.logx === "1", from: shown.from === "" ? null : Number(shown.from), to: shown.to === "" ? null : Number(shown.to) });
  const ofAccuracy = () => ({ ...numbers(), yName: "accuracy, %", yText: (value) => `${percent(value)} %`, share: true });
  const ofLoss = () => ({ ...numbers(), yName: "loss", yText: (value) => (known(value) ? String(+value.toPrecision(4)) : "–"), logy: shown.logy === "1" });
  const about = (what, how, own) => () => { const all = own(); return `${what} over ${how().xName}, ${WORDS[model()] || model()}. ${all.slice(0, 12).map(({ group, ys }) => `${group.label}: ${how().yText(ys.filter(known).pop())}`).join("; ")}${all.length > 12 ? `; and ${all.length - 12} more` : ""}`; };
  function zoom(from, to) {
    remember({ from: known(from) ? String(+from.toPrecision(6)) : "", to: known(to) ? String(+to.toPrecision(6)) : "" });
    show();
    refreshDetail(items(), model()).then(show, () => {});
  }
  function step(factor) {
    const whole = wholeOf();
    zoom(...closer(shown.from === "" ? whole : [Number(shown.from), Number(shown.to)], whole, factor, shown.logx === "1"));
  }
  const wholeOf = (of = model()) => { const xs = items().flatMap((item) => (item.many ? means : known_curves).get(item.key)?.curves[of]?.[shown.axis] || []).filter((x) => known(x) && (shown.logx !== "1" || x > 0)); return xs.length ? extent(xs) : [0, 1]; };
  const a = series("accuracy"), b = series("loss");
  const charts = [plot("accuracy", about("Accuracy", ofAccuracy, a), ofAccuracy, a, zoom), plot("loss", about("Loss", ofLoss, b), ofLoss, b, zoom)];
  function change(what) { remember(what); draw(); }
  // Anew only when there are other models: whoever uses the keyboard would lose their place.
  function build() {
    const tick = (words, name) => { const box = element("input", { type: "checkbox", "data-set": name, onchange: () => change({ [name]: box.checked ? "1" : "", from: "", to: "" }) }); box.checked = shown[name] === "1"; return element("label", { class: "selection" }, box, words); };
    controls.replaceChildren(choice("Over what", { round: "Rounds", bytes: "Bytes", seconds: "Seconds" }, shown.axis, (axis) => change({ axis, from: "", to: "" })),
      ...[selection("Evaluated on", Object.fromEntries(having().map((name) => [name, WORDS[name] || name])), model(), (name) => change({ model: name }))].filter(Boolean),
      tick("log x", "logx"), tick("log loss", "logy"), selection("Smooth", SMOOTH, shown.smooth, (smooth) => change({ smooth })), whole);
    const button = (id, words, label, act) => element("button", { type: "button", class: "plain", id, "aria-label": label, title: label, onclick: act }, words);
    whole.replaceChildren(button("zoom-in", "+", "Zoom in", () => step(0.5)), button("zoom-out", "−", "Zoom out", () => step(2)), button("zoom-whole", "Whole", "Show the whole axis", () => zoom()));
  }
  function show() {
    if (having().join() !== built) { built = having().join(); build(); }
    document.body.classList.remove("pointing");
    for (const each of charts) each.redraw();
    const zoomed = shown.from !== "", of = model(), lacking = items().filter((item) => Object.keys(curvesOf(item)).length && !curvesOf(item)[of]).map((item) => item.label);
    banded.hidden = !shown.group || Boolean(shown.run);
    without.hidden = !lacking.length;
    without.textContent = `Not evaluated on ${WORDS[of] || of}: ${list(lacking)}.`;
    whole.querySelector("#zoom-whole").disabled = whole.querySelector("#zoom-out").disabled = !zoomed;
  }
  async function draw() {
    if (busy) { again = true; return; }
    busy = true;
    try {
      if (!items().some((item) => Object.keys(curvesOf(item)).length)) show(); // says that it reads
      const all = items(), alone = all.filter((item) => !item.many).map((item) => item.key);
      const news = [await refreshCurves(alone, pointsFor(alone.length)), await refreshMeans(all.filter((item) => item.many))].some(Boolean);
      if (news || detail.key !== windowKey()) await refreshDetail(all, model());
      busy = false;
      show();
    } catch { /* the next news bring it; that the server is gone is said elsewhere */ } finally { busy = false; }
    if (again) { again = false; draw(); }
  }
  build();
  return { frame: element("figure", { class: "curves" }, controls, element("div", { class: "two" }, charts.map((each) => each.frame)), without, element("p", { class: "note" }, "Drag over a chart to zoom, or press + − 0; arrows show values.", banded)), draw, show };
}

// One line is made to stand out while its name is pointed at.
function pointAt(node, label) {
  const mark = (on) => () => {
    const lines = [...document.querySelectorAll(".plot .line, .plot .band")], own = on ? lines.filter((line) => line.dataset.name === label()) : [];
    document.body.classList.toggle("pointing", own.length > 0);
    for (const line of lines) line.classList.toggle("chosen", own.includes(line));
  };
  for (const [event, on] of [["pointerenter", true], ["focusin", true], ["pointerleave", false], ["focusout", false]]) node.addEventListener(event, mark(on));
}
