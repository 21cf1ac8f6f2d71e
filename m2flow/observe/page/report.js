// Adds to a page that is complete without it: values under the pointer, and zooming of the timeline.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.documentElement.classList.add("has-js");
  const NS = "http://www.w3.org/2000/svg";
  const tip = document.body.appendChild(document.createElement("div"));
  tip.id = "tip";

  const element = (name, attributes, parent) => {
    const made = document.createElementNS(NS, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (parent) parent.appendChild(made);
    return made;
  };
  const number = (value, percent) =>
    value === null ? "–" : percent ? (100 * value).toFixed(1) + " %"
      : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  const showTip = (event, lines) => {
    tip.replaceChildren(...lines.map(([colour, text]) => {
      const line = document.createElement("div");
      if (colour !== null) line.appendChild(document.createElement("i")).style.background = `var(--c${colour})`;
      line.append(text);
      return line;
    }));
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
    tip.style.top = Math.max(8, Math.min(event.clientY + 14, innerHeight - box.height - 8)) + "px";
  };
  const hideTip = () => { tip.style.display = "none"; };

  // ---- curves: the same frame as svg.py
  const W = 360, H = 215, LEFT = 66, RIGHT = 12, TOP = 8, BOTTOM = 40;
  for (const svg of document.querySelectorAll("svg.chart")) {
    const chart = data.charts[svg.dataset.key];
    if (!chart) continue;
    let cross = null;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const px = (event.clientX - box.left) / box.width * W;
      const [low, high] = chart.x;
      const x = low + (px - LEFT) / (W - LEFT - RIGHT) * (high - low);
      const lines = [];
      let at = null;
      for (const series of chart.series) {
        let best = -1;
        series.x.forEach((value, i) => {
          if (value !== null && series.y[i] !== null && (best < 0 || Math.abs(value - x) < Math.abs(series.x[best] - x))) best = i;
        });
        if (best < 0) continue;
        if (at === null) at = series.x[best];
        lines.push([series.c, `${series.label}: ${number(series.y[best], chart.percent)}`]);
      }
      if (at === null) return;
      lines.unshift([null, `${chart.xLabel} ${number(at)}`]);
      const cx = LEFT + (at - low) / (high - low) * (W - LEFT - RIGHT);
      cross = cross || element("line", { class: "cross", y1: TOP, y2: H - BOTTOM }, svg);
      cross.setAttribute("x1", cx);
      cross.setAttribute("x2", cx);
      showTip(event, lines);
    });
    svg.addEventListener("pointerleave", () => {
      hideTip();
      if (cross) cross.remove();
      cross = null;
    });
  }

  // ---- timelines: the same drawing as report_timeline.py, for any window
  const GW = 1080, ROW = 20, LABELS = 150;
  const ticks = (low, high, count) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * (1 - 1e-9));
    const out = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) out.push(i * step);
    return [out, step];
  };
  const seconds = (ms) => (ms >= 1000 ? (ms / 1000).toPrecision(3) + " s" : ms.toPrecision(3) + " ms");

  for (const box of document.querySelectorAll("[data-timeline]")) {
    const chart = data.timelines[Number(box.dataset.timeline)];
    const view = box.querySelector(".gantt-view"), controls = box.querySelector(".gantt-controls");
    const steps = Object.keys(chart.steps).map(Number).sort((a, b) => a - b);
    let [low, high] = chart.window;
    const tops = [];
    let height = 0;
    chart.rows.forEach(([device], i) => {
      if (i === 0 || device !== chart.rows[i - 1][0]) height += 20;
      tops.push(height);
      height += ROW;
    });

    const draw = () => {
      const svg = element("svg", { class: "gantt", viewBox: `0 0 ${GW} ${height + 40}` });
      const wide = GW - LABELS - 10, scale = wide / (high - low), X = (t) => LABELS + (t - low) * scale;
      chart.rows.forEach(([device, label], i) => {
        element("text", { class: "tick", x: LABELS - 8, y: tops[i] + 14, "text-anchor": "end" }, svg).textContent = label;
        element("line", { class: "grid", x1: LABELS, x2: GW - 10, y1: tops[i] + ROW, y2: tops[i] + ROW }, svg);
        if (i === 0 || device !== chart.rows[i - 1][0]) element("text", { class: "label", x: 4, y: tops[i] - 5 }, svg).textContent = device;
      });
      let row = -1, stage = -1, right = 0;
      for (const bar of chart.bars) {
        const start = Math.max(bar[1], low), end = Math.min(bar[1] + bar[2], high);
        if (end < start) continue;
        const x = X(start), w = (end - start) * scale;
        if (row === bar[0] && stage === bar[4] && w < 0.5 && x - right < 0.5) continue;
        const kind = chart.kinds[bar[5]];
        const rect = element("rect", {
          class: `span c${bar[4] % 8} k-${kind.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "-")}`,
          x, y: tops[bar[0]] + 2, width: Math.max(w, 0.5), height: ROW - 4,
        }, svg);
        rect.bar = bar;
        [row, stage, right] = [bar[0], bar[4], x + w];
      }
      const [marks, step] = ticks(low / 1000, high / 1000, 8);
      const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9) + (step / 10 ** Math.floor(Math.log10(step)) === 2.5 ? 1 : 0)));
      element("line", { class: "axis", x1: LABELS, x2: GW - 10, y1: height, y2: height }, svg);
      for (const mark of marks) {
        element("line", { class: "axis", x1: X(mark * 1000), x2: X(mark * 1000), y1: height, y2: height + 4 }, svg);
        element("text", { class: "tick", x: X(mark * 1000), y: height + 15, "text-anchor": "middle" }, svg).textContent = mark.toFixed(digits);
      }
      element("text", { class: "label", x: (LABELS + GW) / 2, y: height + 33, "text-anchor": "middle" }, svg).textContent = "time since the first span (s)";
      view.replaceChildren(svg);
    };

    const go = (a, b) => {
      const least = 0.5; // ms
      const middle = (a + b) / 2, length = Math.min(Math.max(b - a, least), chart.end);
      low = Math.max(0, Math.min(middle - length / 2, chart.end - length));
      high = low + length;
      draw();
    };
    const toSteps = (first, count) => {
      const from = steps.findIndex((s) => s >= first), chosen = steps.slice(from < 0 ? -1 : from).slice(0, count);
      if (!chosen.length) return;
      const ends = chosen.map((s) => chart.steps[s][0] + chart.steps[s][1]);
      go(chart.steps[chosen[0]][0], Math.max(...ends));
      input.value = chosen[0];
    };
    const button = (text, action) => {
      const made = controls.appendChild(document.createElement("button"));
      made.type = "button";
      made.textContent = text;
      made.addEventListener("click", action);
    };
    const count = () => Number(many.value) || 1;
    controls.append("step");
    button("◀", () => toSteps([...steps].reverse().find((s) => s < Number(input.value)) ?? steps[0], count()));
    const input = controls.appendChild(document.createElement("input"));
    Object.assign(input, { type: "number", value: box.dataset.first, min: steps[0] ?? 0, max: steps[steps.length - 1] ?? 0 });
    input.setAttribute("aria-label", "first step shown");
    input.addEventListener("change", () => toSteps(Number(input.value), count()));
    button("▶", () => toSteps(steps.find((s) => s > Number(input.value)) ?? steps[steps.length - 1], count()));
    controls.append("steps shown");
    const many = controls.appendChild(document.createElement("input"));
    Object.assign(many, { type: "number", value: 2, min: 1 });
    many.setAttribute("aria-label", "number of steps shown");
    many.addEventListener("change", () => toSteps(Number(input.value), count()));
    button("whole run", () => go(0, chart.end));
    button("zoom in", () => go(low + (high - low) / 4, high - (high - low) / 4));
    button("zoom out", () => go(low - (high - low) / 2, high + (high - low) / 2));

    const timeAt = (event) => {
      const rect = view.firstElementChild.getBoundingClientRect();
      return low + ((event.clientX - rect.left) / rect.width * GW - LABELS) / (GW - LABELS - 10) * (high - low);
    };
    view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const at = timeAt(event), factor = Math.exp(Math.sign(event.deltaY) * 0.25);
      go(at - (at - low) * factor, at + (high - at) * factor);
    }, { passive: false });
    let grabbed = null;
    view.addEventListener("pointerdown", (event) => { grabbed = timeAt(event); });
    addEventListener("pointerup", () => { grabbed = null; });
    view.addEventListener("pointermove", (event) => {
      if (grabbed !== null && event.buttons) {
        const shift = grabbed - timeAt(event);
        go(low + shift, high + shift);
        hideTip();
      } else if (event.target.bar) {
        const [, start, length, step, stage, kind] = event.target.bar;
        showTip(event, [[stage % 8, `${chart.stages[stage]}: ${chart.kinds[kind]}`], [null, `step ${step}, ${seconds(length)}, at ${(start / 1000).toFixed(3)} s`]]);
      } else hideTip();
    });
    view.addEventListener("pointerleave", hideTip);
    draw();
  }
})();
