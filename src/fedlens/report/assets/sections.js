// ---- the answer ----
const { groups, runs } = report;
const groupOf = new Map(groups.flatMap((group) => group.runs.map((number) => [number, group])));
const modelOf = (group, measure) => (measure === "personal" ? group.personal : measure); // which of its personal models

function answer() {
  return element("header", { id: "answer" },
    element("h1", {}, report.headline + "."),
    report.warnings.map((sentence) => element("p", { class: "warning", role: "note" }, element("b", {}, "Attention:"), sentence)),
    report.listed ? element("ul", { class: "lead" }, report.sentences.map((sentence) => element("li", {}, sentence)))
      : element("p", { class: "lead" }, report.sentences.join(" ")));
}

// ---- learning curves ----
const AXES = {
  round: ["rounds", (value) => String(Math.round(value))],
  bytes: ["bytes sent, up and down", size],
  seconds: ["seconds of running", duration],
};

function curves() {
  const shown = groups.filter((group) => Object.keys(group.curves).length);
  if (!shown.length) return null;
  const hidden = new Set(), holder = element("div"), measures = report.measures;
  // Fine-tuning ends in one point: where that is all, the curves that led there are shown first.
  const drawable = (name) => groups.some((group) => group.curves[modelOf(group, name)]?.round.length > 1);
  let measure = [report.measure, ...Object.keys(measures)].find((name) => name in measures && drawable(name)) || Object.keys(measures)[0], axis = "round", line = null;
  const curve = (group) => group.curves[modelOf(group, measure)];
  const visible = () => shown.filter((group) => curve(group) && !hidden.has(group)).map((group) => ({
    group, xs: curve(group)[axis], ys: curve(group).accuracy, low: curve(group).low, high: curve(group).high, unfinished: !group.complete }));
  const about = () => `Accuracy over ${AXES[axis][0]}, ${measures[measure]}. ` + visible().map((one) => `${one.group.label} ends at ${percent(one.ys[one.ys.length - 1])} %`).join("; ");
  function draw() {
    line = lines(about, AXES[axis][0], AXES[axis][1], `accuracy of ${measures[measure].split(",")[0]}, %`, visible);
    holder.replaceChildren(line.frame);
    values.replaceChildren(valueTable());
  }
  const chips = shown.map((group) => element("button", { type: "button", class: "chip", "aria-pressed": true, onclick: (event) => {
    hidden.has(group) ? hidden.delete(group) : hidden.add(group);
    event.currentTarget.setAttribute("aria-pressed", !hidden.has(group));
    line.redraw();
  } }, swatch(group), group.label + (group.complete ? "" : " (unfinished)")));
  function valueTable() {
    const having = shown.filter(curve);
    const at = having.map((group) => new Map(curve(group).round.map((round, number) => [round, curve(group).accuracy[number]])));
    const rounds = [...new Set(at.flatMap((by) => [...by.keys()]))].sort((a, b) => a - b);
    return table(`Accuracy in % by round, ${measures[measure]}`, [{ name: "round", text: String, value: (round) => round, number: true },
      ...having.map((group, number) => ({ name: group.label, text: (round) => percent(at[number].get(round), 2), value: (round) => at[number].get(round) ?? null, number: true }))], rounds);
  }
  const values = element("div");
  const bands = shown.some((group) => group.runs.length > 1);
  draw();
  return element("figure", { id: "curves" },
    element("div", { class: "controls" }, choice("Over what", { round: "Rounds", bytes: "Bytes", seconds: "Seconds" }, axis, (value) => { axis = value; draw(); }),
      selection("Evaluated on", measures, measure, (value) => { measure = value; draw(); })),
    shown.length > 1 && element("div", { class: "chips", role: "group", "aria-label": "Methods shown" }, chips),
    holder,
    element("figcaption", {}, "Accuracy at each evaluation; point at the chart, or focus it and use the arrow keys, for values.",
      bands && " Lines are means over seeds, bands reach from the lowest to the highest."),
    element("details", {}, element("summary", {}, "The same as a table"), values));
}

// ---- the comparison ----
function comparison() {
  if (!groups.length) return null;
  const models = Object.keys(report.measures).filter((name) => groups.some((group) => group.accuracy[modelOf(group, name)]));
  const split = report.arenas > 1 ? [{ name: "split", text: (group) => group.arena }] : [];
  const best = report.arenas > 1 ? () => null : (which) => which;
  const share = (of, name, which) => ({ name, number: true, best: best(which), text: (group) => percents(of(group)), value: (group) => of(group)?.mean ?? null, deviation: (group) => of(group)?.std ?? null });
  const cost = (name, key, units) => ({ name, number: true, best: best("low"), text: (group) => withSpread(group[key], units), value: (group) => group[key].mean, deviation: (group) => group[key].std });
  const model = fairModel();
  const columns = [{ name: "method", text: (group) => group.label + (group.complete ? "" : " (unfinished)"), show: (group) => [...named(group), group.complete ? "" : " (unfinished)"] }, ...split,
    { name: "runs", number: true, text: (group) => String(group.runs.length), value: (group) => group.runs.length },
    ...models.map((model) => share((group) => group.accuracy[modelOf(group, model)], ["global", "personal"].includes(model) ? `${model} model, %` : `${model.replace("personal", "personal model,")}, %`, "high")),
    model && share((group) => group.fairness[modelOf(group, model)]?.worst_decile, "worst tenth, %", "high"),
    { name: "rounds", number: true, text: (group) => withSpread(group.rounds, PLAIN), value: (group) => group.rounds.mean },
    cost("traffic", "bytes", SIZES), cost("time", "seconds", TIMES)].filter(Boolean);
  const caption = models.filter((name) => name !== "global").length
    ? `Global model: on the pooled test images. The others: personal models, each on its client's test images, mean over clients${report.personal_models ? `; personal model and worst tenth of clients: ${report.personal_models}` : model ? `; worst tenth of clients: ${model}` : ""}.` : "";
  const seeds = groups.some((group) => group.complete > 1) ? " Means over seeds ± sample deviation." : "";
  const accuracy = (group) => group.accuracy[modelOf(group, report.measure)]?.mean ?? -1;
  const rows = groups.slice().sort((a, b) => accuracy(b) - accuracy(a));
  return [element("p", {}, `Accuracy and what it cost, after the last round${report.arenas > 1 ? "" : "; the best of each column is bold"}.`, seeds), table("Comparison of methods", columns, rows, { id: "comparison", caption })];
}

function fairModel() {
  const models = Object.keys(report.measures).filter((name) => name !== "global");
  return models.find((name) => groups.every((group) => group.fairness[modelOf(group, name)])) || models.find((name) => groups.some((group) => group.fairness[modelOf(group, name)]));
}

function everyRun() {
  const models = Object.keys(report.measures).filter((name) => name !== "personal");
  const value = (model) => (run) => run.curves?.[model]?.accuracy.slice(-1)[0] ?? null;
  const own = (run) => (run.bytes ? Object.entries(run.bytes).filter(([kind]) => !kind.startsWith("evaluation")).reduce((sum, [, part]) => sum + part.payload + part.header, 0) : null);
  const columns = [{ name: "run", text: (run) => run.name }, { name: "method", text: (run) => run.method },
    { name: "state", text: (run) => run.state, show: (run) => element("span", { class: run.state === "unfinished" ? "unfinished-state" : run.state }, run.state) },
    { name: "seed", number: true, text: (run) => plainly(run.seed), value: (run) => run.seed },
    ...models.map((model) => ({ name: `${model}, %`, number: true, text: (run) => percent(value(model)(run), 2), value: value(model) })),
    { name: "rounds", number: true, text: (run) => plainly(run.rounds), value: (run) => run.rounds ?? null },
    { name: "traffic", number: true, text: (run) => size(own(run)), value: own }, { name: "time", number: true, text: (run) => duration(run.seconds), value: (run) => run.seconds ?? null },
    runs.some((run) => run.trouble) && { name: "what is wrong", text: (run) => run.trouble, wide: true }].filter(Boolean);
  return table("Every run", columns, runs, { id: "every-run" });
}

// ---- clients ----
function clients() {
  const found = (number, model) => groupOf.has(number) && runs[number].evaluations[modelOf(groupOf.get(number), model)];
  const models = Object.keys(report.measures).filter((name) => runs.some((_, number) => found(number, name)));
  if (!models.length) return null;
  const holder = element("div"), fair = element("div");
  function show(model) {
    const rows = runs.map((run, number) => ({ run, number })).filter(({ number }) => found(number, model)).map(({ run, number }) => ({
      ...found(number, model), name: groupOf.get(number).runs.length > 1 ? `${groupOf.get(number).label}, seed ${run.seed}` : groupOf.get(number).label, group: groupOf.get(number), split: run.split ?? run.name }));
    const about = () => `Accuracy of single clients, ${report.measures[model]}. ` + list(rows.map((row) => `${row.name}: mean ${percent(row.mean)} %, worst tenth ${percent(row.worst_decile)} %`), 40);
    holder.replaceChildren(strips(about, rows).frame);
    const of = (group) => group.fairness[modelOf(group, model)];
    const column = (name, key, which, write) => ({ name, number: true, best: which, text: (group) => write(of(group)[key]), value: (group) => of(group)[key].mean, deviation: (group) => of(group)[key].std });
    const which = model === "personal" ? [{ name: "evaluated on", text: (group) => group.personal }] : [];
    fair.replaceChildren(table(`Fairness, ${report.measures[model]}`, [{ name: "method", text: (group) => group.label, show: named }, ...which, column("mean, %", "mean", "high", percents), column("std over clients, points", "std", "low", percents),
      column("worst tenth, %", "worst_decile", "high", percents), column("Jain's index", "jain", "high", (found) => found.mean.toFixed(3))], groups.filter(of)));
  }
  const some = runs.some((run) => Object.values(run.evaluations || {}).some((one) => one.count > one.clients.length));
  show(models[0]);
  return [element("p", {}, "Each dot is a client: the accuracy of its personal model on its own test images. The solid mark is the mean, the dashed one the mean of the worst tenth. Pointing at a client shows it in every run on the same split."),
    element("figure", {}, element("div", { class: "controls" }, selection("Evaluated on", Object.fromEntries(models.map((name) => [name, report.measures[name]])), models[0], show)), holder,
      some && element("figcaption", {}, "Of very many clients only some are drawn, evenly by number; means and fairness are of all.")), fair];
}

// ---- bytes ----
const KINDS = { download: "k0", upload: "k1", shared: "k2" };
const kindMark = (kind) => KINDS[kind] || (kind.startsWith("evaluation") ? "grey" : "k3");

function traffic() {
  const having = groups.filter((group) => Object.keys(group.kinds).length);
  if (!having.length) return null;
  const kinds = [...new Set(having.flatMap((group) => Object.keys(group.kinds)))].sort((a, b) => a.startsWith("evaluation") - b.startsWith("evaluation") || a.localeCompare(b));
  const own = kinds.filter((kind) => !kind.startsWith("evaluation"));
  const rows = having.map((group) => ({ name: group.label, parts: Object.fromEntries(own.filter((kind) => group.kinds[kind]).map((kind) => [kind, group.kinds[kind].mean])) }));
  const marks = Object.fromEntries(kinds.map((kind) => [kind, kindMark(kind)]));
  const key = own.map((kind) => element("span", { class: "chip" }, drawn("svg", { width: 12, height: 12, "aria-hidden": "true" }, drawn("rect", { class: `part ${marks[kind]}`, width: 12, height: 12, rx: 2 })), kind));
  const about = () => "Bytes by kind of message. " + rows.map((row) => `${row.name}: ${Object.entries(row.parts).map(([kind, value]) => `${kind} ${size(value)}`).join(", ")}`).join("; ");
  const columns = [{ name: "method", text: (group) => group.label, show: named },
    ...kinds.map((kind) => ({ name: kind, number: true, text: (group) => size(group.kinds[kind]?.mean), value: (group) => group.kinds[kind]?.mean ?? null, deviation: (group) => group.kinds[kind]?.std ?? null })),
    { name: "of it headers", number: true, text: (group) => size(group.headers.mean), value: (group) => group.headers.mean }];
  const deployed = runs.filter((run) => run.flower);
  return [element("p", {}, "What crossed between server and clients in a whole run, as the ledger booked it. Measurements (evaluation) are no part of a method and not in the bars."),
    element("figure", {}, element("div", { class: "chips" }, key), bars(about, rows, marks, size).frame), table("Bytes by kind of message", columns, having),
    deployed.length > 0 && overFlower(deployed)];
}

function overFlower(deployed) {
  const total = (run, which) => Object.entries(run.bytes).filter(([kind]) => which(kind)).reduce((sum, [, part]) => sum + part.payload + part.header, 0);
  const isUp = (kind) => kind.endsWith("upload");
  const moved = (way) => (run) => run.flower.moved?.[way] ?? null;
  const column = (name, value) => ({ name, number: true, text: (run) => size(value(run)), value });
  return [element("h3", {}, "Over real machines"), element("p", { class: "about" }, "The ledger's bytes, measurements included, beside those that Flower itself counted",
    deployed.some((run) => !run.flower.moved) ? "; where it says –, the answer of fedlens deploy status --json was not kept in the run as flower.json." : "."),
    table("The ledger's bytes beside Flower's", [{ name: "run", text: (run) => run.name }, column("up, ledger", (run) => total(run, isUp)), column("into Flower's server", moved("in")),
      column("down, ledger", (run) => total(run, (kind) => !isUp(kind))), column("out of it", moved("out")), { name: "nodes' own data", text: (run) => (run.flower.own_data ? "yes" : "no") }], deployed)];
}

// ---- who owns what ----
function splits() {
  if (!report.splits.length) return null;
  return report.splits.slice(0, 6).map((split) => {
    const about = `${split.data}: ${split.total.clients} clients with ${split.total.smallest} to ${split.total.largest} training images, ${split.total.classes.toFixed(1)} classes each on average`;
    const few = split.clients.length < split.total.clients ? `; ${split.clients.length} of them drawn` : "";
    return element("figure", {}, bubbles(() => `Images by client and class. ${about}.`, split).frame,
      element("figcaption", {}, `${about}${few}. Split ${split.hash ? split.hash.slice(0, 16) : "unknown"}`, report.splits.length > 1 && `, of ${list(split.runs, 4)}`, ".", split.notes.map((note) => ` ${note}.`)));
  }).concat(report.splits.length > 6 ? [element("p", {}, `${report.splits.length - 6} more splits are not drawn.`)] : []);
}

// ---- privacy ----
function privacy() {
  const stated = new Map();
  runs.forEach((run) => { if (run.privacy) { const key = JSON.stringify({ ...run.privacy, rounds: 0 }); stated.set(key, [...(stated.get(key) || []), run]); } });
  if (!stated.size) return null;
  const silent = runs.filter((run) => run.state !== "corrupt" && !run.privacy).map((run) => run.name);
  const cards = [...stated.values()].map((same) => {
    const { statements, updates_as_they_are: plain, answers_as_they_are: answers, discloses } = same[0].privacy;
    const open = Object.entries(answers || {}).map(([name, parts]) => `${name}: ${parts.join(", ")}`);
    return element("div", { class: "card" }, element("h3", {}, list(same.map((run) => run.name))),
      statements.map((one) => facts([["release", one.release], ["mechanism", one.mechanism], ["unit of protection", one.unit], ["adjacency", one.adjacency], ["sensitivity", one.sensitivity],
        ["ε", known(one.epsilon) ? plainly(one.epsilon) : "nothing is promised"], ["δ", one.delta], ["proven as stated", one.holds ? "yes" : "no"], ["because", one.because || "–"], ["randomness", one.randomness],
        ["not covered", one.not_covered.join("; ") || "–"], ...Object.entries(one.details || {})], false)),
      plain && plain.length > 0 && element("p", { class: "about" }, `Model updates leave as they are in: ${plain.join(", ")}.`),
      open.length > 0 && element("p", { class: "about" }, `Answers that leave as they are: ${open.join("; ")}.`),
      Object.entries(discloses || {}).map(([name, said]) => element("p", { class: "about" }, `${name}: ${said}.`)));
  });
  return [cards, silent.length > 0 && element("p", {}, `No statement: ${list(silent)}. Their updates leave as they are.`)];
}

// ---- audits ----
function audits() {
  const looked = runs.filter((run) => run.audit);
  if (!looked.length) return null;
  const measure = (one) => (one ? `${+one.value.toFixed(3)} [${+one.low.toFixed(2)}, ${+one.high.toFixed(2)}]` : "–");
  const rows = looked.flatMap((run) => run.audit.verdicts.flatMap((verdict) => Object.keys(verdict.found).map((name) => ({ run: run.name, verdict, name }))));
  const column = (name, kind) => ({ name, number: true, text: (row) => measure(row.verdict[kind][row.name]), value: (row) => row.verdict[kind][row.name]?.value ?? null });
  return [element("p", {}, "What attacks make of what the server received, between two references."),
    element("ul", {}, Object.entries(report.audit_legend).map(([name, meaning]) => element("li", {}, element("strong", {}, name), `: ${meaning}.`))),
    looked.map((run) => [element("h3", {}, run.name), run.audit.verdicts.map((verdict) => element("div", { class: "card" }, element("h4", {}, verdict.attack),
      element("p", { class: "about" }, verdict.threat), element("p", {}, verdict.verdict), intervals(() => `${verdict.attack}, ${verdict.decisive}: ${verdict.verdict}`, verdict).frame, verdict.notes.map((note) => element("p", { class: "about" }, note)))),
      Object.entries(run.audit.skipped || {}).map(([name, why]) => element("p", { class: "about" }, `${name} was not tried: ${why}.`))]),
    table("Audits", [{ name: "run", text: (row) => row.run }, { name: "attack", text: (row) => row.verdict.attack }, { name: "measure", text: (row) => row.name }, column("found", "found"), column("by chance", "chance"), column("without defence", "undefended")], rows),
    gallery("audit")];
}

// ---- pictures ----
function gallery(kind) {
  const all = runs.flatMap((run) => (run.pictures || []).filter((picture) => picture.kind === kind));
  if (!all.length) return null;
  return element("div", { class: "pictures" }, all.map((picture) => {
    const image = () => element("img", { src: picture.source, alt: picture.about, width: picture.width, height: picture.height });
    const larger = element("button", { type: "button", "aria-label": `Enlarge: ${picture.about}`, onclick: () => {
      const dialog = element("dialog", { "aria-label": picture.about, onclick: () => dialog.close(), onclose: () => dialog.remove() }, image(), element("button", { class: "plain", type: "button" }, "Close"));
      document.body.append(dialog);
      dialog.showModal();
    } }, image());
    return element("figure", {}, larger, element("figcaption", {}, picture.about));
  }));
}

function maps() {
  const found = gallery("map");
  return found && [found, report.left_out.length > 0 && element("p", {}, `Left out to keep this file small: ${list(report.left_out)}.`)];
}

// ---- sub-models ----
function subModels() {
  const rows = runs.flatMap((run) => (run.sub_models || []).map((one) => ({ run: run.name, ...one })));
  if (!rows.length) return null;
  const share = (name, key) => ({ name, number: true, text: (row) => percent(row[key]), value: (row) => row[key] });
  return [element("p", {}, "The smaller network that each client selected, of the whole one: its share of the weights of convolutions that are kept and sent, of operations, of parameters, of an upload's bytes with controls and headers",
      report.timed && ", and of the time of a pass", "; then accuracies on the images that the selection was rewarded on. Where there is none, nothing was rewarded: another rule selects, or these images are of one class, and every layer keeps the same share. ",
      report.timed || "Latency is measured with fedlens report --latency."),
    table("Sub-models by client", [{ name: "run", text: (row) => row.run }, { name: "client", text: (row) => row.name, value: (row) => row.client }, share("keep ratio, %", "sent"), share("FLOPs, %", "flops"),
      share("parameters, %", "parameters"), share("bytes sent, %", "bytes"), ...(report.timed ? [share("latency, %", "latency")] : []), share("accuracy, %", "accuracy"), share("whole network, %", "dense")], rows)];
}

// ---- settings, passports, environment ----
function configuration() {
  const { common, other, each } = report.settings;
  const values = (key, group) => [...new Set(group.runs.map((number) => plainly(each[number][key])))].join(", ");
  return [other.length > 0 && element("h3", {}, "What differs"),
    other.length > 0 && table("Settings that differ between runs", [{ name: "setting", text: String }, ...groups.map((group) => ({ name: group.label, text: (key) => values(key, group) }))], other),
    element("h3", {}, runs.length > 1 ? "The same in all runs" : "Settings"), facts(Object.entries(common)),
    element("h3", {}, "Passports"), passports()];
}

function apart(rows) { // [{run, facts: {name: value}}] -> what all have in common, and a table of the rest
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.facts)))];
  const differ = names.filter((name) => new Set(rows.map((row) => JSON.stringify(row.facts[name] ?? null))).size > 1);
  const same = names.filter((name) => !differ.includes(name)).map((name) => [name, rows[0].facts[name]]);
  return [same.length > 0 && facts(same), differ.length > 0 && table("What differs between runs", [{ name: "run", text: (row) => row.run }, ...differ.map((name) => ({ name, text: (row) => plainly(row.facts[name]) }))], rows)];
}

function passports() {
  return apart(runs.filter((run) => run.passport).map(({ name, passport }) => ({ run: name, facts: {
    configuration: passport.config_hash, split: passport.split_hash && passport.split_hash.slice(0, 16), seed: passport.seed, data: passport.data.name, "data from": passport.data.origin, images: passport.data.images,
    "data, SHA-256": passport.data.sha256 && passport.data.sha256.slice(0, 16), "FedLens": passport.code.version, code: passport.code.sha256, engine: passport.engine, workers: passport.workers, device: passport.device_name, precision: passport.precision,
    ...(passport.auxiliary ? { "public data": passport.auxiliary.name } : {}) } })));
}

function environment() {
  const rows = runs.filter((run) => run.passport).map(({ name, passport }) => ({ run: name, facts: { Python: passport.python, ...passport.libraries, ...passport.machine, "threads per process": passport.threads_per_process } }));
  return rows.length ? apart(rows) : null;
}

// ---- the page ----
function theme() {
  const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const button = element("button", { type: "button", class: "plain", id: "theme", onclick: () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    name();
  } });
  const name = () => (button.textContent = dark() ? "Light page" : "Dark page");
  name();
  return button;
}

// A file of a run that is JSON, but not what it should be, costs its section and not the page.
function attempted(build) {
  try {
    return build();
  } catch (error) {
    return element("p", { class: "warning", role: "note" }, element("b", {}, "Attention:"), `this cannot be shown, as a file of a run is damaged (${error.message}).`);
  }
}

function page() {
  const several = groups.length > 1;
  const sections = [["comparison-section", several ? "Comparison" : "Result", comparison], ["clients", "Clients", clients], ["bytes", "Bytes", traffic], ["split", "Who owns what", splits],
    ["privacy", "Privacy", privacy], ["audits", "Audits", audits], ["pictures", "What models look at", maps], ["sub-models", "Sub-models", subModels], ["runs", "Runs", everyRun],
    ["configuration", "Configuration", configuration], ["environment", "Environment", environment]].map(([id, title, build]) => [id, title, attempted(build)]).filter(([, , content]) => content);
  document.body.prepend(element("div", { class: "sheet" }, element("a", { class: "skip", href: "#main" }, "To the results"),
    element("div", { class: "head" }, element("span", {}, element("strong", {}, "FedLens report"), ` · ${report.title}`), theme()),
    element("main", { id: "main" }, answer(), curves(), element("nav", { "aria-label": "Sections" }, element("ul", {}, sections.map(([id, title]) => element("li", {}, element("a", { href: `#${id}` }, title))))),
      sections.map(([id, title, content]) => element("section", { id, "aria-labelledby": `${id}-title` }, element("h2", { id: `${id}-title` }, title), content))),
    element("footer", {}, `Made by FedLens ${report.version} from ${runs.length} run${runs.length === 1 ? "" : "s"}. All numbers are in this file, as JSON in the element “report”.`)));
}
page();
