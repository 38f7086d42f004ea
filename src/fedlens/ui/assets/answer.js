// Which method won, whether it is safe and what it cost: the report's answer about finished runs.
const MOST_ANSWERED = 200, MOST_TOLD = 5, PATIENCE = 5000; // runs in one answer; sentences where settings are told one by one; milliseconds

// `about`: the runs in question and how to call them; `told` is called with a new answer, whose marks the table shows.
let answered = {}; // the answer that is shown
function answerSection(about, told) {
  const node = element("section", { id: "answer", "aria-label": "Answer", hidden: "" });
  let asked = "", busy = false, found = null;
  function lead({ words, all }, done) {
    const part = done < all.length && all.some((row) => row.state === "running") ? `${done} of ${all.length} done so far` : "";
    return [words, part].filter(Boolean).join(", ").replace(/^./, (letter) => letter.toUpperCase());
  }
  function show(before) {
    const more = found.listed ? Math.max(0, found.brief.length - MOST_TOLD) : 0;
    node.replaceChildren(element("h2", {}, before && element("span", { class: "quiet" }, `${before}: `), `${found.headline}.`), ...cautions(found),
      found.listed ? element("ul", { class: "lead" }, found.brief.slice(0, MOST_TOLD).map((words) => element("li", {}, words)), more > 0 && element("li", {}, `${more} more: find or tick fewer runs.`)) : "", answerCells(found));
    node.hidden = false;
  }
  async function update() {
    const now = about(), done = now.all.filter((row) => row.state === "done"), before = lead(now, done.length);
    const key = `${before} ${done.map((row) => `${row.name} ${row.generation} ${row.read} ${row.privacy}`).sort().join("\n")}`;
    if (key === asked || busy || !complete) return; // of very many, all are waited for
    asked = key;
    if (!done.length || done.length > MOST_ANSWERED) {
      found = null;
      answered = {};
      node.hidden = !done.length;
      node.replaceChildren(element("p", { class: "about" }, `Find or tick up to ${MOST_ANSWERED} finished runs to read which method won.`));
      return told();
    }
    busy = true;
    if (!found) { node.replaceChildren(element("h2", { class: "quiet" }, "Reading results …")); node.hidden = false; } // in the room of the answer: rows stay where they are
    node.setAttribute("aria-busy", true);
    try {
      const answer = await ask("answer", done.map((row) => ["run", row.name]));
      if (known(answer.read)) {
        if (!found) node.firstChild.textContent = `Reading results: ${answer.read} of ${done.length} runs …`;
        asked = ""; // so that it is asked for again, of the runs that are in question then
      } else { found = answered = answer; show(before); }
    } catch { setTimeout(() => { asked = ""; if (node.isConnected) update(); }, PATIENCE); } finally { busy = false; node.removeAttribute("aria-busy"); } // the server may be gone
    if (!node.isConnected) return; // another view is open
    told();
    update(); // what changed meanwhile
  }
  narrow.addEventListener("change", () => { if (node.querySelector(".cells")) node.querySelector(".cells").replaceWith(answerCells(found)); });
  return { node, update };
}
