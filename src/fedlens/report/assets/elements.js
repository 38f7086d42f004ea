"use strict";
// What runs call themselves reaches the page as text nodes and attributes only, never as markup.
const report = JSON.parse(document.getElementById("report").textContent);
const known = (value) => value !== null && value !== undefined;
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (!known(value) || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const element = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const drawn = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

// ---- numbers in words ----
const percent = (share, digits = 1) => (known(share) ? (100 * share).toFixed(digits) : "–");
function size(count) {
  if (!known(count)) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 999.5) return `${+count.toPrecision(3)} ${unit}`;
    count /= 1000;
  }
  return `${+count.toPrecision(3)} TB`;
}
function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds >= 7200) return `${(seconds / 3600).toFixed(1)} h`;
  if (seconds >= 120) return `${(seconds / 60).toFixed(1)} min`;
  return `${+seconds.toPrecision(3)} s`;
}
// Any value as text: parts of a list or of a mapping one after another, yes and no for truths.
function plainly(value) {
  if (!known(value) || value === "") return "–";
  if (Array.isArray(value)) return value.map(plainly).join(", ") || "–";
  if (typeof value === "object") return Object.entries(value).map(([name, part]) => `${spoken(name)}: ${plainly(part)}`).join("; ") || "–";
  return typeof value === "number" && !Number.isInteger(value) ? String(+value.toPrecision(6)) : String(value);
}
const spoken = (name) => name.replace(/_/g, " ");
const short = (words, length) => (words.length <= length ? words : `${words.slice(0, Math.max(1, Math.floor(length) - 1))}…`);
// A mean and its deviation in the mean's unit; a deviation that would read as zero is left out.
function withSpread(found, units) {
  if (!found || !known(found.mean)) return "–";
  const [unit, , size] = units.find(([, from]) => found.mean >= from) || units[units.length - 1];
  const digits = Math.max(0, 2 - Math.floor(Math.log10(found.mean / size || 1)));
  const std = ((found.std || 0) / size).toFixed(digits);
  return `${+(found.mean / size).toFixed(digits)}${Number(std) ? ` ± ${std}` : ""} ${unit}`.trim();
}
const SIZES = [["TB", 999.5e9, 1e12], ["GB", 999.5e6, 1e9], ["MB", 999.5e3, 1e6], ["kB", 999.5, 1e3], ["B", 0, 1]];
const TIMES = [["h", 7200, 3600], ["min", 120, 60], ["s", 0, 1]];
const PLAIN = [["", 0, 1]];
const percents = (found) => (known(found && found.mean) ? percent(found.mean) + (known(found.std) ? ` ± ${percent(found.std)}` : "") : "–");

// ---- marks ----
const dashOf = (group) => (report.dashes[(group.dash + group.variant) % report.dashes.length] || []).join(" ");
function swatch(group) {
  const line = drawn("line", { class: `line c${group.colour}`, x1: 1, x2: 21, y1: 5, y2: 5, "stroke-dasharray": dashOf(group) });
  return drawn("svg", { class: "swatch", width: 22, height: 10, "aria-hidden": "true" }, line);
}
const named = (group) => [swatch(group), group.label];

// ---- what many sections need ----
function choice(label, options, chosen, change) {
  const buttons = Object.entries(options).map(([value, words]) =>
    element("button", { type: "button", "aria-pressed": value === chosen, "data-value": value, onclick: () => {
      for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.value === value);
      change(value);
    } }, words));
  return element("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

function selection(label, options, chosen, change) {
  const names = Object.entries(options);
  if (names.length < 2) return null;
  const select = element("select", { onchange: () => change(select.value) }, names.map(([value, words]) => element("option", { value, selected: value === chosen ? "" : null }, words)));
  return element("label", { class: "selection" }, `${label} `, select);
}

// What is not known is left out: a dash tells nobody anything.
function facts(all, columned = true) {
  const rows = all.filter(([, value]) => plainly(value) !== "–");
  const pairs = rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, plainly(value))));
  return columned
    ? element("dl", { class: "columns" }, pairs)
    : element("dl", {}, rows.map(([name, value]) => [element("dt", {}, name), element("dd", {}, plainly(value))]));
}

function list(names, most = 6) {
  return names.slice(0, most).join(", ") + (names.length > most ? ` and ${names.length - most} more` : "");
}

// ---- result, privacy and cost beside each other ----
const narrow = matchMedia("(max-width: 40rem)"); // a phone has all three answers on its first screen, and reasons when asked
function answerCells(found) {
  const sentence = (one) => element("li", { class: one.alarm ? "alarmed" : null }, one.alarm && element("b", {}, "Attention: "), one.text ?? one);
  const few = (said) => (narrow.matches ? 0 : Math.max(3, said.filter((one) => one.alarm).length));
  const cell = (id, title, big, said, alarm) => (big || said.length > 0) && element("div", { id, class: alarm ? "cell loud" : "cell" }, element("h2", {}, title), big && element("p", { class: "big" }, big),
    few(said) > 0 && said.length > 0 && element("ul", {}, said.slice(0, few(said)).map(sentence)),
    said.length > few(said) && element("details", {}, element("summary", { "aria-label": `${said.length - few(said)} more on: ${title}` }, `${said.length - few(said)} more`), element("ul", {}, said.slice(few(said)).map(sentence))));
  const { tiles } = found, alarmed = found.privacy.some((one) => one.alarm);
  return element("div", { class: "cells" }, !found.listed && cell("result", "Result", tiles.result, found.sentences), cell("safety", "Privacy", tiles.privacy, found.privacy, alarmed), cell("cost", "Cost", tiles.cost, found.costs));
}
// What must not be overlooked.
const cautions = (found) => found.warnings.map((words) => element("p", { class: "warning", role: "note" }, element("b", {}, "Attention:"), words));

// ---- files to keep ----
const slug = (words) => words.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60);
function handOver(name, content, kind) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type: `${kind};charset=utf-8` }));
  const link = element("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
