// What is wider than its column scrolls in its own box, and the box says so: it fades where more is, a line below it
// names the way, and a keyboard reaches it. Displayed formulas are broken anew when their column has another width.

(() => {
  const BOXES = [
    "pre", "td", ".output", ".text_html", "div.math", 'mjx-container[display="true"]', ".pst-scrollable-table-container",
    "div.line-block",
  ].map((box) => `article.bd-article ${box}`).join(", ");
  const METRICS = 110; // MathJax's STATE.METRICS: from there on widths are measured again

  function scrolls(box) {
    return box.scrollWidth > box.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(box).overflowX);
  }

  /** Fade the edges of a box behind which there is more. */
  function fade(box) {
    const left = box.scrollLeft, right = box.scrollWidth - box.clientWidth - left;
    box.classList.toggle("more-left", left > 1);
    box.classList.toggle("more-right", right > 1);
  }

  function mark(box) {
    const wide = scrolls(box);
    if (wide !== box.classList.contains("wide")) {
      box.classList.toggle("wide", wide);
      if (wide) {
        box.tabIndex = 0;
        // A cell of a table stays one; all else is named for who comes to it by keyboard.
        if (box.tagName !== "TD") {
          box.setAttribute("role", "group");
          box.setAttribute("aria-label", "Scrolls sideways");
        }
        box.addEventListener("scroll", () => fade(box), { passive: true });
      } else {
        for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
        box.classList.remove("more-left", "more-right");
      }
    }
    if (wide) fade(box);
  }

  const tried = new WeakMap(); // the width at which a formula was last broken, whether that was enough or not
  let article, formulas;

  function look() {
    const width = article.clientWidth;
    const cut = new Set();
    if (formulas) {
      for (const box of document.querySelectorAll(BOXES)) {
        const formula = box.closest("div.math");
        if (formula && scrolls(box) && tried.get(formula) !== width) cut.add(formula);
      }
    }
    cut.forEach((formula) => tried.set(formula, width));
    if (cut.size) formulas.rerender(METRICS);
    document.querySelectorAll(BOXES).forEach(mark);
  }

  addEventListener("DOMContentLoaded", () => {
    article = document.querySelector("article.bd-article");
    if (!article) return;
    let waiting = 0;
    // Its height changes with all that changes the width of something in it: a turned telephone, a fold, a formula.
    new ResizeObserver(() => {
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(look);
    }).observe(article);
    addEventListener("load", () => window.MathJax?.startup?.promise?.then(() => {
      formulas = window.MathJax.startup.document;
      look();
    }));
  });

  // On paper nothing can be unfolded, and a dark page would be ink; the code of a figure stays on the site.
  let folded = [], theme;
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("article details:not([open], .code-fold)")];
    folded.forEach((fold) => { fold.open = true; });
    theme = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
  });
  addEventListener("afterprint", () => {
    folded.forEach((fold) => { fold.open = false; });
    document.documentElement.dataset.theme = theme;
  });
})();
