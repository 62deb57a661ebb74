"use strict";
// What the page can do besides showing: a cross-hair with values, and a zoom along x. Without it nothing is lost.
(() => {
  const CLOCK_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const MOST_MARKS = 9;
  const LEAST_DRAG = 6;
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

  class Plot {
    constructor(svg) {
      this.svg = svg;
      this.along = svg.dataset.along;
      [this.least, this.most, this.start, this.end] = JSON.parse(svg.dataset.range);
      [this.from, this.to] = [this.least, this.most];
      this.axis = svg.querySelector(".x-axis");
      this.allMarks = this.axis.innerHTML;
      // What is placed by a transform of its own keeps its shape when the rest is stretched.
      this.rigid = [...svg.querySelectorAll(".zoomed [transform]")].map((one) => [one, one.getAttribute("transform")]);
      const figure = svg.closest("figure");
      const data = figure.querySelector("script.data");
      this.curves = data ? JSON.parse(data.textContent) : [];
      svg.addEventListener("pointerdown", (event) => this.press(event));
      svg.addEventListener("pointermove", (event) => this.move(event));
      svg.addEventListener("pointerup", (event) => this.release(event));
      svg.addEventListener("pointercancel", () => this.leave());
      svg.addEventListener("pointerleave", () => this.leave());
      svg.addEventListener("dblclick", () => this.showAll());
      figure.addEventListener("change", () => this.showAll());
    }

    // Where the pointer is, in the picture's own pixels, kept within the plot.
    at(event) {
      const box = this.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * this.svg.viewBox.baseVal.width;
      return Math.min(Math.max(x, this.start), this.end);
    }

    value(x) {
      return this.from + ((x - this.start) / (this.end - this.start)) * (this.to - this.from);
    }

    place(value) {
      return this.start + ((value - this.from) / (this.to - this.from)) * (this.end - this.start);
    }

    press(event) {
      if (event.button !== 0 || event.pointerType === "touch") return;
      this.pressed = this.at(event);
      this.svg.setPointerCapture(event.pointerId);
    }

    move(event) {
      const x = this.at(event);
      if (this.pressed !== undefined) {
        this.hideCross();
        const height = Number(this.svg.dataset.bottom) || JSON.parse(this.svg.dataset.height)[2];
        this.chosen ??= shape(this.svg, "rect", { class: "chosen", y: 0, height });
        this.chosen.setAttribute("x", Math.min(x, this.pressed));
        this.chosen.setAttribute("width", Math.abs(x - this.pressed));
      } else if (this.curves.length) {
        this.showCross(x);
      }
    }

    release(event) {
      const [a, b] = [this.pressed, this.at(event)];
      this.pressed = undefined;
      this.chosen?.remove();
      this.chosen = undefined;
      if (a !== undefined && Math.abs(a - b) > LEAST_DRAG) {
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

    showAll() {
      this.zoom(this.least, this.most);
    }

    zoom(from, to) {
      [this.from, this.to] = [from, to];
      const factor = (this.most - this.least) / (to - from);
      const isWhole = from === this.least && to === this.most;
      const begin = this.start + ((from - this.least) / (this.most - this.least)) * (this.end - this.start);
      const moved = isWhole ? "" : `translate(${this.start - begin * factor} 0) scale(${factor} 1)`;
      this.svg.querySelector(".zoomed").setAttribute("transform", moved);
      for (const [one, known] of this.rigid) {
        one.setAttribute("transform", isWhole ? known : `${known} scale(${1 / factor} 1)`);
      }
      if (isWhole) this.axis.innerHTML = this.allMarks;
      else this.mark();
      this.hideCross();
      if (!isWhole) this.button ??= this.wholeButton();
      if (this.button) this.button.hidden = isWhole;
    }

    wholeButton() {
      const button = element("button", "whole", "show all");
      button.type = "button";
      button.addEventListener("click", () => this.showAll());
      return this.svg.parentElement.appendChild(button);
    }

    // New marks in place of the old: each is a line with its text behind it.
    mark() {
      const texts = [...this.axis.querySelectorAll("text")];
      if (!texts.length) return;
      const [line, text] = [texts[0].previousElementSibling.cloneNode(), texts[0].cloneNode(true)];
      for (const old of texts) {
        old.previousElementSibling.remove();
        old.remove();
      }
      const step = stepFor[this.along]((this.to - this.from) / MOST_MARKS);
      for (let place = Math.ceil(this.from / step - 1e-9); place * step <= this.to; place += 1) {
        const x = this.place(place * step);
        const [newLine, newText] = [line.cloneNode(), text.cloneNode(true)];
        newLine.setAttribute("x1", x);
        newLine.setAttribute("x2", x);
        newText.setAttribute("x", x);
        newText.textContent = textFor[this.along](place * step);
        this.axis.append(newLine, newText);
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
      this.cross ??= shape(this.svg, "line", { class: "cross", y1: bottom, y2: top });
      const cross = this.place(place);
      this.cross.setAttribute("x1", cross);
      this.cross.setAttribute("x2", cross);
      this.tip ??= this.svg.parentElement.appendChild(element("div", "tip"));
      const head = this.along === "steps" ? `step ${textFor.steps(place)}` : textFor[this.along](place);
      this.tip.replaceChildren(element("div", "when", head), ...rows.map((row) => this.row(row)));
      const width = this.svg.getBoundingClientRect().width;
      const part = (cross / this.svg.viewBox.baseVal.width) * width;
      const isRight = part + this.tip.offsetWidth + 24 > width;
      this.tip.style.left = `${isRight ? part - this.tip.offsetWidth - 12 : part + 12}px`;
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
      this.cross = this.tip = undefined;
    }
  }

  for (const svg of document.querySelectorAll("svg[data-range]")) new Plot(svg);
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
