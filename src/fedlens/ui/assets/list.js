// The list of runs, or of groups of runs: a table that any column sorts.
const MOST_ROWS = 300, EXTRA = 6, CHIPS = 16; // rows at first; columns for settings that differ; names above the charts
const stateWords = (row) => (row.stopping ? "stopping" : row.state);
// Rounds of training; those before them prepare it, and are counted nowhere.
const preparing = (row) => row.done > 0 && row.round === 0 && row.preparation > 0;
const progress = (row) => (preparing(row) ? `preparing, ${row.done} / ${row.preparation}` : row.round < row.rounds ? `${row.round} / ${row.rounds}` : String(row.round));
const ago = (when) => { const date = new Date(when); return when ? `${date.toLocaleDateString("en-CA")} ${date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}` : "–"; };

// What comparisons rank complete runs by, where that is a mean over several evaluations.
const averagesAtEnd = (row) => row.state === "done" && row.evaluated_on === "global" && known(row.closing) && row.closing_over !== "after the last round";

// A column: words, value(row) to sort by, text(value, row) to read; number: a group shows its mean; alike: what all runs share is said once.
const COLUMNS = {
  ranked: { words: "", number: true, value: (row) => answered.scores?.[row.name] ?? null, text: (value) => percent(value), deviation: true },
  closing: { words: "mean at the end, %", number: true, value: (row) => (averagesAtEnd(row) ? row.closing : null), text: (value) => percent(value), deviation: true },
  accuracy: { words: "last accuracy, %", number: true, value: (row) => row.accuracy, text: (value) => percent(value), deviation: true },
  best: { words: "best, %", number: true, value: (row) => row.best, text: (value) => percent(value) },
  curve: { words: "curve" },
  round: { words: "rounds", number: true, value: (row) => row.round, text: (value, row) => (row ? progress(row) : String(Math.round(value))) },
  state: { words: "state", value: (row) => stateWords(row) },
  privacy: { words: "privacy", value: (row) => row.privacy },
  tags: { words: "tags", value: (row) => (row.tags || []).join(", ") || null },
  method: { words: "method", value: (row) => row.method },
  family: { words: "family", alike: true, value: (row) => row.family },
  data: { words: "data", alike: true, value: (row) => row.data },
  clients: { words: "clients", alike: true, number: true, value: (row) => row.clients, text: plainly },
  seed: { words: "seed", number: true, value: (row) => row.seed, text: plainly, all: true },
  bytes: { words: "traffic", number: true, value: (row) => row.bytes, text: size },
  seconds: { words: "time", number: true, value: (row) => row.seconds, text: duration },
  lost: { words: "lost replies", number: true, value: (row) => row.lost || null, text: (value) => plainly(+value?.toFixed(1)) },
  began: { words: "began", number: true, value: (row) => row.began || null, text: (value) => ago(value), newest: true },
};
const TOLD = new Set(["algorithm", "data", "clients", "seed"]); // settings that have a column already
function columnsNow(all) {
  const values = (column) => new Set(all.map(column.value).filter((value) => known(value) && value !== "" && value !== "?"));
  const used = Object.entries(COLUMNS).filter(([key, column]) => key === "curve" || values(column).size > (column.alike && all.length > 1 ? 1 : 0));
  const keys = outermost(settings.other).filter((key) => !TOLD.has(key)).slice(0, EXTRA);
  const over = new Set(all.filter(averagesAtEnd).map((row) => row.closing_over)), said = used.find(([key]) => key === "closing");
  if (said && over.size === 1) said[1] = { ...said[1], words: `${[...over][0]}, %` }; // the rounds, where all have the same
  const ranked = used.find(([key]) => key === "ranked");
  if (ranked) ranked[1] = { ...ranked[1], words: `${answered.scored}, %` };
  if (ranked && said) used.splice(used.indexOf(said), 1); // the mean of another model ranks nobody here
  return Object.fromEntries([...used, ...keys.map((key) => [`set.${key}`, { words: key, value: (row) => setting(row.name, key) ?? null, text: plainly, number: all.every((row) => typeof (setting(row.name, key) ?? 0) === "number"), all: true }])]);
}

function shared(all, told) { // `told`: what the answer says already
  const of = (value) => { const each = new Set(all.map(value).filter((one) => known(one) && one !== "")); return all.length > 1 && each.size === 1 ? [...each][0] : null; };
  const data = of((row) => row.data), clients = of((row) => row.clients);
  const count = (has) => { const some = all.filter(has).length; return some === all.length ? "all" : `${some} of ${all.length}`; }, privacy = all.length > 0 && [all.some((row) => row.shares) && `${count((row) => row.shares)} share data`, all.some((row) => !row.tested) && (all.some((row) => row.tested) ? `${count((row) => !row.tested)} not tested by attack` : "none tested by attack")].filter(Boolean).join(", ");
  const done = all.filter((row) => row.state === "done"), range = (values, write) => (values.length ? [...new Set(extent(values).map(write))].join(" to ") : "");
  const cost = [range(done.map((row) => row.bytes).filter(known), size), range(done.map((row) => row.seconds).filter(known), duration)].filter(Boolean).join(", ");
  return [data && `all on ${data}`, known(clients) && `${clients} clients each`, cost && !told.cost && `cost: ${cost}`, privacy && !told.privacy && `privacy: ${privacy}`];
}

// What a group has in a column: a mean with its deviation, or all values.
function together(column, members) {
  const values = members.map(column.value).filter((value) => known(value) && value !== "");
  if (!values.length) return { value: null, text: "–" };
  if (!column.number || column.all) {
    const each = [...new Set(values.map(String))].sort(inWords), count = (word) => values.filter((value) => String(value) === word).length;
    return { value: each.join(), text: column === COLUMNS.state ? each.map((word) => `${count(word)} ${word}`).join(", ") : list(each, 5) };
  }
  const mean = column.newest ? Math.max(...values) : values.reduce((sum, value) => sum + value, 0) / values.length;
  const deviation = values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1)) : null;
  return { value: mean, text: column.text(mean) + (column.deviation && known(deviation) ? ` ± ${percent(deviation)}` : "") };
}

// One row of the table: of a run, of a group, or of a run within a group.
function line(item, view) {
  const names = () => (item.members ? item.members.map((row) => row.name) : [item.name]);
  const box = element("input", { type: "checkbox", onchange: () => { for (const name of names()) box.checked ? ticked.add(name) : ticked.delete(name); view.ticked(); } });
  const title = element("span", { class: "title" }), mark = element("span", { class: "mark", hidden: "" }), head = element("th", { scope: "row" }, element("label", { class: "tick" }, box), title), node = element("tr", {}, head);
  let drawnSpark = null, cells = {}, written = {}, order = "";
  const open = item.members && element("button", { type: "button", class: "plain fold", "aria-expanded": "false", onclick: () => view.fold(item.key) });
  function update(now, columns, keys, expanded, marks) {
    item = now;
    mark.textContent = (item.members && names().map((name) => marks[name]).find(Boolean)) || ""; // of a method, not of one seed
    mark.hidden = !mark.textContent;
    const words = item.members ? item.label : brief(item.name), row = item.members ? item.members[0] : item;
    box.checked = names().every((name) => ticked.has(name));
    box.indeterminate = !box.checked && names().some((name) => ticked.has(name));
    box.setAttribute("aria-label", item.members ? `Compare ${item.label}` : `Compare ${item.name}`);
    if (title.dataset.words !== words + row.remark + row.trouble) {
      title.dataset.words = words + row.remark + row.trouble;
      title.replaceChildren(item.members ? element("span", { class: "name" }, foldable(words)) : leads({ run: item.name }, { class: "name", title: item.name }, foldable(words)), ...(item.members ? [open] : []),
        !item.members && row.remark ? element("span", { class: "remark", title: "Newest note" }, row.remark) : "", !item.members && row.trouble && row.state !== "stopped" ? element("span", { class: "trouble" }, row.trouble) : "", mark);
    }
    if (open) { open.textContent = `${item.members.length} run${item.members.length > 1 ? "s" : ""}`; open.setAttribute("aria-expanded", expanded); }
    if (order !== keys.join()) { order = keys.join(); cells = Object.fromEntries(keys.map((key) => [key, element("td", { class: columns[key].number ? "number" : key })])); drawnSpark = null; written = {}; node.replaceChildren(head, ...Object.values(cells)); }
    for (const key of keys) {
      if (key === "curve") continue;
      const column = columns[key], value = column.value(row);
      const said = item.members ? together(column, item.members).text : !known(value) || value === "" ? "–" : column.text ? column.text(value, row) : String(value);
      if (written[key] === said) continue;
      written[key] = said;
      cells[key].textContent = said;
      if (key === "accuracy" && !item.members && known(value)) cells[key].append(element("small", { title: WORDS[row.evaluated_on] }, row.evaluated_on === "global" ? "global" : "personal"));
      if (key === "privacy") cells[key].className = `privacy${(item.members || [row]).some((each) => each.alarm) ? " alarmed" : ""}`;
      if (key === "state" && !item.members) cells[key].className = `state ${row.state}`;
    }
    const sparks = item.members ? item.members.slice(0, 6) : [row], now2 = sparks.map((each) => each.spark.join()).join("\n");
    if (cells.curve && now2 !== drawnSpark) { drawnSpark = now2; cells.curve.replaceChildren(spark(sparks.map((each) => each.spark), row.colour)); }
  }
  pointAt(node, () => (item.members ? groupLabel(item) : brief(item.name)));
  return { node, update };
}

const inWords = new Intl.Collator("en", { numeric: true }).compare;
function compareValues(a, b, up) {
  if (!known(a) || a === "" || !known(b) || b === "") return known(a) && a !== "" ? -1 : known(b) && b !== "" ? 1 : 0; // what is not known comes last
  const less = typeof a === "number" && typeof b === "number" ? a - b : inWords(String(a), String(b));
  return up ? less : -less;
}

function listView() {
  const lineOf = new Map(), unfolded = new Set(), title = element("h1", { class: "count" }), empty = element("p", { class: "lead" }), within = element("p", { class: "about", id: "within" });
  const body = element("tbody"), heads = element("tr"), more = element("button", { type: "button", class: "plain", id: "more", hidden: "", onclick: () => { limit += MOST_ROWS; arrange(true); } });
  const table = element("table", { class: "runs" }, element("caption", { class: "unseen" }, "Runs; the buttons in its head sort it"), element("thead", {}, heads), body), scroll = element("div", { class: "scroll edges", tabindex: 0, role: "region", "aria-label": "Runs" }, table);
  let limit = MOST_ROWS, order = "", headed = "", columns = {}, keys = [];
  const key = element("div", { class: "chips", role: "group", "aria-label": "Ticked runs" }), hint = element("span", { class: "quiet" }, "Tick runs to see their curves together."), apart = element("details", { id: "apart" }, element("summary", {}, "Settings that differ"), element("div"));
  const comparison = element("section", { id: "comparison", "aria-label": "Ticked runs", hidden: "" });
  const reports = element("a", { target: "_blank", rel: "noopener" }), clear = element("button", { type: "button", class: "plain", id: "clear", onclick: () => { ticked.clear(); view.ticked(); } }, "Untick all");
  const chosen = () => [...ticked].filter((name) => rows.has(name)), items = () => (shown.group ? markedGroups(chosen()) : marked(chosen()));
  const figure = curveFigure(items);
  comparison.append(key, figure.frame, apart, element("div", { class: "controls" }, reports, clear));
  const search = element("input", { type: "search", class: "search", placeholder: "Find: fedprox lr=0.1 rounds>50 -failed", "aria-label": "Find runs by name, tag or setting", oninput: () => { remember({ find: search.value }); arrange(true); } });
  search.value = shown.find;
  const which = selection("Show", { all: "all runs", ...Object.fromEntries(STATES.map((name) => [name, name])) }, shown.show, (value) => { remember({ show: value }); arrange(true); });
  const grouping = choice("One row for each", { "": "Runs", method: "Methods" }, shown.group, (value) => { remember({ group: value, from: "", to: "" }); order = ""; arrange(true); redraw(true); });
  const everything = element("input", { type: "checkbox", "aria-label": "Tick all runs that are shown", onchange: () => { for (const name of listed().map((row) => row.name)) everything.checked ? ticked.add(name) : ticked.delete(name); view.ticked(); } });
  const first = element("th", { scope: "col" }, element("label", { class: "tick" }, everything), sorter("name", "run"));
  function sorter(name, words) { return element("button", { type: "button", "data-sort": name, onclick: () => { const down = COLUMNS[name]?.number; remember({ sort: shown.sort === name ? `-${name}` : shown.sort === `-${name}` ? (down ? name : "") : down ? `-${name}` : name }); arrange(true); } }, words); }
  const inQuestion = () => (chosen().length > 1 ? { words: "of the ticked runs", all: chosen().map((name) => rows.get(name)) } : { words: shown.find || shown.show !== "all" ? "of the runs shown" : "", all: listed() });
  const answer = answerSection(inQuestion, () => arrange(false)), ordered = element("p", { class: "quiet", id: "order" });
  const listed = () => { const fits = matcher(shown.find); return [...rows.values()].filter((row) => (shown.show === "all" || row.state === shown.show) && fits(row)); };
  // Running ones first, then the youngest; an order that changes with every round would move under the finger.
  const natural = (a, b) => (b.state === "running") - (a.state === "running") || b.began - a.began || inWords(a.name, b.name);
  function sorted(all) {
    const by = shown.sort.replace(/^-/, ""), up = shown.sort === by, column = columns[by], entries = shown.group ? groupsOf([...all].sort(natural)) : [...all].sort(natural);
    if (by !== "name" && !column) return entries;
    const value = by === "name" ? (each) => (each.members ? each.label : each.name) : (each) => (each.members ? together(column, each.members).value : column.value(each));
    const values = new Map(entries.map((each) => [each, value(each)]));
    return entries.sort((a, b) => compareValues(values.get(a), values.get(b), up));
  }
  function showHeads() {
    const now = keys.map((name) => columns[name].words).join();
    if (now !== headed) { headed = now; heads.replaceChildren(first, ...keys.map((name) => element("th", { scope: "col", class: columns[name].number ? "number" : null }, name === "curve" ? columns[name].words : sorter(name, columns[name].words)))); }
    first.lastChild.textContent = shown.group ? "method" : "run";
    for (const button of heads.querySelectorAll("[data-sort]")) button.closest("th").setAttribute("aria-sort", shown.sort === button.dataset.sort ? "ascending" : shown.sort === `-${button.dataset.sort}` ? "descending" : "none");
  }
  function arrange(asked) {
    const all = listed(), whole = [...rows.values()];
    columns = columnsNow(whole);
    keys = Object.keys(columns).filter((name) => !(shown.group && name === "method")); // a group is called by it
    showHeads();
    const entries = sorted(all).flatMap((entry) => [entry, ...(entry.members && unfolded.has(entry.key) ? entry.members : [])]).slice(0, limit);
    const names = entries.map((entry) => entry.key || entry.name);
    for (const [at, entry] of entries.entries()) {
      if (!lineOf.has(names[at])) lineOf.set(names[at], line(entry, view));
      lineOf.get(names[at]).update(entry, columns, keys, unfolded.has(entry.key), answered.marks || {});
      lineOf.get(names[at]).node.classList.toggle("member", Boolean(shown.group) && !entry.members);
    }
    // While somebody points at a row, rows stay where they are.
    if (names.join("\n") !== order && (asked || !body.matches(":hover, :focus-within") || new Set(names).size !== body.children.length)) { order = names.join("\n"); body.replaceChildren(...names.map((name) => lineOf.get(name).node)); }
    const left = all.length - limit;
    more.hidden = shown.group || left <= 0;
    more.textContent = `Show ${Math.min(left, MOST_ROWS)} more of ${left}`;
    everything.checked = all.length > 0 && all.every((row) => ticked.has(row.name));
    everything.indeterminate = !everything.checked && all.some((row) => ticked.has(row.name));
    scroll.hidden = !entries.length;
    empty.textContent = rows.size ? (all.length ? "" : "No run is like that.") : heard ? "There is no run in this folder yet. One that begins appears here by itself." : "";
    empty.hidden = !empty.textContent;
    within.textContent = [prefix && `All names begin with ${prefix}`, ...shared(whole, answered.tiles || {})].filter(Boolean).join(" · ");
    within.hidden = !within.textContent;
    ordered.textContent = columns[shown.sort.replace(/^-/, "")] || /^-?name$/.test(shown.sort) ? "" : `Rows are in order of time, ${all.some((row) => row.state === "running") ? "running ones and then the newest" : "the newest"} first: not a ranking.`;
    ordered.hidden = entries.length < 2 || !ordered.textContent;
    answer.update();
    const count = STATES.map((name) => [name, whole.filter((row) => row.state === name).length]).filter(([, number]) => number);
    title.textContent = count.length ? count.map(([name, number], at) => `${number} ${at ? "" : number === 1 ? "run " : "runs "}${name}`).join(", ") : heard ? "No runs" : "Reading runs …";
  }
  function redraw(needed) {
    comparison.hidden = !chosen().length;
    hint.hidden = !comparison.hidden;
    if (comparison.hidden || !needed) return;
    const all = items(), chips = all.slice(0, CHIPS).map((item) => { const chip = element("button", { type: "button", class: "chip", title: `Untick ${item.members.length > 1 ? item.label : item.members[0]}`, onclick: () => { for (const name of item.members) ticked.delete(name); view.ticked(); } }, named(item)); pointAt(chip, () => item.label); return chip; });
    key.replaceChildren(...chips, all.length > CHIPS ? element("span", { class: "chip" }, `and ${all.length - CHIPS} more`) : "");
    const count = chosen().length;
    reports.textContent = count > 1 ? `Report of these ${count} runs` : "Its report";
    reports.href = `report?${new URLSearchParams(asked(chosen()))}`;
    reports.hidden = count > 200;
    apart.hidden = count < 2;
    if (apart.open) differences();
    figure.draw();
  }
  function differences() { apart.lastElementChild.replaceChildren(settingsDiff(items())); }
  apart.addEventListener("toggle", () => { if (apart.open) differences(); });
  const view = {
    node: element("div", {}, title, answer.node, within, comparison, element("div", { class: "controls", role: "search" }, search, which, grouping, hint), ordered, scroll, empty, element("p", {}, more)),
    update(changed) {
      for (const name of lineOf.keys()) if (!rows.has(name) && !/^(group|alone) /.test(name)) lineOf.delete(name);
      arrange(false);
      redraw(changed.some((row) => ticked.has(row.name)));
    },
    ticked() { remember(); arrange(true); redraw(true); },
    fold(group) { unfolded.has(group) ? unfolded.delete(group) : unfolded.add(group); arrange(true); },
  };
  // Up and down lead from row to row in the same place.
  body.addEventListener("keydown", (event) => {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key], row = event.target.closest("tr");
    const next = step && row?.[step]?.querySelector(event.target.matches("input") ? "input" : "a, button");
    if (next) { event.preventDefault(); next.focus(); }
  });
  arrange(true);
  redraw(true);
  return view;
}

// A row for each setting that differs: a column for each run, or of many the values and how many have them.
function settingsDiff(items) {
  const of = (item, key) => [...new Set(item.members.map((name) => plainly(setting(name, key))))];
  items = items.filter((item) => settings.runs[item.members[0]]); // of a damaged run nobody knows them
  const keys = settings.other.filter((key) => new Set(items.flatMap((item) => of(item, key))).size > 1);
  if (!keys.length) return element("p", { class: "about" }, "No setting differs.");
  const counted = (key) => { const all = items.flatMap((item) => of(item, key)), each = [...new Set(all)]; return list(each.map((value) => `${value} (${all.filter((other) => other === value).length})`), 12); };
  const cells = items.length <= 8 ? items.map((item) => ({ name: item.label, text: (key) => of(item, key).join(", ") })) : [{ name: "values (how many have them)", text: counted }];
  return table("Settings that differ", [{ name: "setting", text: String }, ...cells], keys);
}
