// Guesses and questions of a chapter, and the marks on the ladder. What a reader answers stays in the browser.

(() => {
  const KEY = "rung-by-rung:", PASSED = 0.8; // four of five questions
  const rung = location.pathname.match(/\/book\/(\d\d)_[^/]*$/)?.[1];

  /** The numbers that a text may mean: one separator before three digits may be a comma or of thousands. */
  function readings(text, unit) {
    const plain = text.replace(unit, "").replace(/[\s~'’]/g, "");
    if (!/^[-+]?(\d[\d.,]*|[.,]\d+)(e[-+]?\d+)?$/i.test(plain)) return [];
    const decimal = plain.replace(/[.,](?=.*[.,])/g, "").replace(",", ".");
    const grouped = /^[-+]?\d{1,3}((,\d{3})+|(\.\d{3})+)$/.test(plain);
    return (grouped ? [plain.replace(/[.,]/g, ""), decimal] : [decimal]).map(Number);
  }

  /** How far a number is off, in words. */
  function error(value, answer) {
    const ratio = value / answer, way = value > answer ? "high" : "low", percent = Math.round(100 * Math.abs(ratio - 1));
    if (!(ratio > 0) || !isFinite(ratio) || !percent) return ".";
    if (ratio < 2 && ratio > 0.5) return `: ${percent} percent too ${way}.`;
    return `: too ${way} by a factor of ${+Math.max(ratio, 1 / ratio).toPrecision(2)}.`;
  }

  /** Judge a number: whether it is right, what to say, and which of the known mistakes it is; a text has no verdict. */
  function judge(text, { answer, low, high, shown, unit, same }, mistakes = []) {
    const off = (value) => (value * answer > 0 ? Math.abs(Math.log(value / answer)) : Infinity);
    const [value] = readings(text, unit).sort((a, b) => off(a) - off(b));
    const of = unit ? ` ${unit}` : "", slack = 1e-9 * Math.abs(answer);
    if (value === undefined) return { said: `Type a number${unit ? `, in ${unit}` : ""}.` };
    const right = value >= +low - slack && value <= +high + slack;
    const said = `${right ? "Right. " : ""}You said ${text.replace(unit, "").trim()}${of}, it is ${shown}${of}${error(value, answer)}`;
    const mistake = right ? -1 : mistakes.findIndex((known) => Math.abs(value - known) <= same * Math.abs(known));
    return { right, said, mistake };
  }

  function marks(of) {
    try { return JSON.parse(localStorage.getItem(KEY + of)) ?? {}; } catch { return {}; }
  }

  function save(change) {
    try { localStorage.setItem(KEY + rung, JSON.stringify({ ...marks(rung), ...change })); } catch { /* not remembered */ }
  }

  function element(tag, words, attributes) {
    return Object.assign(document.createElement(tag), { textContent: words, ...attributes });
  }

  /** Fold what answers a guess, and return what unfolds it for good. */
  function cover(cell, blocks) {
    const fold = element("details", "", { className: "measured covered" });
    fold.append(element("summary", "Folded until your guess. Show without guessing"));
    cell.after(fold);
    for (; blocks > 0 && fold.nextElementSibling; blocks--) fold.append(fold.nextElementSibling);
    return () => fold.replaceWith(...[...fold.children].slice(1));
  }

  function wake(form) {
    const fold = form.querySelector(".answer"), result = form.querySelector(".result"), { answer, name, covers } = form.dataset;
    const field = form.querySelector("[type=text]"), mistakes = [...form.querySelectorAll(".mistake")];
    const uncover = +covers ? cover(form.closest(".cell"), covers) : () => {};
    fold.firstElementChild.addEventListener("click", uncover, { once: true });
    form.querySelector(".ask").hidden = false;

    /** Judge an answer and show it; say whether it was one. */
    function show(said) {
      // What is typed may be anything, and no selector.
      const chosen = field ? null : form.querySelector(`[value="${CSS.escape(said)}"]`), right = said === answer;
      const judged = field ? judge(said, form.dataset, mistakes.map((known) => +known.dataset.value))
        : chosen ? { right, said: right ? "Right." : `No, it is ${answer}.` } : { said: "Choose one." };
      result.textContent = judged.said;
      if (judged.right === undefined) return false;
      if (judged.mistake >= 0) result.append(" ", ...mistakes[judged.mistake].cloneNode(true).childNodes);
      if (field) Object.assign(field, { value: said, readOnly: true });
      else chosen.checked = true;
      form.querySelectorAll("[type=radio]").forEach((radio) => { radio.disabled = radio !== chosen; });
      form.querySelector("button").hidden = true;
      form.dataset.said = judged.right ? "right" : "wrong";
      fold.open = true;
      uncover();
      return true;
    }

    const before = marks(rung).answers?.[name];
    if (before) show(before);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const said = (field ?? form.querySelector(":checked"))?.value ?? "";
      if (!show(said)) return;
      result.tabIndex = -1; // the button that had the focus is gone
      result.focus();
      save({ answers: { ...marks(rung).answers, [name]: said } });
      count();
    });
  }

  /** Write down how far the chapter is, for the ladder, and say below its questions whether they are passed. */
  function count() {
    const all = (kind, said = "") => document.querySelectorAll(`form.${kind}${said}`).length;
    const right = all("question", "[data-said=right]"), answered = all("question", "[data-said]"), questions = all("question");
    save({ guessed: [all("guess", "[data-said]"), all("guess")], right: [right, answered, questions] });
    if (!answered) return;
    const words = right >= PASSED * questions ? "Passed" : answered < questions ? "So far" : "Not passed";
    const end = document.querySelector(".questions-end");
    end.replaceChildren(`${words}: ${right} of ${questions} right. `);
    if (answered < questions) return;
    const again = end.appendChild(element("button", "Ask me again", { type: "button" }));
    again.addEventListener("click", () => {
      const { answers } = marks(rung);
      document.querySelectorAll("form.question").forEach((form) => delete answers[form.dataset.name]);
      save({ answers, right: [0, 0, questions] });
      location.reload();
    });
  }

  function chapter() {
    const questions = document.querySelectorAll("form.question");
    questions[questions.length - 1]?.after(element("p", "", { className: "questions-end", role: "status" }));
    document.querySelectorAll("form.asked").forEach(wake);
    if (Object.keys(marks(rung)).length) count();
    const unfold = () => {
      const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
      const fold = target?.closest("details.covered:not([open])");
      if (fold) fold.open = true;
      if (fold) target.scrollIntoView();
    };
    unfold();
    addEventListener("hashchange", unfold);
    new IntersectionObserver(([end], watch) => {
      if (!end.isIntersecting || !scrollY) return;
      watch.disconnect();
      save({ read: true });
      count();
    }).observe(document.querySelector("article.bd-article").appendChild(element("div", "")));
  }

  /** What a reader has done of a rung, in words. */
  function stand({ read, guessed: [guesses, ofGuesses] = [], right: [right, answered, questions] = [] }) {
    const passed = right >= PASSED * questions ? `passed, ${right} of ${questions} questions` : `${right} of ${questions} questions`;
    return [read && "read", guesses && `guessed ${guesses} of ${ofGuesses}`, answered && passed].filter(Boolean).join(" · ");
  }

  function ladder(section) {
    for (const link of section.querySelectorAll("td:first-child a[href*='book/']")) {
      const of = link.getAttribute("href").match(/book\/(\d\d)_/)[1];
      link.closest("td").append(element("div", stand(marks(of)), { className: "rung-mark" }));
    }
    const made = section.querySelectorAll(".rung-mark:not(:empty)");
    if (!made.length) return;
    const forget = element("button", "Forget my marks", { type: "button" });
    forget.addEventListener("click", () => {
      Object.keys(localStorage).filter((key) => key.startsWith(KEY)).forEach((key) => localStorage.removeItem(key));
      made.forEach((mark) => mark.remove());
      forget.replaceWith(element("p", "Forgotten.", { role: "status" }));
    });
    section.append(forget);
  }

  globalThis.questions = { judge }; // for its tests
  addEventListener("DOMContentLoaded", () => {
    const section = document.querySelector("#the-ladder");
    if (rung) chapter();
    else if (section) ladder(section);
  });
})();
