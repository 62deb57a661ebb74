"use strict";
// Of `bireme watch`: asks whether the run has come further, and puts its new page in place of the old one.
(() => {
  const AGAIN_MS = 2000;
  const CONTROLS = "svg[data-range], input, button, summary";
  let version = document.documentElement.dataset.version;

  // While a part is looked at closely, or text is selected, nothing is taken away from the reader.
  const isInUse = () => document.querySelector("svg.near, .chosen") || !document.getSelection().isCollapsed;

  const note = (text) => {
    document.querySelector("#live").textContent = text;
  };

  const replace = (text) => {
    const next = new DOMParser().parseFromString(text, "text/html");
    const old = document.querySelector("main");
    const main = document.adoptNode(next.querySelector("main"));
    const places = [...old.querySelectorAll(CONTROLS)];
    const focused = places.indexOf(document.activeElement);
    const opened = [...old.querySelectorAll("details")].map((one) => one.open);
    for (const input of old.querySelectorAll("input:checked")) {
      const same = main.querySelector(`#${CSS.escape(input.id)}`);
      if (same) same.checked = true;
    }
    [...main.querySelectorAll("details")].forEach((one, place) => {
      one.open = opened[place] ?? one.open;
    });
    old.replaceWith(main);
    document.title = next.title;
    version = next.documentElement.dataset.version;
    dispatchEvent(new Event("renewed"));
    if (focused >= 0) main.querySelectorAll(CONTROLS)[focused]?.focus({ preventScroll: true });
  };

  const turn = async () => {
    try {
      const newest = await (await fetch("version", { cache: "no-store" })).text();
      const waits = newest !== version && isInUse();
      if (newest !== version && !waits) replace(await (await fetch("./", { cache: "no-store" })).text());
      note(waits ? "live; new figures wait until you zoom out and select no text" : "live");
    } catch {
      note("bireme watch has ended: this page is not updated any more");
    }
    setTimeout(turn, AGAIN_MS);
  };
  turn();
})();
