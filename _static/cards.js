// What a link leads to, in a card beside it: a term, a source, an equation or a figure. Pointer and keyboard focus
// open it, Escape closes it, and it stays while the pointer is on it. It is taken from the page that the link leads
// to, so where that cannot be fetched there is none. A finger follows the link.

(() => {
  const LINKS = ["#term-", "references.html#", "#equation-", "#figure-"]
    .map((to) => `article a[href*="${to}"]`).join(", ");
  const OPEN_MS = 250, CLOSE_MS = 300; // on the way across a page, and on the way into the card
  const pages = new Map(), card = document.createElement("div");
  card.id = "card";
  card.className = "card-of-link bd-content";
  card.hidden = true;
  let link, timer, pointed; // pointed: what is awaited is the pointer's

  /** The page that a link leads to: this one, or one that is fetched once. */
  function page(url) {
    if (url.pathname === location.pathname) return document;
    if (!pages.has(url.pathname)) {
      pages.set(url.pathname, fetch(url.pathname).then((answer) => answer.ok ? answer.text() : Promise.reject())
        .then((html) => new DOMParser().parseFromString(html, "text/html")));
    }
    return pages.get(url.pathname);
  }

  /** Copies of what a link means: a term with its text, a source, a formula, a figure; nothing of all else. */
  function meant(target) {
    const term = target?.closest("dt"), one = target?.closest(".citation, div.math, figure");
    return (term ? [term, term.nextElementSibling] : one ? [one] : []).map((node) => node.cloneNode(true));
  }

  /** Formulas of a page that was fetched are still TeX; a page without formulas has no MathJax yet. */
  async function typeset(from) {
    if (!card.querySelector(".math:not(:has(mjx-container))")) return;
    if (!window.MathJax) {
      for (const script of from.querySelectorAll("script")) {
        if (!/MathJax/i.test(script.src + script.text.slice(0, 20))) continue;
        const own = document.createElement("script");
        const loaded = script.src && new Promise((go) => own.addEventListener("load", go));
        if (script.src) own.src = new URL(script.getAttribute("src"), from.address);
        else own.text = script.text;
        document.head.append(own);
        await loaded;
      }
    }
    await window.MathJax?.startup?.promise;
    await window.MathJax?.typesetPromise?.([card]);
  }

  /** Below the link, or above it where there is more room. */
  function place() {
    const at = link.getBoundingClientRect(), width = document.documentElement.clientWidth;
    const above = at.bottom + card.offsetHeight > innerHeight && at.top > innerHeight - at.bottom;
    card.style.left = `${scrollX + Math.max(8, Math.min(at.left, width - card.offsetWidth - 8))}px`;
    card.style.top = `${scrollY + (above ? at.top - card.offsetHeight - 4 : at.bottom + 4)}px`;
  }

  function close() {
    clearTimeout(timer);
    card.hidden = true;
    link?.removeAttribute("aria-describedby");
    link = undefined;
  }

  async function open(of) {
    if (of === link) return;
    close();
    link = of;
    const url = new URL(of.href), from = await Promise.resolve(page(url)).catch(() => null);
    const nodes = from ? meant(from.getElementById(decodeURIComponent(url.hash.slice(1)))) : [];
    if (link !== of || !nodes.length) return;
    from.address ??= url.href;
    card.replaceChildren(...nodes);
    for (const node of card.querySelectorAll("*")) {
      if (node.id && document.getElementById(node.id) !== node) node.removeAttribute("id");
      node.removeAttribute("tabindex");
    }
    for (const inner of card.querySelectorAll("a[href]")) {
      inner.href = new URL(inner.getAttribute("href"), url);
      inner.tabIndex = -1; // a keyboard goes on in the text
    }
    card.querySelectorAll(".headerlink").forEach((mark) => mark.remove());
    card.hidden = false;
    of.setAttribute("aria-describedby", card.id);
    place();
    await typeset(from);
    if (link === of) place();
  }

  const soon = (what, pause, event) => {
    clearTimeout(timer);
    pointed = event.type === "pointerover";
    timer = setTimeout(what, pause);
  };
  document.addEventListener("pointerover", (event) => {
    const over = event.target.closest(LINKS);
    if (event.pointerType === "touch") return;
    if (over) soon(() => open(over), OPEN_MS, event);
    else if (card.contains(event.target)) clearTimeout(timer);
    else if (link && !link.matches(":focus-visible")) soon(close, CLOSE_MS, event);
    else if (pointed) clearTimeout(timer); // a page that scrolls to what has the focus moves under the pointer
  });
  document.addEventListener("focusin", (event) => {
    const on = event.target.closest(LINKS);
    if (on?.matches(":focus-visible")) soon(() => open(on), OPEN_MS, event);
    else if (link) close();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && close());
  addEventListener("DOMContentLoaded", () => location.protocol !== "file:" && document.body.append(card));
})();
