// Runs as they are now: the server tells which have changed, and the page asks for the points it lacks of those it draws.
const rows = new Map(), ticked = new Set(), curves = new Map();
const WORDS = { global: "the global model", "fine-tuned": "fine-tuned personal models", "personal after": "personal models after local training", "personal before": "personal models before local training" };
const AXES = { round: ["rounds", (value) => String(Math.round(value))], seconds: ["seconds of running", duration] };
const STATES = ["running", "done", "stopped", "failed", "corrupt"];
const MOST = 1500; // points of a curve after which it is asked for again, thinned
let opened = null, heard = false;

async function ask(path, parameters, options) {
  const response = await fetch(`${path}?${new URLSearchParams(parameters)}`, options);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

// ---- what is known of a run's curves ----
async function refresh(name) {
  const row = rows.get(name);
  if (!row) return false;
  let mine = curves.get(name);
  if (!mine) curves.set(name, (mine = { read: 0, generation: 0, curves: {}, seen: null, busy: null }));
  const version = `${row.generation} ${row.read} ${row.done}`;
  if (mine.seen === version) return false;
  if (mine.busy) return mine.busy; // its answer may lack the newest round; the next change brings it
  mine.busy = ask("curves", { run: name, after: mine.read, generation: mine.generation }).then((news) => {
    for (const [model, points] of Object.entries(news.curves)) {
      const before = mine.curves[model], kept = before ? before.round.filter((round) => round <= news.after).length : 0;
      mine.curves[model] = Object.fromEntries(Object.entries(points).map(([what, values]) => [what, kept ? [...before[what].slice(0, kept), ...values] : values]));
    }
    const long = Object.values(mine.curves).some((points) => points.round.length > MOST);
    Object.assign(mine, { read: long ? 0 : news.read, generation: news.generation, seen: version });
    return true;
  }).finally(() => { mine.busy = null; });
  return mine.busy;
}

// The marks of runs drawn together: a method has its colour, and each further run of it another dash.
function marked(names) {
  const count = {};
  return names.map((name) => rows.get(name)).filter(Boolean).map((row) => ({ label: row.name, colour: row.colour, dash: row.dash, variant: (count[row.method] = (count[row.method] ?? -1) + 1), row }));
}

// Accuracy and loss of runs, over rounds or seconds; `draw` again when there are new points.
function curveFigure(names) {
  let axis = "round", model = null, charts = [];
  const accuracy = element("div"), loss = element("div"), controls = element("div", { class: "controls" });
  const having = () => [...new Set(names().flatMap((name) => Object.keys(curves.get(name)?.curves || {})))];
  const series = (what) => () => marked(names()).map((group) => ({ group, points: curves.get(group.label)?.curves[model] })).filter(({ points }) => points && points.round.length)
    .map(({ group, points }) => ({ group, xs: points[axis], ys: points[what], unfinished: group.row.state !== "done" && group.row.state !== "running" }));
  const about = (what, shown) => () => `${what} over ${AXES[axis][0]}, ${WORDS[model] || model}. ` + shown().map(({ group, ys }) => `${group.label}: ${what === "Loss" ? plainly(ys.filter(known).pop()) : percent(ys.filter(known).pop()) + " %"}`).join("; ");
  let models = "";
  function build() {
    const shown = series("accuracy"), losses = series("loss");
    charts = [lines(about("Accuracy", shown), ...AXES[axis], "accuracy, %", shown), heights(about("Loss", losses), ...AXES[axis], "loss", losses)];
    accuracy.replaceChildren(charts[0].frame);
    loss.replaceChildren(charts[1].frame);
    controls.replaceChildren(choice("Over what", { round: "Rounds", seconds: "Seconds" }, axis, (value) => { axis = value; build(); }),
      ...[selection("Evaluated on", Object.fromEntries(having().map((name) => [name, WORDS[name] || name])), model, (value) => { model = value; build(); })].filter(Boolean));
  }
  function draw() {
    const now = having().join();
    if (!having().includes(model)) model = Object.keys(WORDS).find((name) => having().includes(name)) || having()[0] || "global";
    if (now !== models || !charts.length) { models = now; build(); } else for (const each of charts) each.redraw();
  }
  draw();
  return { frame: element("figure", {}, controls, element("div", { class: "two" }, accuracy, loss)), draw };
}

// ---- the list ----
const stateWords = (row) => (row.stopping ? "stopping" : row.state);
// Rounds of training; those before them prepare it, and are counted nowhere.
const preparing = (row) => row.done > 0 && row.round === 0 && row.preparation > 0;
const progress = (row) => (preparing(row) ? `preparing, ${row.done} / ${row.preparation}` : row.round < row.rounds ? `${row.round} / ${row.rounds}` : `${row.round} rounds`);

function line(name) {
  const box = element("input", { type: "checkbox", "aria-label": `Compare ${name}`, onchange: () => { box.checked ? ticked.add(name) : ticked.delete(name); compared(); } });
  const parts = Object.fromEntries(["about", "spark", "accuracy", "round", "state"].map((part) => [part, element("span", { class: part })]));
  const node = element("li", {}, element("label", { class: "tick" }, box), element("a", { class: "name", href: `#run=${encodeURIComponent(name)}` }, name), Object.values(parts));
  let drawnSpark = "";
  function update(row) {
    box.checked = ticked.has(name);
    const words = [row.method, row.data, known(row.clients) && `${row.clients} clients`, known(row.seed) && `seed ${row.seed}`].filter((word) => word && word !== "?").join(" · ");
    parts.about.replaceChildren(words, row.trouble && row.state !== "stopped" ? element("span", { class: "trouble" }, ` ${row.trouble}`) : "");
    parts.accuracy.replaceChildren(...(known(row.accuracy) ? [`${percent(row.accuracy)} %`, element("small", { title: WORDS[row.evaluated_on] }, row.evaluated_on === "global" ? "global" : "personal")] : ["–"]));
    parts.round.textContent = progress(row);
    parts.state.textContent = stateWords(row);
    parts.state.className = `state ${row.state}`;
    const now = row.spark.join();
    if (now !== drawnSpark) { drawnSpark = now; parts.spark.replaceChildren(spark(row.spark, row.colour)); }
  }
  return { node, update };
}

function listView() {
  const lineOf = new Map(), list = element("ul", { class: "runs" }), title = element("h1"), empty = element("p", { class: "lead" });
  let query = "", state = "all", order = "";
  const key = element("div", { class: "chips", role: "group", "aria-label": "Ticked runs" }), hint = element("span", {}, "Tick runs to see their curves together.");
  const comparison = element("section", { id: "comparison", "aria-label": "Ticked runs", hidden: "" });
  const reports = element("a", { target: "_blank", rel: "noopener" }), clear = element("button", { type: "button", class: "plain", id: "clear", onclick: () => { ticked.clear(); compared(); update([...rows.values()]); } }, "Untick all");
  const figure = curveFigure(() => [...ticked].filter((name) => rows.has(name)));
  comparison.append(key, figure.frame, element("div", { class: "controls" }, reports, clear));
  const search = element("input", { type: "search", class: "search", placeholder: "Find a run", "aria-label": "Find a run", oninput: () => { query = search.value.toLowerCase(); arrange(); } });
  const which = selection("Show", { all: "all runs", ...Object.fromEntries(STATES.map((name) => [name, name])) }, state, (value) => { state = value; arrange(); });
  const shown = (row) => (state === "all" || row.state === state) && (!query || `${row.name} ${row.method} ${row.data}`.toLowerCase().includes(query));
  function arrange() {
    // Running ones first, then the youngest; an order that changes with every round would move under the finger.
    const all = [...rows.values()].sort((a, b) => (b.state === "running") - (a.state === "running") || b.began - a.began || a.name.localeCompare(b.name, "en", { numeric: true })).filter(shown).map((row) => row.name);
    if (all.join("\n") !== order) { order = all.join("\n"); list.replaceChildren(...all.map((name) => lineOf.get(name).node)); }
    empty.textContent = rows.size ? (all.length ? "" : "No run is like that.") : heard ? "There is no run in this folder yet. One that begins appears here by itself." : "";
    empty.hidden = !empty.textContent;
    const count = STATES.map((name) => [name, [...rows.values()].filter((row) => row.state === name).length]).filter(([, number]) => number);
    title.textContent = count.length ? count.map(([name, number]) => `${number} ${name}`).join(", ") : heard ? "No runs" : "Reading runs …";
  }
  function update(changed) {
    for (const row of changed) {
      if (!lineOf.has(row.name)) lineOf.set(row.name, line(row.name));
      lineOf.get(row.name).update(row);
    }
    for (const name of lineOf.keys()) if (!rows.has(name)) { lineOf.delete(name); ticked.delete(name); }
    arrange();
    redraw(changed.some((row) => ticked.has(row.name)));
  }
  async function redraw(needed) {
    comparison.hidden = !ticked.size;
    hint.hidden = ticked.size > 0;
    if (!ticked.size || !needed) return;
    key.replaceChildren(...marked([...ticked]).map((group) => element("button", { type: "button", class: "chip", title: "Untick", onclick: () => { ticked.delete(group.label); update([group.row]); compared(); } }, named(group))));
    reports.textContent = ticked.size > 1 ? `Report of these ${ticked.size} runs` : "Its report";
    reports.href = `report?${new URLSearchParams([...ticked].map((name) => ["run", name]))}`;
    await Promise.all([...ticked].map((name) => refresh(name).catch(() => false)));
    figure.draw();
  }
  update([...rows.values()]);
  redraw(true);
  return { node: element("div", {}, title, comparison, element("div", { class: "controls" }, search, which, hint), list, empty), update, compared: () => redraw(true) };
}
const compared = () => view.compared && view.compared();

// ---- one run ----
function runView(name) {
  const first = rows.get(name), status = element("p", { class: "lead", role: "status" }), numbers = element("div"), bar = element("div", { class: "bar" }), trouble = element("p", { class: "warning", hidden: "" });
  const buttons = element("div", { class: "controls" }), more = element("div"), who = element("section", { id: "clients" });
  const figure = curveFigure(() => [name]);
  let stopWords = null, looked = "";
  async function details() {
    const found = await ask("run", { run: name });
    more.replaceChildren(...[found.notes.length > 0 && [element("h2", {}, "Notes"), element("ul", {}, found.notes.slice(-12).reverse().map((note) => element("li", {}, note)))],
      found.pictures.length > 0 && [element("h2", {}, "What models look at"), gallery(name, found.pictures)],
      element("details", {}, element("summary", {}, "Settings"), facts(Object.entries(found.settings)))].flat().filter(Boolean));
  }
  function stopping(row) {
    if (row.state !== "running") return [];
    if (row.stopping) return [element("span", {}, "It stops at the end of its round.")];
    if (stopWords) return [element("span", {}, stopWords)];
    const sure = element("button", { type: "button", class: "plain stop", id: "sure", onclick: () => {
      stopWords = "It stops at the end of its round.";
      ask("stop", { run: name }, { method: "POST" }).catch((error) => { stopWords = error.message; }).finally(() => update([rows.get(name)]));
    } }, "Stop it after this round"), no = element("button", { type: "button", class: "plain", onclick: () => pair.replaceWith(stop) }, "Let it run");
    const pair = element("span", { class: "controls" }, sure, no);
    const stop = element("button", { type: "button", class: "plain stop", id: "stop", onclick: () => { stop.replaceWith(pair); sure.focus(); } }, "Stop");
    return [stop];
  }
  let offered = "";
  function update(changed) {
    const row = rows.get(name);
    if (!row) { status.textContent = "This run is not in the folder any more."; buttons.replaceChildren(); return; }
    if (!changed.includes(row)) return;
    status.replaceChildren(element("span", { class: `state ${row.state}` }, stateWords(row)), ` ${row.method}${row.family ? ` (${row.family})` : ""} on ${row.data || "?"}, ${progress(row)}`, known(row.accuracy) ? `, ${percent(row.accuracy)} % accuracy of ${WORDS[row.evaluated_on] || row.evaluated_on}` : "");
    if (row.state !== "running") stopWords = null;
    trouble.hidden = !row.trouble;
    trouble.textContent = row.trouble + (row.state === "stopped" || row.state === "failed" ? `; go on with fedlens resume ${row.path}` : "");
    bar.replaceChildren(drawn("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", role: "img", "aria-label": progress(row) }, drawn("rect", { width: (100 * row.done) / (row.all || 1), height: 6 })));
    const left = row.state === "running" && row.done ? duration((row.seconds / row.done) * (row.all - row.done)) : null;
    numbers.replaceChildren(facts([["best accuracy", `${percent(row.best)} %`], ["clients", row.clients], ["data", row.data], ["split", row.partition], ["model", row.model], ["seed", row.seed], ["traffic", size(row.bytes)], ["time", duration(row.seconds)], ...(left ? [["time left, about", left]] : [])]));
    const offer = `${row.state} ${row.stopping} ${stopWords}`;
    if (offer !== offered) { // a button must not be replaced under the finger
      offered = offer;
      buttons.replaceChildren(element("a", { href: `report?${new URLSearchParams({ run: name })}`, target: "_blank", rel: "noopener" }, "Report"), ...stopping(row));
    }
    refresh(name).then((news) => news && figure.draw(), () => {});
    clients.refresh(row.state);
    const now = `${row.state} ${row.generation} ${row.notes}`;
    if (now !== looked) { looked = now; details().catch((error) => more.replaceChildren(error.message)); }
  }
  const clients = clientSection(name);
  who.replaceChildren(element("h2", {}, "Clients"), ...clients.nodes);
  const node = element("div", {}, element("a", { class: "back", href: "#" }, "All runs"), element("h1", {}, name), status, bar, trouble, buttons, figure.frame, numbers, who, element("section", {}, more));
  update([first]);
  if (curves.has(name)) figure.draw();
  return { node, update };
}

function gallery(name, pictures) {
  return element("div", { class: "pictures" }, pictures.map((picture) => element("figure", {}, element("a", { href: `picture?${new URLSearchParams({ run: name, name: picture.name })}`, target: "_blank", rel: "noopener" },
    element("img", { src: `picture?${new URLSearchParams({ run: name, name: picture.name })}`, alt: picture.about, loading: "lazy" })), element("figcaption", {}, picture.about))));
}

// ---- clients, a page of them at a time ----
const ORDERS = { worst: "least accurate first", best: "most accurate first", number: "by number", largest: "most images first", smallest: "fewest images first" };

function clientSection(name) {
  const holder = element("div"), card = element("div", { id: "client" }), told = element("p", { role: "status" });
  let order = "number", at = 0, shown = 0, state = "";
  async function show() {
    shown = Date.now();
    let found;
    try { found = await ask("clients", { run: name, order, at }); } catch (error) { told.textContent = error.message; holder.replaceChildren(); return; }
    const last = at + found.rows.length, evaluated = found.model ? `, evaluated after round ${found.round} on ${WORDS[found.model] || found.model}` : "";
    told.textContent = found.count ? `Clients ${at + 1} to ${last} of ${found.count}${evaluated}.` : order === "worst" || order === "best" ? "Clients were not evaluated yet." : "Nothing is known of clients yet.";
    const turn = (words, to, possible) => element("button", { type: "button", class: "plain", disabled: possible ? null : "", onclick: () => { at = to; show(); } }, words);
    const body = found.rows.map((row) => element("tr", {}, element("th", { scope: "row" }, element("button", { type: "button", class: "plain", "data-client": row.client, onclick: () => inspect(row.client) }, row.name)),
      element("td", { class: "number" }, known(row.accuracy) ? percent(row.accuracy) : "–"), element("td", { class: "number" }, plainly(row.images)), element("td", { class: "number" }, plainly(row.classes)),
      element("td", {}, (row.most || []).map(([label, count]) => `${label} (${count})`).join(", "))));
    const size = 25, head = ["client", "accuracy, %", "images", "classes", "most of class"].map((words, number) => element("th", { scope: "col", class: number > 0 && number < 4 ? "number" : null }, words));
    holder.replaceChildren(...(found.count ? [element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Clients" }, element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body))),
      element("div", { class: "foot" }, turn("Earlier", Math.max(0, at - size), at > 0), turn("Later", at + size, last < found.count))] : []));
  }
  async function inspect(number) {
    try { card.replaceChildren(clientCard(name, await ask("client", { run: name, client: number }))); } catch (error) { card.replaceChildren(element("p", { class: "warning" }, error.message)); }
    card.scrollIntoView({ block: "nearest" });
  }
  const field = element("input", { type: "number", min: 0, class: "search", id: "which", placeholder: "number", "aria-label": "Number of a client" });
  const form = element("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); if (field.value !== "") inspect(Number(field.value)); } }, field, element("button", { class: "plain" }, "Inspect"));
  // Not every round: accuracies of clients change when they are looked at, and a table that moves is hard to read.
  const again = (now) => { if (now !== state || Date.now() - shown > 10000) { state = now; show(); } };
  return { refresh: again, nodes: [told, element("div", { class: "controls" }, selection("Order", ORDERS, order, (value) => { order = value; at = 0; show(); }), form), card, holder] };
}

function clientCard(name, found) {
  const group = (model, number) => ({ label: WORDS[model] || model, colour: rows.get(name)?.colour || 0, dash: 0, variant: number });
  const series = () => Object.entries(found.curves).map(([model, points], number) => ({ group: group(model, number), xs: points.round, ys: points.accuracy }));
  const last = Object.entries(found.curves).map(([model, points]) => [`accuracy, ${WORDS[model] || model}`, `${percent(points.accuracy[points.accuracy.length - 1])} %`]);
  return element("div", { class: "card" }, element("h3", {}, found.name.replace(/^client (?=\d+$)/, "Client ")),
    facts([["training images", found.images], ["share of all images", known(found.share) ? `${percent(found.share, 2)} %` : null], ["weight, as the method used it", known(found.weight) ? `${percent(found.weight, 2)} %` : "not recorded; fedlens explain shows it where a method weighs its clients"],
      ["took part in", `${found.took_part} rounds`], ["last in round", found.last_part], ...last, ...Object.entries(found.setbacks)], false),
    element("div", { class: "two" }, found.counts && mix(() => `Images of each class: ${found.counts.map((count, label) => `${found.classes[label]} ${count}`).join(", ")}`, found.counts, found.classes).frame,
      series().length > 0 && element("div", {}, lines(() => `Accuracy of ${found.name} over rounds`, ...AXES.round, "accuracy on its own test images, %", series).frame,
        element("div", { class: "chips" }, series().map(({ group }) => element("span", { class: "chip" }, named(group)))))),
    !series().length && element("p", { class: "about" }, "It was not evaluated yet: evaluate.personal_every=N evaluates clients every N rounds."),
    found.pictures.length > 0 ? gallery(name, found.pictures) : element("p", { class: "about" }, `No saliency pictures yet: fedlens explain ${rows.get(name)?.path} --clients ${found.client} draws them.`));
}

// ---- the page ----
const content = element("main", { id: "main" }), lost = element("p", { class: "warning lost", role: "alert", hidden: "" }, "The server does not answer; what you see may be old.");
let view = { update() {} };

function route() {
  const name = new URLSearchParams(location.hash.slice(1)).get("run");
  opened = name && (rows.has(name) || !heard) ? name : null;
  if (opened && !heard) return; // it comes with the first list
  view = opened ? runView(opened) : listView();
  content.replaceChildren(view.node);
  document.title = opened ? `${opened} · FedLens` : "FedLens";
  scrollTo(0, 0);
}

function listen() {
  const source = new EventSource("events");
  source.onmessage = (event) => {
    const news = JSON.parse(event.data), first = !heard;
    lost.hidden = heard = true;
    if (news.all) for (const name of [...rows.keys()]) if (!news.runs.some((row) => row.name === name)) rows.delete(name);
    for (const name of news.gone) rows.delete(name);
    for (const row of news.runs) rows.set(row.name, row);
    if (first) route(); else view.update(news.runs);
  };
  source.onerror = () => {
    lost.hidden = false;
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
}

if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the token is in a cookie now
document.body.prepend(element("div", { class: "sheet" }, lost, element("div", { class: "head" }, element("span", {}, element("strong", {}, "FedLens"), ` · ${report.folder}`)), content, element("footer", {}, `FedLens ${report.version}. This page reads the folder and writes nothing but a request to stop.`)));
addEventListener("hashchange", route);
route();
listen();
