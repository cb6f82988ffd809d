"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const short = d3.format(".4~g");
  const bytes = (value) => d3.format(".3~s")(value) + "B";
  const axes = {
    round: { label: "round", show: (value) => `round ${value}` },
    seconds: { label: "seconds", show: (value) => `${short(value)} s` },
    bytes: { label: "bytes moved", tickFormat: bytes, show: bytes },
  };
  const onPaper = (colour) => (colour === "#000000" ? "currentColor" : colour); // black is lost on a dark page
  const colourOf = (number) => onPaper(data.colours[number % data.colours.length]);
  const dashOf = (number) => ["", "6 3", "8 3 2 3", "2 3"][Math.floor(number / data.colours.length) % 4];

  /** Put a chart into its place, and draw it again when the place changes its width. */
  function keep(place, draw) {
    let width = 0;
    const redraw = () => {
      width = place.clientWidth;
      if (width > 0) place.replaceChildren(draw(width));
    };
    new ResizeObserver(() => place.clientWidth !== width && redraw()).observe(place);
    redraw();
    return redraw;
  }

  function frame(width, options) {
    return Plot.plot({
      width,
      height: Math.round(Math.max(260, Math.min(440, width * 0.5))),
      marginLeft: 50,
      marginBottom: 38,
      marginTop: 26,
      style: { fontSize: "13px", background: "none", color: "inherit" },
      ...options,
    });
  }

  /** Mean of the latest k numbers up to each place; what is missing stays missing. */
  function smooth(values, k) {
    const latest = [];
    return values.map((value) => {
      if (value === null) return null;
      latest.push(value);
      if (latest.length > k) latest.shift();
      return d3.mean(latest);
    });
  }

  /** Mean and range over runs, at the rounds that every one of them has. */
  function band(runs, measure, axis, k) {
    const tables = runs.map((run) => {
      const values = smooth(run.values[measure] ?? [], k);
      const places = d3.range(values.length).filter((i) => values[i] !== null);
      return new Map(places.map((i) => [run.round[i], { x: run[axis][i], y: values[i] }]));
    });
    const rounds = [...(tables[0]?.keys() ?? [])].filter((round) => tables.every((table) => table.has(round)));
    return rounds.map((round) => {
      const found = tables.map((table) => table.get(round));
      const [low, high] = d3.extent(found, (one) => one.y);
      return { round, x: d3.mean(found, (one) => one.x), y: d3.mean(found, (one) => one.y), low, high };
    });
  }

  /** Marks of curves with bands; the tip names the nearest point. */
  function curveMarks(curves, tell) {
    const points = curves.flatMap((curve) => curve.points.map((point) => ({ ...point, curve })));
    return [
      ...curves
        .filter((curve) => curve.banded)
        .map((curve) => Plot.areaY(curve.points, { x: "x", y1: "low", y2: "high", fill: curve.colour, fillOpacity: 0.15 })),
      ...curves.map((curve) =>
        Plot.lineY(curve.points, {
          x: "x", y: "y", stroke: curve.colour, strokeWidth: 1.8, strokeDasharray: curve.dash || null,
        }),
      ),
      ...curves
        .filter((curve) => curve.points.length === 1)
        .map((curve) => Plot.dot(curve.points, { x: "x", y: "y", fill: curve.colour })),
      Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: tell, maxRadius: 60 })),
    ];
  }

  function learningCurves() {
    const boxes = [...at("legend").querySelectorAll("input")];
    const values = [...at("legend").querySelectorAll("output")];
    const state = () => ({
      measure: at("measure").value,
      axis: at("axis").value,
      k: Number(at("smoothing").value),
      each: at("each").checked,
    });

    function draw(width) {
      const { measure, axis, k, each } = state();
      const curves = [];
      data.methods.forEach((method, number) => {
        if (!boxes[number].checked) return;
        const look = { number, colour: onPaper(method.colour), dash: method.dash };
        const having = method.runs.filter((run) => run.values[measure]);
        const groups = each ? having.map((run) => [run]) : having.length ? [having] : [];
        for (const runs of groups) {
          const name = each ? `${method.label}, seed ${runs[0].seed}` : method.label;
          curves.push({ ...look, name, banded: runs.length > 1, points: band(runs, measure, axis, k) });
        }
      });
      const tell = ({ curve, round, x, y, low, high }) =>
        [
          curve.name,
          `round ${round}` + (axis === "round" ? "" : `, ${axes[axis].show(x)}`),
          `${data.measures[measure]}: ${short(y)}`,
          ...(curve.banded ? [`seeds: ${short(low)} to ${short(high)}`] : []),
        ].join("\n");
      const chart = frame(width, {
        ariaLabel: "learning curves",
        x: { label: axes[axis].label, tickFormat: axes[axis].tickFormat, ticks: width < 500 ? 5 : 10, nice: false },
        y: { label: data.measures[measure], grid: true, nice: true },
        marks: curveMarks(curves, tell),
      });
      chart.addEventListener("input", () => {
        const round = chart.value?.round;
        values.forEach((output, number) => {
          const found = curves.filter((curve) => curve.number === number).map((curve) => curve.points.find((p) => p.round === round));
          const there = found.filter((point) => point !== undefined);
          output.value = there.length ? short(d3.mean(there, (point) => point.y)) : "";
        });
      });
      return chart;
    }

    const redraw = keep(at("curve-chart"), draw);
    const change = () => {
      const { k } = state();
      at("smoothed").value = k === 1 ? "off" : `over ${k} rounds`;
      redraw();
    };
    for (const control of [at("measure"), at("axis"), at("smoothing"), at("each"), ...boxes]) control.addEventListener("input", change);
    for (const [id, checked] of [["all", true], ["none", false]]) {
      at(id).addEventListener("click", () => {
        for (const box of boxes) box.checked = checked;
        change();
      });
    }
  }

  function key(colour, name) {
    const item = document.createElement("span");
    const box = document.createElement("span");
    item.className = "key";
    box.className = "box";
    box.style.background = colour;
    item.append(box, name);
    return item;
  }

  function holdings() {
    if (!data.holdings.length) return;
    // Targets without classes leave no class names and one count of all rows a client.
    const few = (held) => held.classes.length <= data.classColours.length;
    const colour = (held, label) =>
      few(held) ? `var(--class-${label})` : d3.interpolateViridis(label / (held.classes.length - 1));

    function draw(width) {
      const held = data.holdings[Number(at("split").value)];
      const shares = at("shares").checked;
      const cells = held.counts.flatMap((counts, place) => {
        const total = d3.sum(counts);
        return counts.flatMap((count, label) => (count ? [{ place, label, count, total, share: (100 * count) / total }] : []));
      });
      const y = shares ? "share" : "count";
      const tell = (cell) =>
        `client ${held.clients[cell.place]}: ${cell.total} rows` +
        (held.classes.length ? `\nclass ${held.classes[cell.label]}: ${cell.count} rows, ${short(cell.share)} %` : "");
      const step = Math.ceil(held.clients.length / (width / 30));
      const legend = few(held)
        ? held.classes.map((name, label) => key(colour(held, label), name))
        : [Plot.legend({ color: { type: "linear", domain: [0, held.classes.length - 1], interpolate: d3.interpolateViridis }, label: "class", style: { background: "none", color: "inherit" } })];
      at("holdings-legend").replaceChildren(...legend);
      const drawn = held.clients.length < held.total ? `${held.clients.length} of ${held.total}` : `${held.total}`;
      at("holdings-caption").textContent =
        `${drawn} clients` + (held.inOrder || !held.classes.length ? "." : ", ordered by the class they hold most of.") + " Point at a bar to read it.";
      return frame(width, {
        ariaLabel: held.classes.length ? "rows of each class that each client holds" : "rows that each client holds",
        marginBottom: 40,
        x: {
          label: "client", domain: d3.range(held.clients.length), padding: held.inOrder ? 0.15 : 0,
          ticks: d3.range(0, held.clients.length, step), tickFormat: held.inOrder ? (place) => `${held.clients[place]}` : () => "",
          ...(held.inOrder ? {} : { tickSize: 0 }),
        },
        y: { label: shares ? "share of the client's rows, %" : "rows", grid: true },
        marks: [
          Plot.barY(cells, Plot.stackY({ x: "place", y, fill: (cell) => colour(held, cell.label), order: "label", shapeRendering: "crispEdges" })),
          Plot.tip(cells, Plot.pointer(Plot.stackY({ x: "place", y, order: "label", title: tell }))),
          Plot.ruleY([0]),
        ],
        color: { type: "identity" },
      });
    }

    const redraw = keep(at("holdings-chart"), draw);
    for (const id of ["split", "shares"]) at(id).addEventListener("input", redraw);
  }

  function lineKeys(names) {
    return names.map((name, number) => {
      const item = document.createElement("span");
      const swatch = d3.create("svg").attr("class", "swatch").attr("viewBox", "0 0 26 8");
      swatch.append("line").attr("x2", 26).attr("y1", 4).attr("y2", 4).attr("stroke-width", 3)
        .attr("stroke", colourOf(number)).attr("stroke-dasharray", dashOf(number));
      item.className = "key";
      item.append(swatch.node(), name);
      return item;
    });
  }

  const markMarks = (marks) => [
    Plot.dot(marks, { x: "x", y: "y", r: 4, fill: "white", stroke: "black", strokeWidth: 1.5 }),
    Plot.text(marks, { x: "x", y: "y", text: "name", dy: -10, stroke: "white", strokeWidth: 4, fill: "black" }),
  ];

  const kinds = {
    lines(panel, width) {
      const curves = panel.series.map((line, number) => ({
        name: line.name, colour: colourOf(number), dash: dashOf(number), banded: line.low.length > 0 && line.high.length > 0,
        points: d3.range(line.x.length)
          .map((i) => ({ x: line.x[i], y: line.y[i], low: line.low[i], high: line.high[i] })),
      }));
      const tell = ({ curve, x, y }) => `${curve.name}\n${panel.x_label}: ${short(x)}\n${panel.y_label}: ${short(y)}`;
      return frame(width, {
        x: { label: panel.x_label, ticks: width < 500 ? 5 : 10 },
        y: { label: panel.y_label, grid: true, ...(panel.log_y ? { type: "log", tickFormat: ".3~g" } : {}) },
        marks: [...curveMarks(curves, tell), ...markMarks(panel.marks)],
      });
    },
    grid(panel, width) {
      const edges = (middle) =>
        middle.map((value, i) => {
          const before = middle[i - 1] ?? value - ((middle[i + 1] ?? value + 1) - value);
          const after = middle[i + 1] ?? value + (value - before);
          return [(before + value) / 2, (value + after) / 2];
        });
      const [x, y] = [edges(panel.x), edges(panel.y)];
      const cells = panel.y.flatMap((_, j) =>
        panel.x.flatMap((_, i) => {
          const value = panel.values[j][i];
          return value === null ? [] : [{ i, j, x1: x[i][0], x2: x[i][1], y1: y[j][0], y2: y[j][1], value }];
        }),
      );
      const [least, most] = d3.extent(cells, (cell) => cell.value);
      const tell = (cell) =>
        `${panel.x_label}: ${short(panel.x[cell.i])}\n${panel.y_label}: ${short(panel.y[cell.j])}\n${panel.value_label}: ${short(cell.value)}`;
      return frame(Math.min(width, 640), {
        height: Math.round(Math.min(width, 640) * 0.8),
        x: { label: panel.x_label, ticks: width < 500 ? 5 : 8 },
        y: { label: panel.y_label },
        color: { scheme: "viridis", legend: true, label: panel.value_label, tickFormat: ".3~g", type: least > 0 && most > 50 * least ? "log" : "linear" },
        marks: [
          Plot.rect(cells, { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: "value", inset: -0.3, shapeRendering: "crispEdges" }),
          ...panel.paths.map((path) => Plot.line(path.x.map((value, i) => [value, path.y[i]]), { stroke: "white", strokeWidth: 2, marker: "dot" })),
          ...markMarks(panel.marks),
          Plot.tip(cells, Plot.pointer({ x: (cell) => (cell.x1 + cell.x2) / 2, y: (cell) => (cell.y1 + cell.y2) / 2, title: tell })),
        ],
      });
    },
    bars(panel, width) {
      const bars = panel.series.flatMap((one, number) =>
        one.values.map((value, i) => ({ category: i, number, value, name: one.name })),
      );
      const step = Math.ceil(panel.categories.length / (width / 60));
      const tell = (bar) => `${panel.categories[bar.category]}\n${bar.name}: ${short(bar.value)}`;
      return frame(width, {
        fx: { label: panel.x_label, tickFormat: (i) => (i % step ? "" : panel.categories[i]), padding: 0.15 },
        x: { axis: null, domain: d3.range(panel.series.length), padding: 0 },
        y: { label: panel.y_label, grid: true },
        color: { type: "identity" },
        marks: [
          Plot.barY(bars, { fx: "category", x: "number", y: "value", fill: (bar) => colourOf(bar.number), title: tell, tip: true }),
          Plot.ruleY([0]),
        ],
      });
    },
  };

  function analyses() {
    for (const place of document.querySelectorAll("[data-analysis]")) {
      const panel = data.analyses[Number(place.dataset.analysis)][Number(place.dataset.panel)];
      if (panel.series && panel.series.length > 1) place.nextElementSibling.replaceChildren(...lineKeys(panel.series.map((one) => one.name)));
      keep(place, (width) => kinds[panel.kind](panel, width));
    }
  }

  learningCurves();
  holdings();
  analyses();
  window.addEventListener("beforeprint", () => {
    for (const closed of document.querySelectorAll("details")) closed.open = true;
  });
})();
