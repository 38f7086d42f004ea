// One run: how far it is, its curves, what was lost on the way, its clients, notes, log and settings.
function runView(name) {
  const first = rows.get(name), status = element("p", { class: "lead", role: "status" }), numbers = element("div"), bar = element("div", { class: "bar" }), trouble = element("p", { class: "warning", hidden: "" });
  const buttons = element("div", { class: "controls" }), more = element("div"), who = element("section", { id: "clients" }), remarks = element("div", { id: "remarks" });
  const lostHere = element("section", { id: "lost", hidden: "" }), lines = element("pre", { tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Last lines of log.txt" }), log = element("details", { id: "log" }, element("summary", {}, "Log"), lines);
  const figure = curveFigure(() => marked([name])), safe = element("p", { id: "safety" }), reasons = element("ul", { id: "reasons" });
  let stopWords = null, looked = "";
  async function details() {
    const found = await ask("run", { run: name }), row = rows.get(name);
    remarks.replaceChildren(...found.remarks.slice(-20).reverse().map((note) => element("p", { class: "remark" }, element("time", {}, note.at), ` ${note.text}`)));
    reasons.replaceChildren(...found.privacy.map((one) => element("li", { class: one.alarm ? "alarmed" : null }, one.text)));
    lostHere.hidden = !found.setbacks.first.length;
    lostHere.replaceChildren(...(lostHere.hidden ? [] : [element("h2", {}, "Lost replies"), setbackBars(found.setbacks, Math.max(row?.all || 1, ...found.setbacks.first))]));
    more.replaceChildren(...[found.notes.length > 0 && [element("h2", {}, "Notes of the run"), element("ul", {}, found.notes.slice(-12).reverse().map((note) => element("li", {}, note)))],
      found.pictures.length > 0 && [element("h2", {}, "What models look at"), gallery(name, found.pictures)],
      element("details", {}, element("summary", {}, "Settings"), facts(Object.entries(found.settings)))].flat().filter(Boolean));
  }
  async function readLog() {
    if (!log.open) return;
    const bottom = lines.scrollTop + lines.clientHeight > lines.scrollHeight - 8;
    try { lines.textContent = (await ask("log", { run: name })).lines.join("\n") || "It has said nothing yet."; } catch (error) { lines.textContent = error.message; }
    if (bottom) lines.scrollTop = lines.scrollHeight; // who reads further up is left there
  }
  log.addEventListener("toggle", readLog);
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
    status.replaceChildren(element("span", { class: `state ${row.state}` }, stateWords(row)), ` · ${row.method}${row.family ? ` (family: ${row.family})` : ""} on ${row.data || "?"}, ${row.round < row.rounds ? "round " : ""}${progress(row)}${row.round < row.rounds ? "" : " rounds"}`, known(row.accuracy) ? `, ${percent(row.accuracy)} % accuracy of ${WORDS[row.evaluated_on] || row.evaluated_on}` : "");
    safe.className = row.alarm ? "alarmed" : "";
    safe.replaceChildren(element("b", {}, "Privacy: "), row.privacy || "unknown", ".");
    if (row.state !== "running") stopWords = null;
    trouble.hidden = !row.trouble;
    trouble.textContent = row.trouble + (row.state === "stopped" || row.state === "failed" ? `; go on with fedlens resume ${row.path}` : "");
    bar.replaceChildren(drawn("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", role: "img", "aria-label": progress(row) }, drawn("rect", { width: (100 * row.done) / (row.all || 1), height: 6 })));
    const left = secondsLeft(row);
    numbers.replaceChildren(facts([...(averagesAtEnd(row) ? [[row.closing_over, `${percent(row.closing)} %`]] : []), ["best accuracy", `${percent(row.best)} %`], ["clients", row.clients], ["data", row.data], ["split", row.partition], ["model", row.model], ["seed", row.seed], ["traffic", size(row.bytes)], ["time", duration(row.seconds)], ...(row.tags?.length ? [["tags", row.tags.join(", ")]] : []), ...(known(left) ? [["time left, about", duration(left)]] : [])]));
    const offer = `${row.state} ${row.stopping} ${stopWords}`;
    if (offer !== offered) { // a button must not be replaced under the finger
      offered = offer;
      buttons.replaceChildren(element("a", { href: `report?${new URLSearchParams({ run: name })}`, target: "_blank", rel: "noopener" }, "Report"), ...stopping(row));
    }
    figure.draw();
    clients.refresh(row.state);
    readLog();
    const now = `${row.state} ${row.generation} ${row.notes} ${row.lost} ${row.remark} ${row.tags} ${row.privacy}`;
    if (now !== looked) { looked = now; details().catch((error) => more.replaceChildren(error.message)); }
  }
  const clients = clientSection(name);
  who.replaceChildren(element("h2", {}, "Clients"), ...clients.nodes);
  const node = element("div", {}, leads({ run: "" }, { class: "back" }, "All runs"), element("h1", {}, name), status, safe, remarks, bar, trouble, buttons, figure.frame, numbers, element("section", { id: "privacy" }, element("h2", {}, "Privacy"), reasons), lostHere, who, element("section", {}, log, more));
  update([first]);
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
    holder.replaceChildren(...(found.count ? [element("div", { class: "scroll edges", tabindex: 0, role: "region", "aria-label": "Clients" }, element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body))),
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
      series().length > 0 && element("div", {}, plot(`accuracy of ${found.name}`, () => `Accuracy of ${found.name} over rounds`, () => ({ x: "round", xName: "rounds", xText: AXES.round[1], yName: "accuracy on its own test images, %", yText: (value) => `${percent(value)} %`, share: true }), series, () => {}).frame,
        element("div", { class: "chips" }, series().map(({ group }) => element("span", { class: "chip" }, named(group)))))),
    !series().length && element("p", { class: "about" }, "It was not evaluated yet: evaluate.personal_every=N evaluates clients every N rounds."),
    found.pictures.length > 0 ? gallery(name, found.pictures) : element("p", { class: "about" }, `No saliency pictures yet: fedlens explain ${rows.get(name)?.path} --clients ${found.client} draws them.`));
}
