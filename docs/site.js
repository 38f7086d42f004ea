"use strict";
const menu = document.querySelector(".menu");
if (innerWidth < 800) menu.open = false;
document.querySelector(".menu .here")?.scrollIntoView({ block: "nearest" });

// ---- copy buttons
for (const block of document.querySelectorAll("main pre")) {
  const button = Object.assign(document.createElement("button"), { className: "copy", textContent: "Copy", type: "button" });
  button.setAttribute("aria-label", "Copy this block");
  button.addEventListener("click", async () => {
    const text = block.querySelector("code").textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // pages that are opened as files may not use the clipboard in every browser
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  const frame = Object.assign(document.createElement("div"), { className: "block" });
  block.replaceWith(frame);
  frame.append(block, button);
}
for (const cell of document.querySelectorAll("main td")) cell.classList.toggle("long", cell.textContent.length > 40);
for (const wide of document.querySelectorAll("main table, main pre, main .formula")) {
  const cue = () => wide.classList.toggle("scrolls", wide.scrollWidth - wide.scrollLeft > wide.clientWidth + 8);
  wide.addEventListener("scroll", cue, { passive: true });
  new ResizeObserver(() => {
    cue();
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;  // scrolled by keyboard, too
    else wide.removeAttribute("tabindex");
  }).observe(wide);
}

// ---- which heading is on the screen
const links = new Map([...document.querySelectorAll(".contents a")].map((a) => [a.hash.slice(1), a]));
const headings = [...document.querySelectorAll("main h2, main h3")].filter((h) => links.has(h.id));
function mark() {
  const above = headings.filter((h) => h.getBoundingClientRect().top < 120);
  const current = (above.at(-1) ?? headings[0])?.id;
  for (const [id, a] of links) a.classList.toggle("current", id === current);
}
if (links.size) {
  addEventListener("scroll", mark, { passive: true });
  mark();
}

// ---- search: the index is loaded when somebody asks for it
const field = document.querySelector(".search input");
const hits = document.querySelector(".hits");
const up = document.documentElement.dataset.up;
let loading = null;
function load() {
  loading ??= new Promise((done, failed) => {
    const script = Object.assign(document.createElement("script"), { src: `${up}docs/search.js`, onload: done, onerror: failed });
    document.head.append(script);
  });
  return loading;
}
function score(entry, words) {
  let total = 0;
  for (const word of words) {
    const inTitle = entry.page.toLowerCase().includes(word), inHeading = entry.heading.toLowerCase().includes(word);
    const times = entry.lower.split(word).length - 1;
    if (!inTitle && !inHeading && !times) return 0;
    total += 8 * inTitle + 12 * inHeading + Math.min(times, 5);
  }
  return total;
}
function excerpt(entry, words) {
  const at = Math.max(0, Math.min(...words.map((w) => entry.lower.indexOf(w)).filter((i) => i >= 0), Infinity) - 40);
  return Number.isFinite(at) ? (at ? "… " : "") + entry.text.slice(at, at + 140) : entry.text.slice(0, 140);
}
function show() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  hits.replaceChildren();
  hits.hidden = !words.length;
  if (!words.length) return;
  const found = window.SEARCH.map((entry) => [score(entry, words), entry]).filter(([s]) => s).sort((a, b) => b[0] - a[0]);
  for (const [, entry] of found.slice(0, 12)) {
    const a = Object.assign(document.createElement("a"), { href: up + entry.at });
    a.append(Object.assign(document.createElement("b"), { textContent: entry.heading === entry.page ? entry.page : `${entry.page}: ${entry.heading}` }));
    a.append(Object.assign(document.createElement("span"), { textContent: excerpt(entry, words) }));
    const item = document.createElement("li");
    item.append(a);
    hits.append(item);
  }
  if (!found.length) hits.append(Object.assign(document.createElement("li"), { textContent: "Nothing found." }));
}
async function search() {
  await load();
  for (const entry of window.SEARCH) entry.lower ??= entry.text.toLowerCase();
  show();
}
field.addEventListener("input", search);
addEventListener("keydown", (event) => {
  const typing = /^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName);
  if (event.key === "/" && !typing) {
    event.preventDefault();
    menu.open = true;
    field.focus();
  }
  const shown = [...hits.querySelectorAll("a")], at = shown.indexOf(document.activeElement);
  if (event.key === "Escape" && !hits.hidden) { field.value = ""; hits.hidden = true; field.focus(); }
  if (shown.length && !hits.hidden && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
    event.preventDefault();
    const next = at + (event.key === "ArrowDown" ? 1 : -1);
    (next < 0 ? field : shown[Math.min(next, shown.length - 1)]).focus();
  }
  if (event.key === "Enter" && document.activeElement === field && shown.length) shown[0].click();
});
