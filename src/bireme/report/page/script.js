"use strict";
// A cross-hair with values and a zoom along x, by pointer and by keyboard. Without it the page shows all it has.
(() => {
  const CLOCK_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const MARK_WIDTH = 90;
  const LEAST_DRAG = 6;
  const MOST_ZOOM = 1e4;
  const NEAR = 0.03;

  const roundStep = (least) => {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
  };
  const stepFor = {
    steps: (least) => Math.max(roundStep(least), 1),
    time: (least) => (least > 1 && CLOCK_STEPS_S.find((step) => step >= least)) || roundStep(least),
    seconds: roundStep,
  };
  const two = (value) => String(value).padStart(2, "0");
  const shortest = (value, digits) => String(Number(value.toPrecision(digits)));
  const clockText = (seconds) => {
    const whole = Math.round(seconds);
    if (whole < 60) return `${seconds < 10 ? shortest(seconds, 3) : whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)} min`;
    if (whole < 86400) return `${Math.floor(whole / 3600)}:${two(Math.floor((whole % 3600) / 60))} h`;
    return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
  };
  const secondsText = (seconds) => {
    const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, least]) => seconds >= least) || ["µs", 1e-6];
    return seconds === 0 ? "0 s" : `${shortest(seconds / size, 4)} ${unit}`;
  };
  const textFor = {
    steps: (value) => Math.round(value).toLocaleString("en"),
    time: clockText,
    seconds: secondsText,
  };
  const element = (name, role, text) => {
    const made = document.createElement(name);
    made.className = role;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const shape = (svg, name, attributes) => {
    const made = document.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return svg.appendChild(made);
  };
  // The place of the value next to x in a rising list.
  const nearest = (values, x) => {
    let low = 0;
    let high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low > 0 && x - values[low - 1] < values[low] - x ? low - 1 : low;
  };

  // A chart. Places along x are shares of its width, from 0 to 1; `from` and `to` are the values at its ends.
  class Plot {
    constructor(svg) {
      this.svg = svg;
      this.along = svg.dataset.along;
      [this.least, this.most] = JSON.parse(svg.dataset.range);
      [this.from, this.to] = [this.least, this.most];
      this.moving = svg.querySelector(".moving");
      this.marks = svg.querySelector(".x-axis");
      this.texts = [...svg.querySelectorAll("[data-needed]")];
      const figure = svg.closest("figure");
      const data = figure.querySelector("script.data");
      this.curves = data ? JSON.parse(data.textContent) : [];
      svg.addEventListener("pointerdown", (event) => this.press(event));
      svg.addEventListener("pointermove", (event) => this.move(event));
      svg.addEventListener("pointerup", (event) => this.release(event));
      svg.addEventListener("pointercancel", () => this.leave());
      svg.addEventListener("pointerleave", () => this.leave());
      svg.addEventListener("dblclick", () => this.showAll());
      svg.addEventListener("keydown", (event) => this.key(event));
      svg.addEventListener("blur", () => this.hideCross());
      figure.addEventListener("change", () => this.showAll());
      const values = this.curves.length ? "left and right read values, " : "";
      svg.tabIndex = 0;
      svg.setAttribute("role", "application");
      svg.setAttribute("aria-roledescription", "chart");
      svg.setAttribute("aria-label", `${svg.getAttribute("aria-label")}: ${values}plus and minus zoom, escape shows all`);
    }

    get width() {
      return this.svg.getBoundingClientRect().width;
    }

    // Where the pointer is, kept within the plot.
    at(event) {
      const box = this.svg.getBoundingClientRect();
      return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    }

    value(x) {
      return this.from + x * (this.to - this.from);
    }

    place(value) {
      return (value - this.from) / (this.to - this.from);
    }

    press(event) {
      if (event.button !== 0) return;
      if (event.pointerType === "touch") return this.move(event);
      this.pressed = this.at(event);
      this.svg.setPointerCapture(event.pointerId);
    }

    move(event) {
      const x = this.at(event);
      if (this.pressed !== undefined) {
        this.hideCross();
        this.chosen ??= shape(this.svg, "rect", { class: "chosen", y: 0, height: this.svg.dataset.bottom });
        this.chosen.setAttribute("x", `${100 * Math.min(x, this.pressed)}%`);
        this.chosen.setAttribute("width", `${100 * Math.abs(x - this.pressed)}%`);
      } else if (this.curves.length) {
        this.showCross(x);
      }
    }

    release(event) {
      const [a, b] = [this.pressed, this.at(event)];
      this.pressed = undefined;
      this.chosen?.remove();
      this.chosen = undefined;
      if (a !== undefined && Math.abs(a - b) * this.width > LEAST_DRAG) {
        this.zoom(this.value(Math.min(a, b)), this.value(Math.max(a, b)));
      }
    }

    leave() {
      this.hideCross();
      if (this.pressed === undefined) return;
      this.pressed = undefined;
      this.chosen?.remove();
      this.chosen = undefined;
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const isRight = event.key === "ArrowRight";
      if (isRight || event.key === "ArrowLeft") {
        const step = (isRight ? 1 : -1) * (event.shiftKey ? 10 : 1);
        if (this.curves.length) this.walk(step);
        else this.shift(0.1 * step);
      } else if (event.key === "+" || event.key === "=") this.scale(0.5);
      else if (event.key === "-") this.scale(2);
      else if (event.key === "Escape" || event.key === "0") this.showAll();
      else if (event.key === "Home" && this.curves.length) this.showCross(0);
      else if (event.key === "End" && this.curves.length) this.showCross(1);
      else return;
      event.preventDefault();
    }

    // The cross-hair to a value further along the curve that has most of them.
    walk(step) {
      const places = this.curves.map((curve) => curve[this.along]).reduce((a, b) => (b.length > a.length ? b : a));
      const now = this.crossAt === undefined ? (step > 0 ? -1 : places.length) : nearest(places, this.crossAt);
      const next = places[Math.min(Math.max(now + step, 0), places.length - 1)];
      if (next < this.from || next > this.to) this.shift(this.place(next) - 0.5);
      this.showCross(this.place(next));
    }

    // A smaller or larger part, around the cross-hair or the middle.
    scale(factor) {
      const read = this.crossAt;
      const middle = read ?? (this.from + this.to) / 2;
      const span = Math.max((this.to - this.from) * factor, (this.most - this.least) / MOST_ZOOM);
      if (span >= this.most - this.least) return this.showAll();
      const from = Math.min(Math.max(middle - span / 2, this.least), this.most - span);
      this.zoom(from, from + span);
      if (read !== undefined) this.showCross(this.place(read));
    }

    shift(share) {
      const span = this.to - this.from;
      const from = Math.min(Math.max(this.from + share * span, this.least), this.most - span);
      if (span < this.most - this.least) this.zoom(from, from + span);
    }

    showAll() {
      this.zoom(this.least, this.most);
    }

    zoom(from, to) {
      [this.from, this.to] = [from, to];
      const factor = (this.most - this.least) / (to - from);
      const isWhole = from === this.least && to === this.most;
      this.svg.classList.toggle("near", !isWhole);
      this.moving.setAttribute("x", `${(-100 * factor * (from - this.least)) / (this.most - this.least)}%`);
      this.moving.setAttribute("width", `${100 * factor}%`);
      const room = this.width * factor;
      for (const text of this.texts) {
        text.style.display = isWhole ? "" : room >= text.dataset.needed ? "inline" : "none";
      }
      if (!isWhole) this.mark();
      this.hideCross();
      if (!isWhole) this.button ??= this.wholeButton();
      if (this.button) this.button.hidden = isWhole;
    }

    wholeButton() {
      const button = element("button", "whole", "show all");
      button.type = "button";
      button.addEventListener("click", () => {
        this.showAll();
        this.svg.focus({ preventScroll: true });
      });
      return this.svg.parentElement.appendChild(button);
    }

    // Marks of the part that is shown, like those of the whole.
    mark() {
      const [line, text] = ["line:not(:first-child)", "text"].map((name) => this.marks.querySelector(name));
      if (!line || !text) return;
      this.own ??= shape(this.svg, "g", { class: "x-axis own" });
      this.own.replaceChildren(this.marks.firstChild.cloneNode());
      const step = stepFor[this.along]((this.to - this.from) / Math.max(this.width / MARK_WIDTH, 2));
      for (let place = Math.ceil(this.from / step - 1e-9); place * step <= this.to; place += 1) {
        const x = `${100 * this.place(place * step)}%`;
        const [newLine, newText] = [line.cloneNode(), text.cloneNode(true)];
        newLine.setAttribute("x1", x);
        newLine.setAttribute("x2", x);
        newText.setAttribute("x", x);
        newText.textContent = textFor[this.along](place * step);
        this.own.append(newLine, newText);
      }
    }

    showCross(x) {
      const value = this.value(x);
      const rows = this.curves.flatMap((curve) => {
        const places = curve[this.along];
        const found = nearest(places, value);
        const isNear = Math.abs(places[found] - value) <= NEAR * (this.to - this.from);
        return isNear ? [{ curve, place: places[found], value: curve.values[found] }] : [];
      });
      if (!rows.length) return this.hideCross();
      const place = rows.reduce((a, b) => (Math.abs(a.place - value) <= Math.abs(b.place - value) ? a : b)).place;
      const [, , bottom, top] = JSON.parse(this.svg.dataset.height);
      this.crossAt = place;
      const cross = this.place(place);
      this.cross ??= shape(this.svg, "line", { class: "cross", y1: bottom, y2: top });
      this.cross.setAttribute("x1", `${100 * cross}%`);
      this.cross.setAttribute("x2", `${100 * cross}%`);
      if (!this.tip) {
        this.tip = this.svg.parentElement.appendChild(element("div", "tip"));
        this.tip.setAttribute("role", "status");
      }
      const head = this.along === "steps" ? `step ${textFor.steps(place)}` : textFor[this.along](place);
      this.tip.replaceChildren(element("div", "when", head), ...rows.map((row) => this.row(row)));
      const [part, width, own] = [cross * this.width, this.width, this.tip.offsetWidth];
      const left = part + own + 24 > width ? part - own - 12 : part + 12;
      this.tip.style.left = `${Math.max(Math.min(left, width - own), 0)}px`;
    }

    row({ curve, value }) {
      const row = element("div", "key");
      row.append(element("i", `key-box c${curve.colour}`), element("span", "", curve.label));
      row.append(element("b", "", shortest(value, 6)));
      return row;
    }

    hideCross() {
      this.cross?.remove();
      this.tip?.remove();
      this.cross = this.tip = this.crossAt = undefined;
    }
  }

  const begin = () => {
    for (const svg of document.querySelectorAll("svg[data-range]")) new Plot(svg);
  };
  begin();
  addEventListener("renewed", begin);
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
