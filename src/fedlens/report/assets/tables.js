// A column: name, text(row) to read, value(row) to sort by and for CSV, deviation(row) beside it, number, best ("high", "low"),
// top(row): whether it is as good as the best, where that is more than the best number.
function table(about, allColumns, allRows, options = {}) {
  // Columns and rows that say nothing are left out; the first column is what a row is about.
  const blank = (words) => ["–", ""].includes(String(words));
  const columns = allColumns.filter((column, at) => !at || !allRows.length || allRows.some((row) => !blank(column.text(row))));
  const rows = allRows.filter((row) => columns.length < 2 || columns.slice(1).some((column) => !blank(column.text(row))));
  const body = element("tbody");
  const heads = columns.map((column, number) => {
    const button = element("button", { type: "button", onclick: () => sort(number) }, column.name);
    return element("th", { scope: "col", class: column.number ? "number" : null, "aria-sort": "none" }, button);
  });
  const best = columns.map((column) => {
    const values = column.best && rows.length > 1 ? rows.map(column.value).filter(known) : [];
    return values.length > 1 ? (column.best === "high" ? Math.max(...values) : Math.min(...values)) : null;
  });
  let order = rows.slice();

  function show() {
    body.replaceChildren(...order.map((row) => element("tr", {}, columns.map((column, number) => {
      const classes = [column.number && "number", column.wide && "wide", (column.top ? column.top(row) : known(best[number]) && column.value(row) === best[number]) && "best"];
      const content = column.show ? column.show(row) : column.text(row);
      return element(number ? "td" : "th", { scope: number ? null : "row", class: classes.filter(Boolean).join(" ") || null }, content);
    }))));
  }
  function sort(number) {
    const up = heads[number].getAttribute("aria-sort") === (columns[number].number ? "descending" : "none") || heads[number].getAttribute("aria-sort") === "descending";
    const value = columns[number].value || columns[number].text;
    order = rows.slice().sort((a, b) => compare(value(a), value(b), up));
    heads.forEach((head, at) => head.setAttribute("aria-sort", at !== number ? "none" : up ? "ascending" : "descending"));
    show();
  }
  function compare(a, b, up) {
    if (!known(a) || !known(b)) return known(a) ? -1 : known(b) ? 1 : 0; // what is not known comes last
    const less = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return up ? less : -less;
  }
  show();
  const said = element("span", { role: "status", "aria-live": "polite" });
  const copies = Object.entries({ LaTeX: latex, Markdown: markdown, CSV: csv }).map(([name, write]) =>
    element("button", { type: "button", class: "plain", "data-copy": name, "aria-label": `Copy as ${name}: ${about}`, onclick: async () => {
      said.textContent = (await copied(write(columns, order, about))) ? `Copied as ${name}.` : "The browser refused to copy.";
    } }, name));
  const saved = element("button", { type: "button", class: "plain", "data-save": "CSV", "aria-label": `Download as CSV: ${about}`, onclick: () => {
    handOver(`${slug(about)}.csv`, csv(columns, order), "text/csv");
    said.textContent = "Saved as CSV.";
  } }, "CSV");
  const scroll = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": about },
    element("table", {}, element("caption", { class: "unseen" }, about), element("thead", {}, element("tr", {}, heads)), body));
  const wrap = element("div", { class: "wrap" }, scroll), cue = element("p", { class: "cue", hidden: "" }, "More to the right: swipe, or focus the table and use the arrow keys.");
  cued(scroll, wrap, cue);
  return element("div", { class: "table", id: options.id }, wrap, cue, options.caption && element("p", { class: "note" }, options.caption),
    element("div", { class: "foot" }, element("span", {}, "Copy as"), copies, element("span", {}, "Download"), saved, said));
}

// A shade at the edge beyond which a table goes on, and words where it is wider than the page.
function cued(scroll, wrap, cue) {
  const look = () => {
    const beyond = scroll.scrollWidth - scroll.clientWidth;
    cue.hidden = beyond < 2;
    wrap.classList.toggle("more-right", beyond - scroll.scrollLeft > 2);
    wrap.classList.toggle("more-left", scroll.scrollLeft > 2);
  };
  scroll.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(scroll);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch (refused) { // some browsers refuse pages opened from a file
    const area = element("textarea", { class: "unseen", "aria-hidden": "true", tabindex: -1 });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function latex(columns, rows, about) {
  const escaped = (text) => String(text).replace(/\\/g, "\0").replace(/[&%$#_{}]/g, "\\$&").replace(/~/g, "\\textasciitilde{}").replace(/\^/g, "\\textasciicircum{}")
    .replace(/\0/g, "\\textbackslash{}").replace(/±/g, "$\\pm$").replace(/–/g, "--");
  const line = (cells) => `${cells.map(escaped).join(" & ")} \\\\`;
  const best = columns.map((column) => column.best && rows.length > 1 && (column.best === "high" ? Math.max : Math.min)(...rows.map(column.value).filter(known)));
  const cell = (column, row, number) => ((column.top ? column.top(row) : column.best && column.value(row) === best[number]) ? `\\textbf{${escaped(column.text(row))}}` : escaped(column.text(row)));
  return [`% ${about.replace(/\s+/g, " ")}`, `\\begin{tabular}{${columns.map((column) => (column.number ? "r" : "l")).join("")}}`, "\\hline",
    line(columns.map((column) => column.name)), "\\hline",
    ...rows.map((row) => `${columns.map((column, number) => cell(column, row, number)).join(" & ")} \\\\`), "\\hline", "\\end{tabular}", ""].join("\n");
}

function markdown(columns, rows) {
  const line = (cells) => `| ${cells.map((text) => String(text).replace(/\|/g, "\\|").replace(/\s+/g, " ")).join(" | ")} |`;
  return [line(columns.map((column) => column.name)), line(columns.map((column) => (column.number ? "---:" : "---"))),
    ...rows.map((row) => line(columns.map((column) => column.text(row))))].join("\n") + "\n";
}

// All digits, and deviations in columns of their own: CSV is for computing.
function csv(columns, rows) {
  const cell = (value) => {
    const text = known(value) ? String(value) : "";
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text; // no formula for a spreadsheet
    return /[",\n\r]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
  };
  const wide = columns.flatMap((column) => [{ name: column.name, value: column.value || column.text },
    ...(column.deviation ? [{ name: `${column.name}, std`, value: column.deviation }] : [])]);
  return [wide.map((column) => cell(column.name)), ...rows.map((row) => wide.map((column) => cell(column.value(row))))].map((cells) => cells.join(",")).join("\n") + "\n";
}
