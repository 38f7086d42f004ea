// What the page knows, and what of it is shown. The address holds the second, so that it can be kept and sent.
const rows = new Map(), ticked = new Set(), settings = { common: {}, runs: {}, other: [] };
const WORDS = { global: "the global model", "fine-tuned": "fine-tuned personal models", "personal after": "personal models after local training", "personal before": "personal models before local training" };
const STATES = ["running", "done", "stopped", "failed", "corrupt"];
const PLAIN_VIEW = { run: "", find: "", show: "all", sort: "", group: "", axis: "round", model: "", logx: "", logy: "", smooth: "", from: "", to: "" };
const shown = { ...PLAIN_VIEW };

async function ask(path, parameters, options) {
  const response = await fetch(`${path}?${new URLSearchParams(parameters)}`, options);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

// ---- the address ----
function addressWith(changes = {}) {
  const now = { ...shown, ...changes }, said = Object.entries(now).filter(([name, value]) => value !== PLAIN_VIEW[name]);
  return `#${new URLSearchParams([...said, ...[...ticked].map((name) => ["tick", name])])}`;
}
function remember(changes = {}) {
  Object.assign(shown, changes);
  history.replaceState(null, "", addressWith());
}
function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(shown)) shown[name] = said.get(name) ?? PLAIN_VIEW[name];
  ticked.clear();
  for (const name of said.getAll("tick")) ticked.add(name);
}
// A link to another view, in which the rest stays as it is.
function leads(changes, attributes, ...words) {
  return element("a", { ...attributes, href: `#${new URLSearchParams(changes)}`, onclick: (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    location.hash = addressWith({ from: "", to: "", ...changes });
  } }, ...words);
}

// ---- names without what all of them begin with ----
let prefix = "";
function findPrefix() {
  const names = [...rows.keys()];
  let same = names[0] || "";
  for (const name of names) while (!name.startsWith(same)) same = same.slice(0, -1);
  same = names.length > 1 ? same.replace(/[^/_ -]*$/, "") : ""; // at the end of a word
  const changed = same !== prefix;
  prefix = same;
  return changed;
}
const brief = (name) => name.slice(prefix.length) || name;

// ---- settings, asked for when there is a run whose settings are not known ----
let settingsOf = "", settingsBusy = false;
async function learnSettings() {
  const needed = [...rows.values()].map((row) => `${row.name} ${row.began}`).sort().join("\n");
  if (needed === settingsOf || settingsBusy) return false;
  settingsBusy = true;
  try {
    const found = await ask("settings", {});
    const other = [...new Set(Object.values(found.runs).flatMap((each) => Object.keys(each)))];
    Object.assign(settings, found, { other });
    settingsOf = needed;
    texts.clear();
    return true;
  } catch { return false; } finally { settingsBusy = false; }
}
const setting = (name, key) => settings.runs[name]?.[key] ?? settings.common[key];
// Without the fields of a part that is itself another one: algorithm, not algorithm.mu.
const outermost = (keys) => keys.filter((key) => !keys.some((other) => key.startsWith(`${other}.`)));

// ---- search: words, -words, key=value, key<number, key>number ----
const texts = new Map();
function textOf(row) {
  const pairs = Object.entries({ ...settings.common, ...settings.runs[row.name] }), tags = (row.tags || []).map((tag) => ["tag", tag]);
  const words = [row.name, row.method, row.family, row.data, row.partition, row.model, row.state, row.remark, ...tags.map(([, tag]) => tag), ...Object.values(settings.runs[row.name] || {})];
  return { words: words.join(" ").toLowerCase(), pairs: ` ${[...pairs, ...tags].map(([key, value]) => `${key}=${value}`).join(" ")} `.toLowerCase() };
}
const said = (row) => { if (!texts.has(row.name)) texts.set(row.name, textOf(row)); return texts.get(row.name); };
function test(word) {
  const [, key, sign, number] = word.match(/^([\w.]+)([<>])(-?[\d.]+(?:e-?\d+)?)$/) || [];
  if (key) {
    const value = (row) => Number([row[key], ...["", "local.", "algorithm."].map((part) => setting(row.name, part + key))].find((one) => typeof one === "number") ?? NaN);
    return sign === "<" ? (row) => value(row) < Number(number) : (row) => value(row) > Number(number);
  }
  if (!word.includes("=")) return (row) => said(row).words.includes(word);
  return (row) => said(row).pairs.includes(/=-?[\d.]+$/.test(word) ? `${word} ` : word); // seed=1 is not seed=10
}
function matcher(query) {
  const tests = query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const not = word.length > 1 && word[0] === "-", has = test(not ? word.slice(1) : word);
    return (row) => has(row) !== not;
  });
  return (row) => tests.every((each) => each(row));
}

// ---- runs that differ in their seed alone ----
function groupsOf(some) {
  const found = new Map();
  for (const row of some) {
    const key = row.group ? `group ${row.group}` : `alone ${row.name}`; // of a damaged run nobody knows the settings
    if (!found.has(key)) found.set(key, { key, method: row.method, family: row.family, colour: row.colour, dash: row.dash, members: [] });
    found.get(key).members.push(row);
  }
  const groups = [...found.values()];
  for (const method of new Set(groups.map((group) => group.method))) labelGroups(groups.filter((group) => group.method === method));
  return groups;
}
// By the method, and by those settings in which a group is not like most runs of that method, if most are alike.
function labelGroups(alike) {
  const members = alike.reduce((sum, group) => sum + group.members.length, 0), own = (group, key) => plainly(setting(group.members[0].name, key)), counted = settings.other.filter((key) => !/(^|\.)seed$/.test(key));
  const usual = (key) => { const count = {}; for (const group of alike) count[own(group, key)] = (count[own(group, key)] || 0) + group.members.length; return Object.keys(count).find((value) => 2 * count[value] > members); };
  const usually = Object.fromEntries(counted.map((key) => [key, usual(key)]));
  alike.forEach((group, variant) => {
    const keys = group.key.startsWith("alone") ? [] : outermost(counted.filter((key) => own(group, key) !== usually[key])), words = keys.map((key) => `${key.replace(/^(algorithm|local)\./, "")}=${own(group, key)}`);
    const more = keys.length > 3 || group.key.startsWith("alone") ? [`(${brief(group.members[0].name)})`] : words;
    Object.assign(group, { label: [group.method, ...more].join(" "), variant });
  });
}

// ---- time ----
const secondsLeft = (row) => (row.state === "running" && row.done && known(row.seconds) ? (row.seconds / row.done) * Math.max(0, row.all - row.done) : null);
function nameTab() {
  const row = rows.get(shown.run), going = row ? [row] : [...rows.values()].filter((each) => each.state === "running");
  const left = going.map(secondsLeft).filter(known), time = left.length ? `${duration(Math.max(...left))} left` : "";
  const what = row ? [row.state === "running" ? `${row.round}/${row.rounds}` : row.state, brief(row.name)] : going.length ? [`${going.length} running`] : [];
  document.title = [time, ...what, "FedLens"].filter(Boolean).join(" · ");
}
