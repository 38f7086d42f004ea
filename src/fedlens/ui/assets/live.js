// Runs as they are now: the server tells which have changed, and the page asks for the points it lacks of those it draws.
const content = element("main", { id: "main", tabindex: -1 }), lost = element("p", { class: "warning lost", role: "alert", hidden: "" }, "The server does not answer; what you see may be old.");
let view = { update() {} }, heard = false, complete = false, opened = null, updated = 0, again = null;
const late = []; // rows that the view has not been told of

function route() {
  recall();
  if (shown.run && !rows.has(shown.run)) {
    if (!complete) return content.replaceChildren(element("h1", {}, "Reading runs …")); // it may come with the next news
    shown.run = "";
  }
  view = shown.run ? runView(shown.run) : listView();
  content.replaceChildren(view.node);
  nameTab();
  if (opened !== shown.run) scrollTo(0, 0);
  opened = shown.run;
}

function listen() {
  const source = new EventSource("events");
  source.onmessage = (event) => {
    const news = JSON.parse(event.data), first = !heard;
    lost.hidden = heard = true;
    complete = !news.more;
    if (news.all) again = new Set(); // all come anew, maybe some at a time; who has not come in the end is gone
    for (const row of news.runs) again?.add(row.name);
    if (again && complete) { for (const name of [...rows.keys()]) if (!again.has(name)) rows.delete(name); again = null; }
    for (const name of news.gone) rows.delete(name);
    for (const row of news.runs) { rows.set(row.name, row); texts.delete(row.name); }
    const waited = shown.run && opened !== shown.run && (complete || rows.has(shown.run));
    if (!first && !waited && !complete && Date.now() - updated < 1000) { late.push(...news.runs); return; } // of very many, some at a time
    updated = Date.now();
    const waiting = late.splice(0), changed = findPrefix() ? [...rows.values()] : [...waiting, ...news.runs];
    if (first || waited) route(); else view.update(changed);
    nameTab();
    if (complete || !settings.other.length) learnSettings().then((learned) => learned && view.update([...rows.values()]));
  };
  source.onerror = () => {
    lost.hidden = false;
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
}

if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the token is in a cookie now
document.body.prepend(element("div", { class: "sheet" }, element("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); content.focus(); } }, "To the runs"), lost, element("header", { class: "head" }, element("span", {}, element("strong", {}, "FedLens"), ` · ${report.folder}`)), content, element("footer", {}, `FedLens ${report.version}. This page reads the folder and writes nothing but a request to stop.`)));
addEventListener("hashchange", route);
route();
listen();
