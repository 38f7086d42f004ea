// ---- measures beside accuracy ----
const MEASURES = { accuracy: "accuracy", balanced_accuracy: "balanced accuracy", auroc: "AUROC", ece: "ECE", loss: "loss" };
const title = (measure) => MEASURES[measure][0].toUpperCase() + MEASURES[measure].slice(1);

function measures() {
  const found = groups.slice().sort((a, b) => (b.rank?.mean ?? -1) - (a.rank?.mean ?? -1)).flatMap((group) => Object.entries(group.detailed || {}).map(([model, parts]) => ({ group, model, parts })));
  if (!found.length) return null;
  const names = Object.keys(MEASURES).filter((name) => found.some(({ parts }) => parts.pooled[name] || parts.clients[name]));
  const filled = (of) => Object.values(of).some((one) => known(one?.mean));
  const rows = found.flatMap(({ group, model, parts }) => [{ group, model, how: "all test images together", of: parts.pooled }, { group, model, how: "mean over clients", of: Object.fromEntries(Object.entries(parts.clients).map(([name, by]) => [name, by.mean])) }]).filter((row) => filled(row.of));
  const column = (name) => ({ name: MEASURES[name] + (name === "loss" ? "" : ", %"), number: true, best: ["loss", "ece"].includes(name) ? "low" : "high", text: (row) => (name === "loss" ? withSpread(row.of[name], PLAIN) : percents(row.of[name])), value: (row) => row.of[name]?.mean ?? null, deviation: (row) => row.of[name]?.std ?? null });
  const models = [...new Set(rows.map((row) => row.model))], board = element("div");
  const list = (model) => board.replaceChildren(table(`Measures beside accuracy, ${modelWords[model]}`, [{ name: "method", text: (row) => row.group.label, show: (row) => named(row.group) }, { name: "over", text: (row) => row.how }, ...names.map(column)], rows.filter((row) => row.model === model), { id: "measure-table" }));
  list(models[0]);
  const holder = element("div");
  let number = 0;
  const options = Object.fromEntries(found.map(({ group, model }, at) => [String(at), `${group.label}, ${modelWords[model]}`]));
  const show = () => holder.replaceChildren(...byClass(found[number], options[number]).flat(2).filter(Boolean));
  show();
  return [element("p", {}, "After the last round. Balanced accuracy: the mean sensitivity of the classes. AUROC: one class against the rest, mean over classes. ECE: how far confidence is from accuracy; less is better."),
    element("div", { class: "controls" }, selection("Model", Object.fromEntries(models.map((model) => [model, modelWords[model]])), models[0], list)), board,
    element("h3", {}, "By class"), element("div", { class: "controls" }, selection("Method and model", options, "0", (value) => { number = Number(value); show(); })), holder];
}

function byClass({ group, parts, model }, called) {
  const labels = parts.names, size = (label) => parts.confusion?.[label].reduce((sum, count) => sum + count, 0) ?? null;
  const share = (name, key) => ({ name, number: true, text: (label) => percents(parts.classes[key][label]), value: (label) => parts.classes[key][label]?.mean ?? null, deviation: (label) => parts.classes[key][label]?.std ?? null });
  const columns = [{ name: "class", text: (label) => labels[label], value: (label) => label }, { name: "test images", number: true, text: (label) => plainly(size(label)), value: size }, share("sensitivity, %", "sensitivity"), share("specificity, %", "specificity"), share("AUROC, %", "auroc")];
  const shares = parts.confusion?.map((row, label) => row.map((count) => (size(label) ? count / size(label) : null)));
  const confused = shares && shares.flatMap((row, truth) => row.map((value, predicted) => [value, truth, predicted])).filter(([value, truth, predicted]) => truth !== predicted && value > 0).sort((a, b) => b[0] - a[0])[0];
  const said = confused ? `Most often mistaken: ${labels[confused[1]]} for ${labels[confused[2]]}, ${percent(confused[0])} % of its images.` : "No image was mistaken.";
  return [table(`Classes: ${called}`, columns, labels.map((_, label) => label)),
    shares && element("figure", { class: "confusion" }, heat(() => `Confusion of ${called}: share of each true class in %. ${said}`, labels, labels, shares, "true class", "predicted", `confusion, ${called}`).frame,
      element("figcaption", {}, `Share of each true class in %, over all test images${group.complete > 1 ? " and seeds" : ""}. ${said}`)),
    ...clientClasses(group, model, called)];
}

// Who fails at which class: sensitivity of single clients, of the group's first run.
function clientClasses(group, model, called) {
  const first = runs[group.runs[0]], one = first.detailed?.[model];
  if (!one?.sensitivity.length) return [];
  const about = `Sensitivity of ${called} by client and class, in %`, columns = [{ name: "client", text: (at) => one.drawn[at], value: (at) => at }, ...one.names.map((label, number) => ({ name: label, number: true, text: (at) => percent(one.sensitivity[at][number]), value: (at) => one.sensitivity[at][number] }))];
  return [element("details", {}, element("summary", {}, `By client and class${group.runs.length > 1 ? `, seed ${first.seed}` : ""}`), element("figure", {}, heat(() => `${about}.`, one.drawn, one.names, one.sensitivity, "client", "class", `sensitivity by client, ${called}`).frame,
    element("figcaption", {}, `${about}. Empty: the client has no test image of that class.`)), table(about, columns, one.drawn.map((_, at) => at)))];
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
// Settings that methods differ in, and below, for who asks, all others.
function configuration() {
  const { common, other, each } = report.settings;
  const values = (key, group) => [...new Set(group.runs.map((number) => plainly(each[number][key])))].join(", ");
  const differ = other.filter((key) => new Set(groups.map((group) => values(key, group))).size > 1), own = (key) => /^algorithm(\.|$)/.test(key);
  const columns = [{ name: "setting", text: String }, ...groups.map((group) => ({ name: group.label, text: (key) => values(key, group) }))];
  const among = other.filter((key) => !differ.includes(key)).map((key) => [key, groups.length ? values(key, groups[0]) : "–"]).filter(([, value]) => value !== "–");
  const main = differ.filter((key) => !own(key)), theirs = differ.filter(own);
  const folded = (title, ...content) => element("details", {}, element("summary", {}, title), content);
  return [groups.length > 1 && main.length === 0 && element("p", {}, "Only the method differs."), main.length > 0 && [element("h3", {}, "What differs"), table("Settings that differ between methods", columns, main)],
    among.length > 0 && element("p", { class: "about" }, "Within each method: ", among.map(([key, value]) => `${key} ${value}`).join("; "), "."),
    theirs.length > 0 && folded(`Settings of the methods (${theirs.length})`, table("Settings of the methods", columns, theirs)),
    folded(`${runs.length > 1 ? "The same in all runs" : "All settings"} (${Object.keys(common).length})`, facts(Object.entries(common))), folded("Passports", passports())];
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
  return rows.length ? element("details", {}, element("summary", {}, "Python, libraries and machine"), apart(rows)) : null;
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
  const sections = [["comparison-section", several ? "Comparison" : "Result", comparison], ["clients", "Clients", clients], ["measures", "More measures", measures], ["bytes", "Bytes", traffic], ["split", "Who owns what", splits],
    ["privacy", "Privacy", privacy], ["audits", "Audits", audits], ["pictures", "What models look at", maps], ["sub-models", "Sub-models", subModels], ["runs", "Runs", everyRun],
    ["configuration", "Configuration", configuration], ["environment", "Environment", environment]].map(([id, title, build]) => [id, title, attempted(build)]).filter(([, , content]) => content);
  document.body.prepend(element("div", { class: "sheet" }, element("a", { class: "skip", href: "#main" }, "To the results"),
    element("header", { class: "head" }, element("span", {}, element("strong", {}, "FedLens report"), ` · ${report.title}`), theme()),
    element("main", { id: "main" }, answer(), curves(), element("nav", { "aria-label": "Sections" }, element("ul", {}, sections.map(([id, title]) => element("li", {}, element("a", { href: `#${id}` }, title))))),
      sections.map(([id, title, content]) => element("section", { id, "aria-labelledby": `${id}-title` }, element("h2", { id: `${id}-title` }, title), content))),
    element("footer", {}, `Made by FedLens ${report.version} from ${runs.length} run${runs.length === 1 ? "" : "s"}. All numbers are in this file, as JSON in the element “report”.`)));
}
page();
