// The search: sections of the book as you type, and before them a term of the glossary that is asked for. Pagefind
// and its index (_ext/finding.py) are fetched when it is opened. Where that fails, the form leads to Sphinx's search.

const ROOT = new URL("../", import.meta.url), FOUND = new URL("_static/found/", ROOT);
const SHOWN = 10;
const PAUSE_MS = 100; // between letters
// Words of a question that say nothing of what it is about.
const STOP = new Set((
  "a about an and are as at be between by can do does each every explain for from how i in into is it its " +
  "many mean much of on or over per than that the their there this to under vs was what when where which " +
  "who why will with without you"
).split(" "));
// The fields in which headings stand, by the kind of the page (_ext/finding.py): chapters before labs and lists.
const RANKING = { metaWeights: { title: 8, term: 7, reference: 6, lab: 5, list: 1, page: 1.5, above: 0 } };

/** The words of a text that say what it is about; all of them if none does. */
function words(text) {
  const all = text.toLowerCase().split(/[^\p{L}\p{N}_.+-]+/u).map((word) => word.replace(/^[.+-]+|[.+-]+$/g, ""));
  const some = all.filter((word) => word && !STOP.has(word));
  return some.length ? some : all.filter(Boolean);
}

/** What is the same for "All reduces" and "all-reduce". */
const key = (text) => words(text.replace(/[-_/]/g, " ")).map((word) => word.replace(/(..)s$/, "$1")).join(" ");

/** The entries of the glossary that a query names, or that begin with it. A name before a colon is another name. */
function named(terms, query) {
  const asked = key(query), exact = [], begun = [];
  for (const [term, anchor, text] of terms) {
    const names = [term, text.match(/^([^.:]{2,60}):/)?.[1] ?? ""].map(key);
    if (names.includes(asked)) exact.push([term, anchor, text]);
    else if (asked.length > 1 && names[0].startsWith(asked)) begun.push([term, anchor, text]);
  }
  return exact.length ? exact : begun.slice(0, 2);
}

/** How much of what a heading is about, which stands before its colon, is asked for: from 0 to 1. */
function about(title, asked) {
  const subject = key(title.replace(/^\d+\. |:.*/g, "")).split(" "), of = key(asked.join(" ")).split(" ");
  return subject.filter((word) => of.includes(word)).length / subject.length;
}

/** The sections with words that are asked for, best first: the sum of the words' scores, times the share of the words
    that are there; of the first of these, those whose subject is asked for before others. */
async function sections(pagefind, asked) {
  const found = new Map();
  for (const { results } of await Promise.all(asked.map((word) => pagefind.search(word)))) {
    for (const result of results) {
      const seen = found.get(result.id) ?? { result, sum: 0, words: 0 };
      found.set(result.id, { result, sum: seen.sum + result.score, words: seen.words + 1 });
    }
  }
  const first = [...found.values()].map(({ result, sum, words: n }) => ({ result, score: sum * n / asked.length }))
    .sort((a, b) => b.score - a.score).slice(0, 2 * SHOWN);
  const read = await Promise.all(first.map(async ({ result, score }) => {
    const { meta, content, excerpt, raw_url: record } = await result.data();
    const title = meta.title ?? meta.term ?? meta.reference ?? meta.lab ?? meta.list;
    const page = [meta.page, meta.above].filter(Boolean).join(" \u203a ");
    const text = `${title} ${page} ${content}`.toLowerCase();
    // For a word that is nowhere Pagefind takes the longest beginning of it, be it one letter.
    const there = asked.some((word) => text.includes(word.slice(0, 4)));
    return there && { href: address(record), title, page, excerpt, score: score * (1 + about(title, asked) / 5) };
  }));
  return { count: found.size, best: read.filter(Boolean).sort((a, b) => b.score - a.score).slice(0, SHOWN) };
}

/** The address of a section, whose record is /PAGE/ANCHOR.html, or /PAGE/ for the beginning of a page. */
function address(record) {
  const [, page, id] = record.match(/^\/(.*)\/([^/]*?)(?:\.html)?$/);
  return new URL(`${page}.html${id && `#${id}`}`, ROOT);
}

async function find(engine, query) {
  const { pagefind, terms } = await engine;
  const entries = named(terms, query).map(([term, anchor, text]) => (
    { href: new URL(`book/glossary.html#${anchor}`, ROOT), title: term, page: "Glossary", text }));
  const { count, best } = await sections(pagefind, words(query));
  const others = best.filter(({ href }) => entries.every((entry) => entry.href.href !== href.href));
  return { count, entries: [...entries, ...others] };
}

function line(tag, className, text) {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

function listed({ href, title, page, text, excerpt }) {
  const item = document.createElement("li"), link = document.createElement("a");
  const said = line("span", "found-text", text);
  link.href = href;
  if (excerpt) said.innerHTML = excerpt; // the index's own text, escaped by Pagefind, with <mark>
  link.append(line("span", "found-title", title), line("span", "found-page", page), said);
  item.append(link);
  return item;
}

function start(dialog, form) {
  const input = form.querySelector("input"), box = line("div", "found", ""), list = document.createElement("ol");
  const status = line("p", "found-status", "");
  status.setAttribute("role", "status");
  box.append(status, list);
  dialog.append(box);
  let engine, timer, latest = Promise.resolve();

  const open = () => engine ??= Promise.all([
    import(new URL("pagefind.js", FOUND)).then(async (pagefind) => {
      await pagefind.options({ ranking: RANKING, excerptLength: 26 });
      return pagefind;
    }),
    fetch(new URL("terms.json", FOUND)).then((answer) => answer.json()),
  ]).then(([pagefind, terms]) => ({ pagefind, terms }));

  async function show(query) {
    const { entries, count } = query ? await find(open(), query) : { entries: [], count: 0 };
    if (query !== input.value.trim()) return; // the reader typed on
    list.replaceChildren(...entries.map(listed));
    status.textContent = !query ? "" : entries.length ? `${count} sections. Enter opens the first.` : "Nothing found.";
    box.dataset.query = query;
  }

  const ask = () => latest = show(input.value.trim()).catch(() => {
    status.textContent = "Enter searches the pages.";
  });
  input.addEventListener("focus", () => open().catch(() => {}));
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(ask, PAUSE_MS);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearTimeout(timer);
    await (box.dataset.query === input.value.trim() ? latest : ask());
    const first = list.querySelector("a");
    if (first) first.click();
    else form.submit();
  });
  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], stops = [input, ...list.querySelectorAll("a")];
    const next = stops[stops.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
  // A section of this very page is behind the dialog.
  list.addEventListener("click", () => dialog.close());
}

const dialog = document.getElementById("pst-search-dialog"), form = dialog?.querySelector("form");
if (form) start(dialog, form);
