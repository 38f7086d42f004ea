// ---- the comparison ----
function comparison() {
  if (!groups.length) return null;
  const models = Object.keys(report.measures).filter((name) => groups.some((group) => group.accuracy[modelOf(group, name)]));
  const split = report.arenas > 1 ? [{ name: "split", text: (group) => group.arena }] : [];
  const best = report.arenas > 1 ? () => null : (which) => which;
  const share = (of, name, which) => ({ name, number: true, best: best(which), text: (group) => percents(of(group)), value: (group) => of(group)?.mean ?? null, deviation: (group) => of(group)?.std ?? null });
  const cost = (name, key, units) => ({ name, number: true, best: best("low"), text: (group) => withSpread(group[key], units), value: (group) => group[key].mean, deviation: (group) => group[key].std });
  const model = fairModel(), ranked = groups.filter((group) => group.rank), last = Math.max(1, ...ranked.map((group) => group.rank.last)), many = last > 1;
  const chance = (over) => ({ name: `p ${over}`, number: true, text: (group) => (!group.rank ? "–" : group.rank.is_best ? "best" : group.rank.p_words[over]), value: (group) => group.rank?.[`p_${over}`] ?? null });
  const chances = ["seeds", "clients"].filter((over) => ranked.some((group) => known(group.rank[`p_${over}`]))).map(chance);
  const accuracies = models.map((model) => [model, share((group) => group.accuracy[modelOf(group, model)], ["global", "personal"].includes(model) ? `${model} model${model === "global" && many ? " (last round)" : ""}, %` : `${model.replace("personal", "personal model,")}, %`, "high")]);
  const top = report.arenas > 1 || !ranked.length ? {} : { top: (group) => Boolean(group.rank?.is_best || group.rank?.is_close) }; // what the headline cannot tell apart is marked alike
  const first = (many ? [share((group) => group.rank, `global model (${report.averaged}), %`, "high")] : accuracies.filter(([name]) => name === report.measure).map(([, column]) => column)).map((column) => ({ ...column, ...top }));
  const columns = [{ name: "method", text: (group) => group.label + (group.complete ? "" : " (unfinished)"), show: (group) => [...named(group), group.complete ? "" : " (unfinished)"] }, ...split,
    { name: "runs", number: true, text: (group) => String(group.runs.length), value: (group) => group.runs.length },
    ...first, ...chances, { name: "besides updates", text: (group) => (group.shares === "updates only" ? "–" : group.shares) },
    cost("traffic", "bytes", SIZES), cost("time", "seconds", TIMES),
    ...accuracies.filter(([name]) => many || name !== report.measure).map(([, column]) => column),
    model && share((group) => group.fairness[modelOf(group, model)]?.worst_decile, "worst tenth, %", "high"),
    { name: "rounds", number: true, text: (group) => withSpread(group.rounds, PLAIN), value: (group) => group.rounds.mean },
    { name: "preparatory", number: true, text: (group) => (group.preparation.rounds ? plainly(group.preparation.rounds) : "–"), value: (group) => group.preparation.rounds }].filter(Boolean);
  const caption = models.filter((name) => name !== "global").length
    ? `Global model: on the pooled test images. The others: personal models, each on its client's test images, mean over clients${report.personal_models ? `; personal model and worst tenth of clients: ${report.personal_models}` : model ? `; worst tenth of clients: ${model}` : ""}.` : "";
  const seeds = groups.some((group) => group.complete > 1) ? " Means over seeds ± sample deviation." : "";
  const tests = [ranked.some((group) => known(group.rank.p_seeds)) && "p seeds: paired t-test over seeds.", ranked.some((group) => known(group.rank.p_clients)) && "p clients: Wilcoxon's signed-rank test over pairs of seed and client, which speaks of these trained models and not of other seeds.",
    ranked.some((group) => known(group.rank.p_seeds ?? group.rank.p_clients)) && "p is against the best, after Holm. fedlens compare makes the same tests."].filter(Boolean).join(" ");
  const accuracy = (group) => group.rank?.mean ?? group.accuracy[modelOf(group, report.measure)]?.mean - 1;
  const rows = groups.slice().sort((a, b) => accuracy(b) - accuracy(a));
  return [element("p", {}, `Accuracy and what it cost${many ? "" : ", after the last round"}${report.arenas > 1 ? "" : `; the best of each column is bold${ranked.some((group) => group.rank.is_close) ? `, and of ${first[0].name.split(",")[0]} all that cannot be told from it` : ""}`}.`, seeds), table("Comparison of methods", columns, rows, { id: "comparison", caption: [caption, tests].filter(Boolean).join(" ") })];
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
    ...models.map((model) => ({ name: `${model}${averages(model) > 1 ? " (last round)" : ""}, %`, number: true, text: (run) => percent(value(model)(run), 2), value: value(model) })),
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
  const more = [...new Set(runs.flatMap((run) => Object.values(run.evaluations || {}).flatMap((one) => Object.keys(one.more || {}))))];
  let model = models[0], measure = "accuracy";
  function show() {
    const rows = runs.map((run, number) => ({ run, number })).filter(({ number }) => found(number, model)).map(({ run, number }) => ({
      ...found(number, model), name: groupOf.get(number).runs.length > 1 ? `${groupOf.get(number).label}, seed ${run.seed}` : groupOf.get(number).label, group: groupOf.get(number), split: run.split ?? run.name })).map((row) => withMeasure(row, measure)).filter((row) => row.clients.length);
    const about = () => `${title(measure)} of single clients, ${report.measures[model]}. ` + list(rows.map((row) => `${row.name}: mean ${percent(row.mean)} %, worst tenth ${percent(row.worst_decile)} %`), 40);
    holder.replaceChildren(strips(about, rows, `${measure} of clients`, `${MEASURES[measure]} of each client, %`).frame);
    const of = (group) => group.fairness[modelOf(group, model)];
    const column = (name, key, which, write) => ({ name, number: true, best: which, text: (group) => write(of(group)[key]), value: (group) => of(group)[key].mean, deviation: (group) => of(group)[key].std });
    const which = model === "personal" ? [{ name: "evaluated on", text: (group) => group.personal }] : [];
    fair.replaceChildren(table(`Fairness, ${report.measures[model]}`, [{ name: "method", text: (group) => group.label, show: named }, ...which, column("mean, %", "mean", "high", percents), column("std over clients, points", "std", "low", percents),
      column("worst tenth, %", "worst_decile", "high", percents), column("Jain's index", "jain", "high", (found) => found.mean.toFixed(3))], groups.filter(of)));
  }
  const some = runs.some((run) => Object.values(run.evaluations || {}).some((one) => one.count > one.clients.length));
  show();
  return [element("p", {}, "Each dot is a client: the accuracy of its personal model on its own test images. The solid mark is the mean, the dashed one the mean of the worst tenth. Pointing at a client shows it in every run on the same split."),
    element("figure", {}, element("div", { class: "controls" }, selection("Evaluated on", Object.fromEntries(models.map((name) => [name, report.measures[name]])), model, (value) => { model = value; show(); }),
      selection("Measure", Object.fromEntries(["accuracy", ...more].map((name) => [name, MEASURES[name]])), measure, (value) => { measure = value; show(); })), holder,
      some && element("figcaption", {}, "Of very many clients only some are drawn, evenly by number; means and fairness are of all.")), fair];
}

// The same row with another measure in the place of accuracy; clients without a value are left out.
function withMeasure(row, measure) {
  if (measure === "accuracy") return row;
  const values = row.more?.[measure] ?? [], kept = values.map((value, at) => at).filter((at) => known(values[at]));
  const shown = kept.map((at) => values[at]), order = shown.slice().sort((a, b) => (measure === "ece" ? b - a : a - b)), worst = order.slice(0, Math.max(1, Math.floor(order.length / 10)));
  const mean = (list) => list.reduce((sum, value) => sum + value, 0) / list.length;
  return { ...row, clients: kept.map((at) => row.clients[at]), names: row.names && kept.map((at) => row.names[at]), accuracy: shown, mean: mean(shown), worst_decile: mean(worst) };
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
    return element("div", { class: "card" }, element("h3", {}, list(same.map((run) => run.name)), statements.some((one) => !one.holds) && element("span", { class: "badge" }, "not proven as stated")),
      statements.map((one) => facts([["release", one.release], ["mechanism", one.mechanism], ["unit of protection", one.unit], ["adjacency", one.adjacency], ["sensitivity", one.sensitivity],
        ["ε", known(one.epsilon) ? plainly(one.epsilon) : "nothing is promised"], ["δ", one.delta], ["proven as stated", one.holds ? "yes" : "no"], ["because", one.because],
        ["not covered", one.not_covered.join("; ")]], false)).concat(statements.length > 0 && element("details", {}, element("summary", {}, "Randomness and accounting"),
        statements.map((one) => facts([["randomness", one.randomness], ...Object.entries(one.details || {}).map(([name, value]) => [spoken(name), value])], false)))),
      plain && plain.length > 0 && element("p", { class: "about" }, `Model updates leave unprotected in: ${plain.join(", ")}.`),
      open.length > 0 && element("p", { class: "about" }, `Answers that leave unprotected: ${open.join("; ")}.`),
      Object.entries(discloses || {}).map(([name, said]) => element("p", { class: "about" }, `${name}: ${said}.`)));
  });
  return [cards, silent.length > 0 && element("p", {}, `No statement: ${list(silent)}. Their updates leave unprotected.`)];
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
    table("What attacks measured", [{ name: "run", text: (row) => row.run }, { name: "attack", text: (row) => row.verdict.attack }, { name: "measure", text: (row) => row.name }, column("found", "found"), column("by chance", "chance"), column("without defence", "undefended")], rows),
    gallery("audit")];
}

// ---- pictures ----
function gallery(kind) {
  const all = runs.flatMap((run) => (run.pictures || []).filter((picture) => picture.kind === kind));
  if (!all.length) return null;
  return element("div", { class: kind === "audit" ? "pictures large" : "pictures" }, all.map((picture) => enlargeable(picture, kind)));
}

function maps() {
  const found = gallery("map");
  return found && [found, report.left_out.length > 0 && element("p", {}, `Left out to keep this file small: ${list(report.left_out)}.`)];
}

