// What is for instructors is shown when the switch on a page of "Teaching this course" is on; this browser remembers it.

(() => {
  const KEY = "rung.instructor", root = document.documentElement;
  const stored = () => {
    try { return localStorage.getItem(KEY) === "on"; } catch { return false; }
  };
  root.classList.toggle("instructor-on", stored());
  document.addEventListener("DOMContentLoaded", () => {
    for (const box of document.querySelectorAll("input.instructor-switch")) {
      box.disabled = false;
      box.checked = stored();
      box.addEventListener("change", () => {
        root.classList.toggle("instructor-on", box.checked);
        try { localStorage.setItem(KEY, box.checked ? "on" : "off"); } catch { /* shown until the page is left */ }
      });
    }
  });
})();
