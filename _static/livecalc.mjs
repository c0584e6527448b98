// The controls of an explorer. Its numbers and its picture come from lablib.calc, run by Pyodide in a worker.
// Nothing is fetched until the reader touches a control, or follows a link that asks for a state.

const PARTS = ["clipped", "picture", "caption", "table", "command", "call", "question", "reply", "files"];
// A longer address than this is cut by some programs that pass it on.
const LONGEST = 6000;
const here = (path) => new URL(path, import.meta.url).href;

/** Python in a worker, started by the first call; one for all explorers of a page. */
class Python {
  constructor({ pyodide, package: zip }) {
    this.places = { pyodide: here(pyodide), zip: here(zip) };
    this.waiting = new Map();
    this.asked = 0;
  }

  /** Ask for the answer of a module's explorer to a state, or to its question; without a module, only start. */
  ask(module, state, reply = false) {
    this.worker ??= this.start();
    const id = ++this.asked;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, module, state, reply, ...this.places });
    });
  }

  start() {
    const worker = new Worker(here("livecalc_worker.mjs"), { type: "module" });
    worker.onmessage = ({ data: { id, reply, error } }) => {
      this.started ||= error === undefined;
      if (!this.started) return this.giveUp(error);
      const { resolve, reject } = this.waiting.get(id);
      this.waiting.delete(id);
      return error === undefined ? resolve(reply) : reject(new Error(error));
    };
    worker.onerror = (event) => this.giveUp(event.message ?? "the worker did not start");
    return worker;
  }

  /** End a worker that did not start, so that the next touch tries again. */
  giveUp(error) {
    this.worker.terminate();
    this.worker = undefined;
    for (const { reject } of this.waiting.values()) reject(new Error(error));
    this.waiting.clear();
  }
}

/** One explorer of the page: its controls, its parts, and its piece of the page's address. */
class Explorer {
  constructor(root, python) {
    Object.assign(this, { root, python });
    this.form = root.querySelector("form");
    this.note = root.querySelector(".livecalc-note");
    this.unknown = root.querySelector(".livecalc-unknown");
    // Of an explorer whose answers take seconds: they wait for this button.
    this.button = this.form.querySelector("[type=submit]");
    // What a control was asked for beyond what it can take now: it has it again when it can.
    this.wished = {};
    this.parts = Object.fromEntries(PARTS.map((part) => [part, root.querySelector(`[data-part=${part}]`)]));
    this.shown = Object.fromEntries(PARTS.map((part) => [part, this.parts[part].innerHTML]));
    this.first = this.state();
    this.firstAnswer = { ...this.shown, state: this.first };
    for (const control of this.controls()) {
      control.addEventListener("input", () => {
        delete this.wished[control.name];
        this.changed(control);
      });
    }
    this.form.addEventListener("reset", (event) => this.reset(event));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.button) this.changed();
    });
    this.parts.question.addEventListener("click", () => this.question());
    // Cells of the picture set a control. A pointer that passes over them starts no Python, and leaves nothing behind.
    const { picture } = this.parts;
    for (const kind of ["click", "focusin"]) picture.addEventListener(kind, ({ target }) => this.choose(target));
    picture.addEventListener("pointermove", ({ target }) => this.python.started && this.choose(target, true));
    picture.addEventListener("pointerleave", () => this.back?.());
    picture.addEventListener("keydown", (event) => this.step(event));
    for (const button of root.querySelectorAll("[data-copy]")) {
      // Where a page may not write to the clipboard there is nothing to press.
      button.hidden = !navigator.clipboard;
      button.addEventListener("click", () => this.copy(button));
    }
    // A finger on a control means that an answer is wanted soon: Python starts while the control still moves.
    this.form.addEventListener("pointerdown", (event) => {
      if (event.target.closest("select, input, textarea")) this.warm();
    });
    this.note.replaceChildren();
    this.form.hidden = false;
    this.offer();
    this.restore();
  }

  controls() {
    return [...this.form.elements].filter((element) => element.name);
  }

  /** The values of a control with their words; null where any text goes. */
  options(control) {
    if (control.localName === "textarea") return null;
    return control.dataset.options
      ? JSON.parse(control.dataset.options)
      : [...control.options].map((option) => [option.value, option.text]);
  }

  value(control) {
    return control.dataset.options ? this.options(control)[control.value][0] : control.value;
  }

  state() {
    return Object.fromEntries(
      this.controls().map((control) => [control.name, this.wished[control.name] ?? this.value(control)]),
    );
  }

  /** Set a control, if it has such a value, and say whether it has. */
  set(control, value) {
    const options = this.options(control);
    if (!options) {
      control.value = value;
      return true;
    }
    const place = options.findIndex(([known]) => known === value);
    if (place < 0) return false;
    control.value = control.dataset.options ? place : value;
    this.label(control);
    return true;
  }

  label(control) {
    if (!control.dataset.options) return;
    const words = this.options(control)[control.value][1];
    control.setAttribute("aria-valuetext", words);
    control.nextElementSibling.textContent = words;
  }

  same(state) {
    return Object.keys(this.first).every((name) => this.first[name] === state[name]);
  }

  /** Set a control to what a cell stands for, until the pointer leaves the picture if it only passes. */
  choose(target, passing = false) {
    const [name, value] = target.closest("[data-set]")?.dataset.set.split("=") ?? [];
    if (!name || this.showing) return;
    const before = this.state()[name], { back } = this;
    if (!passing) this.back = undefined;
    if (before === value) return back && !passing ? this.remember() : undefined;
    const turn = (to, kept) => {
      delete this.wished[name];
      this.set(this.form.elements[name], to);
      this.changed(undefined, kept);
    };
    if (passing) this.back ??= () => { this.back = undefined; turn(before, false); };
    turn(value, !passing);
  }

  /** Go from a cell to the next one in the direction of an arrow key. */
  step(event) {
    const cells = [...this.parts.picture.querySelectorAll("[data-set]")], here = cells.indexOf(document.activeElement);
    const aside = { ArrowLeft: -1, ArrowRight: 1 }[event.key], down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (here < 0 || !(aside || down)) return;
    event.preventDefault();
    if (aside) return cells[here + aside]?.focus();
    const from = cells[here].getBoundingClientRect();
    const far = (cell) => {
      const { x, y } = cell.getBoundingClientRect();
      return (y - from.y) * down > 1 ? 1000 * Math.abs(y - from.y) + Math.abs(x - from.x) : Infinity;
    };
    const next = cells.reduce((best, cell) => (far(cell) < far(best) ? cell : best));
    if (far(next) < Infinity) next.focus();
  }

  /** Answer what changed; without a control, all of it. Kept in the address, unless a pointer only passes. */
  changed(control, kept = true) {
    this.controls().forEach((control) => this.label(control));
    this.unknown.replaceChildren();
    if (kept) this.remember();
    this.touched = performance.now();
    if (control && this.button && (this.pending || !("quick" in control.dataset))) return this.pend();
    return this.run();
  }

  /** Say that what is shown is the state before, until the button is pressed. */
  pend() {
    this.pending = true;
    this.root.dataset.stale = "";
    if (!this.busy) this.note.textContent = `What is grey is the state before: press "${this.button.textContent}".`;
  }

  reset(event) {
    event.preventDefault();
    this.wished = {};
    this.controls().forEach((control) => this.set(control, this.first[control.name]));
    this.changed();
  }

  warm() {
    if (this.python.worker) return;
    this.note.textContent = STARTING;
    this.python.ask().then(
      () => { if (this.note.textContent === STARTING) this.note.textContent = "Python is ready."; },
      (error) => this.failed(error),
    );
  }

  /** Answer the newest state; states that were passed over while Python was busy are left out. */
  async run() {
    if (this.busy) return;
    this.busy = true;
    this.pending = false;
    try {
      for (let asked = null; asked !== JSON.stringify(this.state()); ) {
        const state = this.state();
        asked = JSON.stringify(state);
        if (this.same(state) && !this.python.started) {
          // The page came with this answer.
          this.show(this.firstAnswer);
          this.note.textContent = "";
          continue;
        }
        if (!this.python.started) this.note.textContent = STARTING;
        else if (this.button) this.note.textContent = "Searching: seconds, more for large clusters and mixtures.";
        this.root.setAttribute("aria-busy", "true");
        const answer = await this.python.ask(this.root.dataset.module, state);
        if (answer.error === undefined) {
          this.show(answer);
          this.note.textContent = `Computed here, by ${this.root.dataset.module}.`;
        } else this.refused(answer.error);
        this.root.dataset.milliseconds = (performance.now() - this.touched).toFixed(1);
        if (asked === JSON.stringify(this.state())) this.clip(state, answer.state ?? state);
        else if (this.button) {
          this.busy = false;
          return this.pend();
        }
      }
    } catch (error) {
      this.failed(error);
    } finally {
      this.busy = false;
      this.root.removeAttribute("aria-busy");
    }
  }

  show(answer) {
    const held = this.parts.picture.contains(document.activeElement) && document.activeElement.dataset.set;
    for (const part of PARTS) this.parts[part].innerHTML = answer[part];
    // The cell that had the keyboard is drawn anew.
    this.showing = true;
    if (held) this.parts.picture.querySelector(`[data-set="${held}"]`)?.focus({ preventScroll: true });
    this.showing = false;
    this.offer();
    delete this.root.dataset.stale;
    this.answered();
    if (answer.numbers) this.root.dataset.numbers = JSON.stringify(answer.numbers);
  }

  /** Show the question, if there is one, and the command. */
  offer() {
    this.parts.question.hidden = !this.parts.question.textContent;
    this.parts.command.closest(".livecalc-command").hidden = !this.parts.command.textContent;
  }

  /** Ask what takes longer than an answer may. */
  async question() {
    const asked = JSON.stringify(this.state());
    this.parts.reply.textContent = "Computing: some seconds.";
    try {
      const { reply, error } = await this.python.ask(this.root.dataset.module, this.state(), true);
      // Another answer has come meanwhile, and took this one's place.
      if (asked !== JSON.stringify(this.state())) return;
      if (error === undefined) this.parts.reply.innerHTML = reply;
      else this.parts.reply.textContent = error;
      this.root.dataset.replies = Number(this.root.dataset.replies ?? 0) + 1;
    } catch (error) {
      this.parts.reply.replaceChildren();
      this.failed(error);
    }
  }

  async copy(button) {
    const what = button.dataset.copy;
    if (what === "address") this.remember();
    const words = what === "address" ? location.href : this.parts[what].textContent;
    await navigator.clipboard.writeText(words);
    const { textContent: label } = button;
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  }

  answered() {
    this.root.dataset.answers = Number(this.root.dataset.answers ?? 0) + 1;
  }

  /** Let every control show the value that was computed. */
  clip(asked, computed) {
    for (const control of this.controls()) {
      const value = String(computed[control.name]);
      if (this.value(control) !== value) this.set(control, value);
      if (value === asked[control.name]) delete this.wished[control.name];
      else this.wished[control.name] = asked[control.name];
    }
  }

  /** Say why there is no answer; what was shown before stays, in grey. */
  refused(why) {
    this.note.textContent = `${why}. What is grey below is the state before.`;
    this.root.dataset.stale = "";
    this.answered();
  }

  failed(error) {
    const why = error.message.trim().split("\n").at(-1);
    this.note.textContent =
      (this.python.started ? `Python could not answer: ${why}. ` : `Python did not start (${why}). `) +
      "What is grey below is the state before; change a control to try again.";
    this.root.dataset.stale = "";
  }

  /** Keep what differs from the first state in the page's address. */
  remember() {
    const address = new URL(location.href);
    for (const [key] of this.asked()) address.searchParams.delete(key);
    for (const [name, value] of Object.entries(this.state())) {
      if (value !== this.first[name]) address.searchParams.set(`${this.root.dataset.name}.${name}`, value);
    }
    address.hash = this.root.id;
    if (address.href.length > LONGEST) {
      this.unknown.replaceChildren(sentence("With all of this the address would be too long: it has the state before."));
      return;
    }
    history.replaceState(history.state, "", address);
  }

  /** What the page's address asks of this explorer: keys, names and values. */
  asked() {
    const prefix = `${this.root.dataset.name}.`;
    return [...new URL(location.href).searchParams]
      .filter(([key]) => key.startsWith(prefix))
      .map(([key, value]) => [key, key.slice(prefix.length), value]);
  }

  /** Take the state from the page's address: who follows a link to a state asks for its numbers, and lands there. */
  restore() {
    for (const [, name, value] of this.asked()) {
      const control = this.controls().find((each) => each.name === name);
      if (control && this.set(control, value)) continue;
      const known = control ? this.options(control).map(([option]) => option) : Object.keys(this.first);
      const what = control ? `${name}=${value}` : name;
      this.unknown.append(sentence("The address asks for ", what, `, which is not one of ${known.join(", ")}.`));
    }
    if (this.unknown.hasChildNodes()) {
      const shown = Object.entries(this.state()).map(([name, value]) => `${name}=${value}`);
      this.unknown.append(sentence(`Shown: ${shown.join(", ")}.`));
    } else if (this.same(this.state())) return;
    // The address stays as it is until the reader touches a control.
    this.touched = performance.now();
    this.run();
    // Formulas above it grow when they are typeset: land again when they are.
    const land = () => this.root.scrollIntoView();
    land();
    window.addEventListener("load", () => (window.MathJax?.startup?.promise ?? Promise.resolve()).then(land));
  }
}

/** A paragraph in which what stands in an address is text, however it looks. */
function sentence(before, quoted = "", after = "") {
  const paragraph = document.createElement("p");
  const code = document.createElement("code");
  code.textContent = quoted.length > 60 ? `${quoted.slice(0, 60)} ...` : quoted;
  paragraph.append(before, ...(quoted ? [code] : []), after);
  return paragraph;
}

const STARTING = "Python starts in your browser: 7 to 15 MB, once.";

const roots = [...document.querySelectorAll(".livecalc")];
if (roots.length) {
  const python = new Python(roots[0].dataset);
  for (const root of roots) new Explorer(root, python);
}
