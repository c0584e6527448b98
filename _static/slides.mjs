// A chapter as slides, made of the page itself: nothing is copied or moved, a slide is the part of the article that is
// shown. It has the heading of its section and what can be seen from afar: a figure, an explorer, formulas, rows of a
// table, a takeaway, and of a paragraph its first sentence. The sentences after it are the speaker's notes.

const WIDTH = 1280, HEIGHT = 720, FOOT = 60; // FOOT: the room of the buttons
const SIZE = 28, LEAST = 22; // pixels of text, and those to which a large table, listing or figure may shrink
const LINES = 16; // of a listing
const PART = "section, .cell, .cell_output, .output, .text_html, .admonition, .pst-scrollable-table-container, " +
  "ul, ol, dl, table, tbody, details.covered";
const HEAD = "h1, h2, h3, thead, colgroup, .admonition-title, .covered > summary";
const CARD = ".rung ~ .cell:not(.rung ~ .cell ~ .cell)";
const NEVER = `.cell:has(form.asked), #five-questions, script, style, .cell_input, .figure-code, .toctree-wrapper, #reading-guide, ${HEAD}, ${CARD}`;
const NOTE = ".dropdown, .instructor"; // answers that the page folds, and what is for who teaches
const WHOLE = ".tip, .rung, #problems, td"; // not cut after the first sentence

const root = document.documentElement;

function make(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** Put what follows the first sentence of a paragraph into an element of its own; the source has a sentence a line. */
function split(paragraph) {
  const known = paragraph.querySelector(":scope > .slides-rest");
  const text = [...paragraph.childNodes].find((node) => node.nodeType === Node.TEXT_NODE && node.data.includes("\n"));
  if (known || !text) return known;
  const range = document.createRange(), rest = make("span", { className: "slides-rest" });
  range.setStart(text, text.data.indexOf("\n"));
  range.setEndAfter(paragraph.lastChild);
  range.surroundContents(rest);
  return rest;
}

/** Cut a listing that is longer than a slide into pieces, between lines; return whether it is cut. */
function cut(listing) {
  const lines = listing.textContent.trimEnd().split("\n").length, pieces = Math.ceil(lines / LINES);
  if (pieces < 2 || listing.querySelector(".slides-lines")) return pieces > 1;
  for (const node of listing.childNodes) {
    const end = node.nodeType === Node.TEXT_NODE ? node.data.indexOf("\n") + 1 : 0;
    if (end && end < node.data.length) node.splitText(end);
  }
  let piece, held = Infinity, ended = true;
  for (const node of [...listing.childNodes]) {
    if (ended && held >= lines / pieces) {
      piece = make("span", { className: "slides-lines" });
      node.before(piece);
      held = 0;
    }
    piece.append(node);
    held += node.textContent.split("\n").length - 1;
    ended = node.textContent.endsWith("\n");
  }
  return true;
}

/** A copy for the notes: open, and without the names and the controls of what it is a copy of. */
function copied(node) {
  const copy = make("div", {}, node.cloneNode(true));
  for (const each of copy.querySelectorAll("[id]")) each.removeAttribute("id");
  for (const each of copy.querySelectorAll(".toggle-hidden")) each.classList.remove("toggle-hidden");
  for (const each of copy.querySelectorAll("button")) each.remove();
  return copy;
}

class Slides {
  constructor(article) {
    const button = (label, onclick) => make("button", { type: "button", textContent: label, onclick });
    Object.assign(this, { article, list: [], opened: [], at: 0, stop: new AbortController(), place: make("span", {}) });
    this.status = make("p", { className: "visually-hidden", role: "status" });
    this.notes = make("div", { className: "slides-notes", hidden: true, tabIndex: 0, role: "region" });
    this.notes.ariaLabel = "Notes";
    this.toggle = button("Notes", () => this.annotate());
    this.bar = make("nav", { className: "slides-bar", ariaLabel: "Slides" },
      button("Previous", () => this.show(this.at - 1)), this.place, button("Next", () => this.show(this.at + 1)),
      this.toggle, button("Leave", () => this.leave()), this.status);
  }

  /** Show the slides, from a number or else from what the reader sees now. */
  enter(start) {
    const above = [...this.article.querySelectorAll("h1, h2, h3")]
      .findLast((heading) => heading.getBoundingClientRect().top < innerHeight / 2);
    this.from = document.activeElement;
    root.classList.add("slides");
    root.style.fontSize = `${SIZE}px`;
    document.body.append(this.bar, this.notes);
    this.typeset();
    root.classList.add("slides-dealt");
    this.deal(this.article);
    this.list = this.list.filter((slide, at) => !this.spare(slide, this.list[at - 1], this.list[at + 1]));
    const { signal } = this.stop;
    addEventListener("keydown", (event) => this.key(event), { capture: true, signal });
    addEventListener("resize", () => this.scale(), { signal });
    this.scale();
    this.show(start ? start - 1 : this.list.findIndex(({ heading }) => heading === above));
    this.article.tabIndex = -1;
    this.article.focus();
  }

  leave() {
    const { heading } = this.list[this.at];
    this.stop.abort();
    this.clear();
    for (const fold of this.opened) fold.open = false;
    root.classList.remove("slides", "slides-dealt");
    root.style.fontSize = this.article.style.transform = "";
    this.typeset();
    this.bar.remove();
    this.notes.remove();
    this.remember();
    heading.scrollIntoView();
    (this.from.isConnected ? this.from : this.article).focus({ preventScroll: true });
  }

  /** Break displayed formulas for the width that they have now: MathJax calls this step METRICS. */
  typeset() {
    window.MathJax?.startup?.document?.rerender?.(110);
  }

  /** Deal what is in a part of the article to slides, in its order. */
  deal(part) {
    for (const node of part.children) {
      const listing = !node.matches(".livecalc") && node.querySelector("pre");
      if (node.matches(NEVER) || !node.closest("section")) continue;
      // A presenter shows what a reader guesses first.
      if (node.matches("details.covered:not([open])")) this.opened.push(Object.assign(node, { open: true }));
      if (node.matches(NOTE)) this.list.at(-1).notes.push(node);
      else if (node.matches(PART)) this.deal(node);
      else if (listing && cut(listing)) this.deal(listing);
      else this.add(node);
    }
  }

  /** Put a node on the last slide, or on a new one where it belongs to another section or finds no room. */
  add(node) {
    const section = node.closest("section"), last = this.list.at(-1), goesOn = last?.section === section;
    const paragraph = node.matches("p") ? node : node.querySelector(":scope > p");
    const rest = paragraph && !node.closest(WHOLE) && split(paragraph);
    // The items of a list keep their numbers on another slide.
    if (node.matches("ol > li")) node.value = [...node.parentElement.children].indexOf(node) + 1;
    if (goesOn) this.mark(node);
    if (!goesOn || this.over(node)) {
      const slide = { section, heading: section.querySelector("h1, h2, h3"), nodes: [], notes: [], size: SIZE };
      // What announces a list or a table goes with it.
      const [one, before] = goesOn ? last.nodes.slice(-2).reverse() : [];
      if (before && one.matches("p") && /:\s*$/.test(one.textContent)) slide.nodes.push(last.nodes.pop());
      this.list.push(slide);
      this.reveal(slide);
      this.mark(node);
      while (slide.size > LEAST && this.over(node)) root.style.fontSize = `${--slide.size}px`;
    }
    this.list.at(-1).nodes.push(node);
    if (rest) this.list.at(-1).notes.push(rest);
  }

  /** Return whether a slide has but one sentence; the notes of one beside it have it then. */
  spare({ section, nodes }, before, after) {
    const beside = [before, after].find((slide) => slide?.section === section);
    const alone = beside && nodes.length === 1 && nodes[0].matches("section > p");
    if (alone) beside.notes[beside === before ? "push" : "unshift"](nodes[0]);
    return alone;
  }

  /** Return whether the slide is too high, or its last node or what that is in too wide. */
  over(node) {
    const boxes = [node.parentElement, node, ...node.querySelectorAll("pre, .math, mjx-container[display]")];
    return this.article.querySelector("section").getBoundingClientRect().bottom > HEIGHT - FOOT ||
      boxes.some((box) => box.scrollWidth > box.clientWidth + 1);
  }

  clear() {
    for (const node of this.article.querySelectorAll(".on")) node.classList.remove("on");
  }

  /** Show a node, and with it what it is in and the heading of its section. */
  mark(node) {
    node.closest("section").querySelector("h1, h2, h3").classList.add("on");
    for (; node !== this.article; node = node.parentElement) node.classList.add("on");
  }

  reveal({ nodes, size }) {
    this.clear();
    nodes.forEach((node) => this.mark(node));
    root.style.fontSize = `${size}px`;
  }

  show(at) {
    this.at = Math.min(Math.max(at, 0), this.list.length - 1);
    const slide = this.list[this.at];
    this.reveal(slide);
    if (!document.activeElement.checkVisibility()) this.article.focus();
    this.place.textContent = `${this.at + 1} / ${this.list.length}`;
    this.status.textContent = `${slide.heading.textContent.replace("#", "")}, ${this.place.textContent}`;
    this.notes.replaceChildren(...slide.notes.map(copied));
    this.notes.scrollTop = 0;
    this.remember(this.at + 1);
  }

  annotate() {
    this.notes.hidden = !this.notes.hidden;
    this.toggle.ariaPressed = String(!this.notes.hidden);
    this.scale();
  }

  /** Make a slide as large as the window, or what the notes leave of it. */
  scale() {
    const height = innerHeight * (this.notes.hidden ? 1 : 0.6), by = Math.min(innerWidth / WIDTH, height / HEIGHT);
    const left = (innerWidth - by * WIDTH) / 2, top = (height - by * HEIGHT) / 2;
    this.article.style.transform = `translate(${left}px, ${top}px) scale(${by})`;
  }

  key(event) {
    const { at, list } = this, { key } = event;
    // A control keeps its keys, and so does the browser.
    const kept = key === " " ? "input, select, textarea, button, summary, a" : "input, select, textarea";
    if (event.altKey || event.ctrlKey || event.metaKey || (key !== "Escape" && event.target.closest?.(kept))) return;
    const to = {
      ArrowRight: at + 1, PageDown: at + 1, " ": event.shiftKey ? at - 1 : at + 1,
      ArrowLeft: at - 1, PageUp: at - 1, Home: 0, End: list.length - 1,
    };
    if (key in to) this.show(to[key]);
    else if (key === "n") this.annotate();
    else if (key === "Escape") this.leave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Keep the number of the slide in the page's address; without a number, none. */
  remember(number) {
    const address = new URL(location.href);
    address.searchParams.delete("slide");
    if (number) address.searchParams.set("slide", number);
    history.replaceState(history.state, "", address);
  }
}

/** Turn the page into slides; `start` is the number of the first that is shown. */
export async function present(start) {
  // From an address it is called while the page is still read.
  if (document.readyState !== "complete") await new Promise((loaded) => addEventListener("load", loaded));
  if (document.querySelector("link[href*='slides.css']") === null) {
    const sheet = make("link", { rel: "stylesheet", href: new URL("slides.css", import.meta.url).href });
    await new Promise((loaded) => { sheet.onload = loaded; document.head.append(sheet); });
  }
  await Promise.all([window.MathJax?.startup?.promise, document.fonts.ready]);
  if (!root.classList.contains("slides")) new Slides(document.querySelector("article.bd-article")).enter(start);
}
