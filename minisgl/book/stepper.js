// Turns the frames of `minisgl.book.player` into one that steps. Without it, they are folded below each other.
(() => {
  const make = (parent, tag, style, attributes = {}) => {
    const made = document.createElement(tag);
    made.style.cssText = style;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    parent.append(made);
    return made;
  };
  const set_up = (root) => {
    const folded = [...root.querySelectorAll("details")];
    root.dataset.steps = folded.length;
    // JupyterLab leaves the keys to an element with this attribute.
    const names = { role: "group", "aria-label": `${folded.length} pictures to step through`, "data-lm-suppress-shortcuts": "true" };
    for (const [name, value] of Object.entries(names)) root.setAttribute(name, value);
    const bar = make(root, "div", "display:flex;align-items:center;gap:8px;max-width:760px");
    const look = "font:inherit;color:inherit;background:none;border:1px solid;border-radius:4px;min-width:44px;min-height:32px;cursor:pointer";
    const back = make(bar, "button", look, { type: "button", "aria-label": "previous picture" });
    const slider = make(bar, "input", "flex:1;min-width:60px;margin:0", { type: "range", min: 1, max: folded.length, "aria-label": "picture" });
    const next = make(bar, "button", look, { type: "button", "aria-label": "next picture" });
    const counter = make(bar, "output", "min-width:4.5em;text-align:right;font-variant-numeric:tabular-nums");
    [back.textContent, next.textContent] = ["\u25c0", "\u25b6"];
    // All frames share one cell of a grid, which is as tall as the tallest; so do their captions.
    const captions = make(root, "div", "display:grid;margin:6px 0");
    const stage = make(root, "div", "display:grid;overflow-x:auto");
    const frames = folded.map((each) => {
      const heading = each.querySelector("summary");
      const caption = make(captions, "strong", "grid-area:1/1");
      caption.textContent = heading.textContent.replace(/^\d+ of \d+(: )?/, "") || "\u00a0";
      heading.remove();
      const frame = make(stage, "div", "grid-area:1/1");
      frame.append(...each.childNodes);
      each.remove();
      return [caption, frame];
    });
    const show = (number) => {
      const index = Math.min(Math.max(number, 1), frames.length) - 1;
      frames.forEach((parts, other) => parts.forEach((part) => (part.style.visibility = other === index ? "visible" : "hidden")));
      counter.textContent = `${index + 1} of ${frames.length}`;
      slider.value = index + 1;
      slider.setAttribute("aria-valuetext", `${counter.textContent}: ${frames[index][0].textContent}`);
      const focused = document.activeElement;
      [back.disabled, next.disabled] = [index === 0, index === frames.length - 1];
      if (focused.disabled) slider.focus(); // or the next key would be lost
      for (const button of [back, next]) button.style.opacity = button.disabled ? 0.35 : 1;
    };
    const go = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    root.addEventListener("keydown", (event) => {
      if (!(event.key in go) || event.altKey || event.ctrlKey || event.metaKey) return;
      show(Number(slider.value) + go[event.key]);
      event.preventDefault();
      event.stopPropagation(); // elsewhere on a page of the book these keys turn to another chapter
    });
    back.addEventListener("click", () => show(Number(slider.value) - 1));
    next.addEventListener("click", () => show(Number(slider.value) + 1));
    slider.addEventListener("input", () => show(Number(slider.value)));
    show(1);
  };
  document.querySelectorAll(".minisgl-stepper:not([data-steps])").forEach(set_up);
})();
