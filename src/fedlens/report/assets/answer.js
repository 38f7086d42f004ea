// ---- the answer ----
const { groups, runs } = report;
const groupOf = new Map(groups.flatMap((group) => group.runs.map((number) => [number, group])));
const modelOf = (group, measure) => (measure === "personal" ? group.personal : measure); // which of its personal models
const modelWords = { global: "global model", "fine-tuned": "fine-tuned", "personal after": "personal, after training", "personal before": "personal, before training" };

function answer() {
  const shown = answerCells(report);
  narrow.addEventListener("change", () => shown.replaceChildren(...answerCells(report).childNodes));
  addEventListener("beforeprint", () => document.querySelectorAll(".cell details").forEach((one) => { one.open = true; })); // paper has no buttons
  return element("header", { id: "answer" },
    element("h1", {}, report.headline + "."),
    cautions(report),
    report.listed && element("ul", { class: "lead" }, report.sentences.map((words) => element("li", {}, words))),
    shown, recovered());
}

// What an attack that succeeded made of clients' images, where nobody can overlook it.
function recovered() {
  const all = runs.flatMap((run) => (run.pictures || []).filter((picture) => picture.leak).map((picture) => ({ ...picture, run: run.name })));
  if (!all.length) return null;
  return [enlargeable(all[0], "recovered"), all.length > 1 && element("p", { class: "note" }, element("a", { href: "#audits" }, `${all.length - 1} more such pictures are under Audits.`))];
}

function enlargeable(picture, kind) {
  const image = () => element("img", { src: picture.source, alt: picture.about, width: picture.width, height: picture.height });
  const larger = element("button", { type: "button", "aria-label": `Enlarge: ${picture.about}`, onclick: () => {
    const dialog = element("dialog", { "aria-label": picture.about, onclick: () => dialog.close(), onclose: () => dialog.remove() }, image(), element("button", { class: "plain", type: "button" }, "Close"));
    document.body.append(dialog);
    dialog.showModal();
  } }, image());
  return element("figure", { class: `picture ${kind}` }, larger, element("figcaption", {}, picture.about));
}

// ---- learning curves ----
const AXES = {
  round: { name: "rounds", write: (value) => String(Math.round(value)), whole: true, cost: "rounds" },
  bytes: { name: "bytes sent, up and down", write: size, cost: "bytes" },
  seconds: { name: "seconds of running", write: duration, cost: "seconds" },
};
const ENOUGH = 4; // evaluations that make a curve

// What a method is drawn with: the measure, or where it lacks that the one that it has.
function curveOf(group, measure) {
  const own = [modelOf(group, measure), "fine-tuned", "global", "personal after", "personal before"].find((model) => group.curves[model]);
  return own && { ...group.curves[own], model: own, other: own !== modelOf(group, measure) };
}
function evaluations(measure) { // the fewest that a group has of it
  const counts = groups.map((group) => group.curves[modelOf(group, measure)]?.round.length).filter(known);
  return counts.length ? Math.min(...counts) : 0;
}

function curves() {
  const shown = groups.filter((group) => Object.keys(group.curves).length);
  if (!shown.length) return null;
  const names = Object.keys(report.measures), first = report.measure in report.measures ? report.measure : names[0];
  const better = evaluations(first) < ENOUGH ? names.find((name) => evaluations(name) >= ENOUGH) : null;
  const main = element("figure", { id: "curves" }, growth(shown, better || first, better && first));
  if (!better) return main;
  return [element("figure", { id: "levels" }, element("h2", { class: "small" }, `Accuracy of ${report.measures[first].replace(",", " on")}`), ending(shown, first)), main];
}

// Which evaluation of single clients is nearest to a model: of the global one, that before local training.
const clientModel = (run, model) => [model, "personal before", "personal after", "fine-tuned"].find((name) => run.evaluations?.[name]);

function timesEvaluated(measure) {
  const whose = report.measures[measure].split(",")[0], times = evaluations(measure);
  return `${whose[0].toUpperCase()}${whose.slice(1)} ${whose.includes("models") ? "were" : "was"} evaluated ${times === 1 ? "once" : `${times} times`}.`;
}

// One bar for each method, and the clients of an only one: what a single evaluation tells.
function ending(shown, measure) {
  const having = shown.filter((group) => curveOf(group, measure)), only = having.length === 1 && having[0];
  const found = only && only.runs.map((number) => ({ run: runs[number], model: clientModel(runs[number], modelOf(only, measure)) })).filter(({ model }) => model).map((each) => ({ ...each, one: each.run.evaluations[each.model] }));
  const rows = having.map((group) => {
    const curve = curveOf(group, measure), spread = group.accuracy[curve.model], ranked = !curve.other && group.rank;
    const value = ranked ? ranked.mean : spread.mean;
    return { name: group.label + (curve.other ? ` (${modelWords[curve.model]})` : ""), group, value, low: curve.low?.at(-1), high: curve.high?.at(-1), words: percents(ranked ? { mean: ranked.mean, std: ranked.std } : spread) };
  }).filter((row) => known(row.value)).sort((a, b) => b.value - a.value);
  const about = () => `Accuracy in % after the last round, ${report.measures[measure]}. ` + rows.map((row) => `${row.name}: ${row.words}`).join("; ");
  return [rows.length > 0 && levels(about, rows, "accuracy, %", "accuracy at the end").frame,
    found && found.length > 0 && strips(() => `Accuracy of single clients. ${found.map(({ one }) => `mean ${percent(one.mean)} %, worst tenth ${percent(one.worst_decile)} %`).join("; ")}`,
      found.map(({ run, one }) => ({ ...one, name: found.length > 1 ? `clients, seed ${run.seed}` : "its clients", group: only, split: run.split ?? run.name }))).frame,
    element("figcaption", {}, timesEvaluated(measure), rows.some((row) => known(row.low)) && " Thin lines reach from the lowest to the highest seed.",
      found && found.length > 0 && ` Each dot is a client (${modelWords[found[0].model]}); the solid mark is their mean, the dashed one the worst tenth.`)];
}

// Evaluations that the means are over which rank, where a chart is about that measure.
const averages = (measure) => (measure === "global" && report.measure === "global" ? Math.max(1, ...groups.map((group) => group.rank?.last ?? 1)) : 1);

function growth(shown, begin, instead) {
  const hidden = new Set(), holder = element("div"), values = element("div"), notes = element("span"), measures = report.measures;
  let measure = begin, axis = "round", line = null;
  const visible = () => shown.filter((group) => curveOf(group, measure) && !hidden.has(group)).map((group) => {
    const curve = curveOf(group, measure);
    const result = percent(measure === report.measure && !curve.other && group.rank ? group.rank.mean : curve.accuracy.at(-1));
    return { group, label: group.label + (curve.other ? ` (${modelWords[curve.model]})` : ""), result: result === "–" ? "" : `${averages(measure) > 1 && group.rank && !curve.other ? "mean " : ""}${result} %`, xs: curve[axis], ys: curve.accuracy, low: curve.low, high: curve.high, preparation: group.preparation[AXES[axis].cost], unfinished: !group.complete, other: curve.other };
  });
  const about = () => `Accuracy over ${AXES[axis].name}, ${measures[measure]}. ` + visible().map((one) => `${one.label} ends at ${percent(one.ys[one.ys.length - 1])} %`).join("; ");
  function draw() {
    const single = evaluations(measure) === 1, over = axis === "round" ? "rounds" : axis;
    line = single ? null : lines(about, AXES[axis], `accuracy of ${measures[measure].split(",")[0]}, %`, visible, `accuracy over ${over}`, () => averages(measure));
    holder.replaceChildren(...(single ? [ending(shown, measure)].flat(2).filter(Boolean) : [line.frame]));
    values.replaceChildren(curveTable(shown, measure));
    notes.replaceChildren(...(single ? [] : [curveNotes(shown, measure)]));
    axes.hidden = methods.hidden = single; // bars have neither an axis to choose nor lines to hide
  }
  const chips = shown.map((group) => element("button", { type: "button", class: "chip", "aria-pressed": true, onclick: (event) => {
    hidden.has(group) ? hidden.delete(group) : hidden.add(group);
    event.currentTarget.setAttribute("aria-pressed", !hidden.has(group));
    line?.redraw();
  } }, swatch(group), group.label + (group.complete ? "" : " (unfinished)")));
  const axes = choice("Over what", { round: "Rounds", bytes: "Bytes", seconds: "Seconds" }, axis, (value) => { axis = value; draw(); });
  const methods = element("div", { class: "chips", role: "group", "aria-label": "Methods shown" }, chips);
  draw();
  return [instead && element("h2", { class: "small" }, "How training went"),
    element("div", { class: "controls" }, axes, selection("Evaluated on", measures, measure, (value) => { measure = value; draw(); })),
    shown.length > 1 && methods,
    holder,
    element("figcaption", {}, instead && `The headline is about ${measures[instead].split(",")[0]}, which have too few evaluations for a curve. `, notes),
    element("details", {}, element("summary", {}, "The same as a table"), values)];
}

function curveNotes(shown, measure) {
  const others = shown.map((group) => [group, curveOf(group, measure)]).filter(([, curve]) => curve?.other).map(([group, curve]) => `${group.label} lacks this model and is drawn with what it has: ${modelWords[curve.model]}.`);
  const prepared = shown.filter((group) => group.preparation.rounds).map((group) => `${group.label} ${Math.round(group.preparation.rounds)}`);
  return ["Each mark is an evaluation. ", averages(measure) > 1 && `Numbers at the ends of lines are those that rank: ${report.averaged}. `, "Point at the chart, or focus it and use the arrow keys.", shown.some((group) => group.runs.length > 1) && " Lines are means over seeds; thin lines reach from the lowest to the highest, and a band shows that for the line at the pointer.",
    prepared.length > 0 && ` Preparatory rounds cost bytes and time and do not count (${prepared.join(", ")}): shaded before round 0, and as bars on the other axes.`, ...others.map((words) => ` ${words}`)].filter(Boolean).join("");
}

function curveTable(shown, measure) {
  const having = shown.filter((group) => curveOf(group, measure)), found = having.map((group) => curveOf(group, measure));
  const at = found.map((curve) => new Map(curve.round.map((round, number) => [round, curve.accuracy[number]])));
  const rounds = [...new Set(at.flatMap((by) => [...by.keys()]))].sort((a, b) => a - b);
  return table(`Accuracy in % by round, ${report.measures[measure]}`, [{ name: "round", text: String, value: (round) => round, number: true },
    ...having.map((group, number) => ({ name: group.label + (found[number].other ? ` (${modelWords[found[number].model]})` : ""), text: (round) => percent(at[number].get(round), 2), value: (round) => at[number].get(round) ?? null, number: true }))], rounds);
}
