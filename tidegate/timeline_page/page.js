// Draws each strip's GPUs over time on a canvas, and describes the point under the pointer.
// A row is a set of GPUs: one, a node's, or all. Where they are in several states at once, the shares are stacked.
"use strict";
(() => {
  const { states, strips } = JSON.parse(document.getElementById("data").textContent);
  const longest = Math.max(...strips.map((strip) => strip.end));
  const TOP = 16, BOTTOM = 24, MOST_SINGLE_ROWS = 128;
  const canvases = [...document.querySelectorAll("canvas[data-strip]")];
  const tip = document.getElementById("tip"), whole = document.getElementById("whole");
  const root = document.documentElement;
  const num = Math.max(...strips.map((strip) => strip.gpus.length));
  let view = [0, longest], mode = num > MOST_SINGLE_ROWS ? "node" : "gpu", crosshair = null, dragged = null;

  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim() || getComputedStyle(root).getPropertyValue("--other").trim();
  const seconds = (ms) => (ms / 1000).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

  // The rows of a strip: a label, and the lanes, each with its number of GPUs in the row.
  function rowsOf(strip) {
    const laneOf = new Array(strip.gpus.length);
    strip.lanes.forEach((lane) => lane.gpus.forEach((gpu) => { laneOf[gpu] = lane; }));
    const keys = strip.gpus.map((gpu, at) => (mode === "gpu" ? gpu : mode === "node" ? strip.nodes[at] : "all GPUs"));
    const rows = new Map();
    keys.forEach((key, at) => {
      if (!rows.has(key)) rows.set(key, { label: key, node: strip.nodes[at], size: 0, lanes: new Map() });
      const row = rows.get(key);
      row.size += 1;
      row.lanes.set(laneOf[at], (row.lanes.get(laneOf[at]) || 0) + 1);
    });
    return [...rows.values()];
  }

  // [from, to, GPUs by state] for each stretch in which no GPU of the row changes.
  function stretchesOf(row, end) {
    const changes = [];
    for (const [lane, count] of row.lanes) {
      lane.at.forEach((at, i) => changes.push([at, lane.state[i], i ? lane.state[i - 1] : null, count]));
    }
    changes.sort((a, b) => a[0] - b[0]);
    const now = states.map(() => 0), found = [];
    changes.forEach(([at, into, from, count], i) => {
      now[into] += count;
      if (from !== null) now[from] -= count;
      const next = i + 1 < changes.length ? changes[i + 1][0] : end;
      if (next > at) found.push([at, next, [...now]]);
    });
    return found;
  }

  function heightOf(num) {
    if (mode === "all") return 160;
    if (mode === "node") return Math.max(3, Math.min(28, Math.floor(384 / num)));
    return num <= 32 ? 10 : num <= 64 ? 6 : num <= MOST_SINGLE_ROWS ? 4 : 2;
  }

  function laidOut(canvas, strip) {
    const rows = rowsOf(strip), height = heightOf(rows.length), width = canvas.clientWidth;
    const left = width < 560 ? 40 : 56;
    const layout = { rows, height, width, left, right: width - 8, bottom: TOP + rows.length * height };
    layout.x = (ms) => left + ((ms - view[0]) / (view[1] - view[0])) * (layout.right - left);
    layout.ms = (x) => view[0] + ((x - left) / (layout.right - left)) * (view[1] - view[0]);
    rows.forEach((row) => { row.stretches = stretchesOf(row, strip.end); });
    return layout;
  }

  const layouts = new Map();

  function draw(canvas) {
    const strip = strips[Number(canvas.dataset.strip)], layout = layouts.get(canvas), ratio = window.devicePixelRatio || 1;
    const total = layout.bottom + BOTTOM;
    canvas.style.height = `${total}px`;
    canvas.width = Math.round(layout.width * ratio);
    canvas.height = Math.round(total * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    drawRows(pen, layout);
    drawNodes(pen, layout);
    drawAxis(pen, layout);
    drawMarks(pen, layout, strip);
  }

  function drawRows(pen, layout) {
    const { rows, height } = layout;
    const gap = height >= 8 ? 1 : 0, fills = states.map(color);
    const ratio = window.devicePixelRatio || 1, edge = (y) => Math.round(y * ratio) / ratio;
    rows.forEach((row, at) => {
      const top = edge(TOP + at * height);
      drawRow(pen, layout, row, fills, top, edge(TOP + (at + 1) * height - gap) - top);
    });
  }

  // Draws in whole device pixels: all columns of one stretch at once; a column with several stretches gets their mean over
  // its time. Edges between pixels would let the background show through, as stripes where thousands of stretches meet.
  function drawRow(pen, layout, row, fills, top, tall) {
    const ratio = window.devicePixelRatio || 1, origin = Math.round(layout.left * ratio);
    const most = Math.floor(layout.right * ratio) - origin, shared = new Map();
    const column = (ms) => Math.max(0, Math.min(most, layout.x(ms) * ratio - origin));
    const stack = (from, to, counts) => {
      const bottom = top + (tall * counts.reduce((sum, count) => sum + count, 0)) / row.size;
      let y = top;
      counts.forEach((count, state) => {
        if (!count) return;
        // Fill down to the bottom, where the next state covers it: no background then shows between two states.
        pen.fillStyle = fills[state];
        pen.fillRect((origin + from) / ratio, y, (to - from) / ratio, bottom - y);
        y += (tall * count) / row.size;
      });
    };
    const add = (at, share, counts) => {
      const mean = shared.get(at) || counts.map(() => 0);
      shared.set(at, mean.map((sum, state) => sum + share * counts[state]));
    };
    for (const [from, to, counts] of row.stretches) {
      const x0 = column(from), x1 = column(to), first = Math.ceil(x0), last = Math.floor(x1);
      if (x1 <= x0) continue;
      if (first > last) {
        add(last, x1 - x0, counts);
        continue;
      }
      if (last > first) stack(first, last, counts);
      if (first > x0) add(first - 1, first - x0, counts);
      if (x1 > last) add(last, x1 - last, counts);
    }
    shared.forEach((mean, at) => stack(at, at + 1, mean));
  }

  function drawNodes(pen, layout) {
    const { rows, height, left, right, bottom } = layout;
    pen.fillStyle = color("quiet");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    if (mode === "all") {
      pen.fillText(rows[0].size.toLocaleString("en"), left - 8, TOP + 6);
      pen.fillText("0", left - 8, bottom - 6);
      return;
    }
    let begin = 0, free = -Infinity;
    rows.forEach((row, at) => {
      if (at + 1 < rows.length && rows[at + 1].node === row.node) return;
      const top = TOP + begin * height, middle = (top + TOP + (at + 1) * height) / 2;
      if (middle - free >= 14) {
        pen.fillText(row.node, left - 8, middle, left - 10);
        free = middle;
      }
      if (begin && mode === "gpu") {
        pen.fillStyle = color("card");
        pen.fillRect(left, top - 1, right - left, 1);
        pen.fillStyle = color("quiet");
      }
      begin = at + 1;
    });
  }

  function step(layout) {
    const target = ((view[1] - view[0]) / (layout.right - layout.left)) * 70;
    const power = 10 ** Math.floor(Math.log10(target));
    return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= target);
  }

  function drawAxis(pen, layout) {
    const { left, right, bottom } = layout, every = step(layout);
    pen.textBaseline = "top";
    pen.textAlign = "center";
    for (let ms = Math.ceil(view[0] / every) * every; ms <= view[1]; ms += every) {
      const x = layout.x(ms);
      pen.fillStyle = color("line");
      pen.fillRect(Math.round(x), bottom, 1, 5);
      pen.fillStyle = color("quiet");
      const text = `${(ms / 1000).toLocaleString("en", { maximumFractionDigits: 3 })} s`;
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(Math.max(x, left + half - 4), right - half + 6), bottom + 7);
    }
    pen.fillStyle = color("line");
    pen.fillRect(left, bottom, right - left, 1);
  }

  function drawMarks(pen, layout, strip) {
    for (const [at, kind] of strip.marks) {
      const x = layout.x(at);
      if (x < layout.left - 1 || x > layout.right + 1) continue;
      pen.strokeStyle = pen.fillStyle = color("text");
      pen.setLineDash(kind === "decision" ? [] : kind === "boundary" ? [2, 3] : [8, 4]);
      pen.lineWidth = kind === "reference" ? 2 : 1;
      pen.globalAlpha = kind === "decision" ? 0.6 : 0.8;
      pen.beginPath();
      pen.moveTo(Math.round(x) + 0.5, kind === "decision" ? TOP - 4 : TOP);
      pen.lineTo(Math.round(x) + 0.5, layout.bottom);
      pen.stroke();
      if (kind === "decision") {
        pen.globalAlpha = 1;
        pen.beginPath();
        pen.moveTo(x - 5, TOP - 13);
        pen.lineTo(x + 5, TOP - 13);
        pen.lineTo(x, TOP - 4);
        pen.fill();
      }
      pen.globalAlpha = 1;
    }
    pen.setLineDash([]);
  }

  function redraw() {
    canvases.forEach((canvas) => {
      layouts.set(canvas, laidOut(canvas, strips[Number(canvas.dataset.strip)]));
      draw(canvas);
    });
    whole.hidden = view[0] === 0 && view[1] === longest;
  }

  // A description of the point (x, y) of a canvas. Null beside the timeline.
  function wordsAt(canvas, x, y) {
    const layout = layouts.get(canvas), strip = strips[Number(canvas.dataset.strip)];
    if (x < layout.left - 5 || x > layout.right + 5 || y > layout.bottom + BOTTOM) return null;
    const near = strip.marks.filter((mark) => Math.abs(layout.x(mark[0]) - x) <= 4);
    const ms = layout.ms(x), at = Math.floor((y - TOP) / layout.height), lines = [];
    const row = at >= 0 && at < layout.rows.length && ms >= 0 && ms < strip.end ? layout.rows[at] : null;
    if (row) lines.push(...rowWords(row, ms));
    else lines.push(`${seconds(Math.max(0, ms))} s`);
    near.forEach(([when, , text]) => lines.push(`\n${seconds(when)} s: ${text}`));
    const last = strip.marks.filter((mark) => mark[1] === "decision" && mark[0] <= ms).pop();
    if (row && last && !near.includes(last)) lines.push(`\ndecided at ${seconds(last[0])} s: ${last[2]}`);
    return lines.join("\n");
  }

  function rowWords(row, ms) {
    const [from, to, counts] = row.stretches.find((each) => each[0] <= ms && ms < each[1]) || row.stretches[row.stretches.length - 1];
    const times = `${seconds(from)} to ${seconds(to)} s (${seconds(to - from)} s)`;
    if (row.size === 1) return [`GPU ${row.label}: ${states[counts.findIndex((count) => count)]}`, times];
    const parts = states.map((state, i) => [counts[i], state]).filter(([count]) => count);
    return [`${row.label}: ${parts.map(([count, state]) => `${count.toLocaleString("en")} ${state}`).join(", ")}`, times];
  }

  function showTip(words, event) {
    tip.hidden = words === null;
    if (words === null) return;
    tip.textContent = words;
    const box = tip.getBoundingClientRect(), gap = 14;
    const fitsRight = event.clientX + gap + box.width < innerWidth;
    const left = fitsRight ? event.clientX + gap : event.clientX - gap - box.width;
    const below = event.clientY + gap + box.height < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
    tip.style.top = `${below ? event.clientY + gap : Math.max(8, event.clientY - gap - box.height)}px`;
  }

  // Draws the same instant in every strip, and the range that the user selects to zoom in.
  function overlay(ms) {
    crosshair = ms;
    canvases.forEach((canvas) => {
      draw(canvas);
      const layout = layouts.get(canvas), pen = canvas.getContext("2d");
      if (crosshair === null) return;
      pen.fillStyle = color("accent");
      pen.fillRect(Math.round(layout.x(crosshair)), TOP, 1, layout.bottom - TOP);
      if (dragged === null) return;
      pen.globalAlpha = 0.2;
      const from = layout.x(dragged);
      pen.fillRect(from, TOP, layout.x(crosshair) - from, layout.bottom - TOP);
      pen.globalAlpha = 1;
    });
  }

  canvases.forEach((canvas) => {
    const place = (event) => {
      const box = canvas.getBoundingClientRect(), layout = layouts.get(canvas);
      const x = event.clientX - box.left;
      const ms = layout.ms(Math.min(Math.max(x, layout.left), layout.right));
      return { x, y: event.clientY - box.top, ms };
    };
    canvas.addEventListener("pointermove", (event) => {
      const { x, y, ms } = place(event), words = wordsAt(canvas, x, y);
      showTip(words, event);
      overlay(words === null && dragged === null ? null : ms);
    });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) {
        dragged = place(event).ms;
        canvas.setPointerCapture(event.pointerId);
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      const until = place(event).ms, from = dragged;
      dragged = null;
      const layout = layouts.get(canvas);
      if (from !== null && Math.abs(layout.x(until) - layout.x(from)) > 6) {
        view = [Math.min(from, until), Math.max(from, until)];
        redraw();
      }
      overlay(null);
    });
    canvas.addEventListener("pointerleave", () => { showTip(null); if (dragged === null) overlay(null); });
    canvas.addEventListener("dblclick", () => { view = [0, longest]; redraw(); });
  });

  const theme = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  function paint(name) {
    root.dataset.theme = name;
    theme.textContent = name === "dark" ? "Light" : "Dark";
    redraw();
  }
  theme.addEventListener("click", () => paint(root.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => paint(dark.matches ? "dark" : "light"));
  whole.addEventListener("click", () => { view = [0, longest]; redraw(); });
  document.querySelectorAll("#rows input").forEach((input) => {
    input.checked = input.value === mode;
    input.addEventListener("change", () => { mode = input.value; redraw(); });
  });
  addEventListener("resize", redraw);
  paint(dark.matches ? "dark" : "light");
})();
