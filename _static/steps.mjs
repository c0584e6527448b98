// A picture that is stepped through: every moving piece has a place for each step, from lablib.live.steps.

const SECONDS = 1.4;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

class StepThrough extends HTMLElement {
  connectedCallback() {
    if (this.pieces) return; // a fold that opens moves it
    this.pieces = [...this.querySelectorAll("[data-at]")].map((node) => [node, JSON.parse(node.dataset.at)]);
    this.sentences = [...this.querySelectorAll(".steps-all li")].map((item) => item.textContent);
    this.words = this.querySelector(".steps-words");
    this.slider = this.querySelector("input");
    this.button = this.querySelector("[data-play]");
    this.slider.addEventListener("input", () => this.pause() || this.show());
    this.button.addEventListener("click", () => (this.timer ? this.pause() : this.play()));
    for (const button of this.querySelectorAll("[data-step]")) {
      button.addEventListener("click", () => this.pause() || this.go(Number(button.dataset.step)));
    }
    this.label();
  }

  disconnectedCallback() {
    clearInterval(this.timer);
  }

  get step() {
    return Number(this.slider.value);
  }

  go(by) {
    this.slider.value = this.step + by;
    this.show();
  }

  /** Move every piece to its place of the step, and say what happens. */
  show() {
    for (const [node, places] of this.pieces) {
      const place = places[this.step];
      node.style.opacity = place ? 1 : 0;
      if (!place) continue;
      const [x, y, wide, high] = place;
      node.style.transform = `translate(${x}px, ${y}px)` + (wide === undefined ? "" : ` scale(${wide}, ${high})`);
    }
    this.words.textContent = this.sentences[this.step];
    this.label();
  }

  label() {
    const words = `${this.step + 1} of ${this.sentences.length}`;
    this.slider.setAttribute("aria-valuetext", `step ${words}`);
    this.words.dataset.step = words;
  }

  /** Play to the end, from the start again if it is there; who asked for less motion steps by hand or hears one step. */
  play() {
    if (this.step === this.sentences.length - 1) {
      this.slider.value = 0;
      this.show();
    } else this.go(1);
    if (calm.matches) return;
    // A voice that reads each step would be interrupted by the next.
    this.words.setAttribute("aria-live", "off");
    this.button.textContent = "Pause";
    this.button.setAttribute("aria-label", "pause");
    this.timer = setInterval(() => {
      this.go(1);
      if (this.step === this.sentences.length - 1) this.pause();
    }, 1000 * SECONDS);
  }

  pause() {
    if (!this.timer) return;
    clearInterval(this.timer);
    this.timer = undefined;
    this.words.setAttribute("aria-live", "polite");
    this.button.textContent = "Play";
    this.button.setAttribute("aria-label", "play");
  }
}

customElements.define("step-through", StepThrough);
