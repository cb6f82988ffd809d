"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const short = d3.format(".4~g");
  const bytes = (value) => d3.format(".3~s")(value) + "B";
  const axes = {
    round: { label: "round", tickFormat: d3.format("d"), show: (value) => `round ${value}` },
    seconds: { label: "seconds", show: (value) => `${short(value)} s` },
    bytes: { label: "bytes moved", tickFormat: bytes, show: bytes },
    epsilon: { label: "epsilon", show: (value) => `epsilon ${short(value)}` },
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
      const places = d3.range(values.length).filter((i) => values[i] !== null && (run[axis]?.[i] ?? null) !== null);
      return new Map(places.map((i) => [run.round[i], { x: run[axis][i], y: values[i] }]));
    });
    const rounds = [...(tables[0]?.keys() ?? [])].filter((round) => tables.every((table) => table.has(round)));
    return rounds.map((round) => {
      const found = tables.map((table) => table.get(round));
      const [low, high] = d3.extent(found, (one) => one.y);
      return { round, x: d3.mean(found, (one) => one.x), y: d3.mean(found, (one) => one.y), low, high };
    });
  }

  /** Ticks of the x axis: whole numbers for rounds. */
  function xTicks(curves, axis, most) {
    const [first, last] = d3.extent(curves.flatMap((curve) => curve.points), (point) => point.x);
    return axis === "round" && last - first < most ? d3.range(first, last + 1) : most;
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
        x: { label: axes[axis].label, tickFormat: axes[axis].tickFormat, ticks: xTicks(curves, axis, width < 500 ? 5 : 10), nice: false },
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

  /** Distribution of clients' scores, a method against the baseline, and the table of clients. */
  function served() {
    const found = data.served;
    if (!found || !at("served")) return;
    const seeds = [...new Set(found.methods.flatMap((method) => method.runs.map((run) => run.seed)))].sort(d3.ascending);
    const options = (select, values) =>
      select.replaceChildren(...values.map((value) => Object.assign(document.createElement("option"), { value, textContent: value })));
    const others = found.methods.map((method) => method.label).filter((label) => label !== found.baseline);
    options(at("served-seed"), seeds);
    options(at("served-method"), others.length ? others : found.methods.map((method) => method.label));
    const groups = [...new Set(found.methods.flatMap((method) => method.runs.flatMap((run) => run.group)))].filter((name) => name);
    const coloured = groups.length > 1 && groups.length <= 10;
    const colour = (group) => (coloured && group ? `var(--class-${groups.indexOf(group)})` : "var(--link)");
    if (coloured) at("served-legend").replaceChildren(...groups.map((group) => key(colour(group), group)));
    const seed = () => Number(at("served-seed").value);
    const runOf = (label) => found.methods.find((method) => method.label === label)?.runs.find((run) => run.seed === seed());
    const clientsOf = (run) =>
      run.client.map((client, i) => ({ client, i, group: run.group[i], seen: run.seen[i], score: run.federated[i] })).filter((one) => one.score !== null);
    const tail = found.higher ? 0.1 : 0.9;

    function drawAll(width) {
      const shown = found.methods.filter((method) => runOf(method.label));
      const dots = shown.flatMap((method) => clientsOf(runOf(method.label)).map((one) => ({ ...one, label: method.label })));
      const sums = shown.map((method) => {
        const scores = clientsOf(runOf(method.label)).filter((one) => one.seen).map((one) => one.score);
        return { label: method.label, mean: d3.mean(scores), decile: d3.quantile(scores, tail) };
      });
      const many = dots.length / Math.max(shown.length, 1) > 300;
      const tell = (one) => `${one.label}\nclient ${one.client}${one.group ? `, ${one.group}` : ""}${one.seen ? "" : ", never takes part"}\n${found.title}: ${short(one.score)}`;
      const narrow = width < 560;
      const marks = many
        ? [Plot.tickX(dots, { x: "score", fy: "label", stroke: (one) => colour(one.group), strokeOpacity: 0.25 })]
        : [
            Plot.dot(dots, Plot.dodgeY("middle", {
              x: "score", fy: "label", r: narrow ? 2.5 : 3.5, fill: (one) => (one.seen ? colour(one.group) : "none"), stroke: (one) => colour(one.group), fillOpacity: 0.75,
            })),
          ];
      return frame(width, {
        ariaLabel: "scores of clients by method",
        height: Math.max(160, 90 * shown.length + 60),
        marginLeft: 16,
        marginRight: 16,
        x: { label: found.title, grid: true, ticks: narrow ? 4 : 8 },
        fy: { axis: null, domain: shown.map((method) => method.label), padding: 0.1 },
        color: { type: "identity" },
        marks: [
          ...marks,
          Plot.text(sums, { fy: "label", text: "label", frameAnchor: "top-left", fontWeight: 600, stroke: "var(--page)", fill: "currentColor" }),
          Plot.ruleX(sums, { x: "mean", fy: "label", stroke: "currentColor", strokeWidth: 1.5 }),
          Plot.tickX(sums, { x: "decile", fy: "label", stroke: "currentColor", strokeWidth: 4, insetTop: 26, insetBottom: 26 }),
          Plot.tip(dots, Plot.pointer({ x: "score", fy: "label", title: tell })),
        ],
      });
    }

    function drawPairs(width) {
      const label = at("served-method").value;
      const [ours, theirs] = [runOf(label), found.baseline && runOf(found.baseline)];
      if (!ours || !theirs || ours === theirs) {
        at("paired-caption").textContent = "There is no other method of this seed to compare with.";
        return document.createElement("div");
      }
      const before = new Map(clientsOf(theirs).map((one) => [one.client, one.score]));
      const pairs = clientsOf(ours).filter((one) => before.has(one.client)).map((one) => ({ ...one, x: before.get(one.client), y: one.score }));
      const sign = found.higher ? 1 : -1;
      const gain = pairs.filter((one) => sign * (one.y - one.x) > 0).length;
      const lose = pairs.filter((one) => sign * (one.y - one.x) < 0).length;
      at("paired-caption").textContent =
        `Seed ${seed()}: ${gain} of ${pairs.length} clients gain, ${lose} lose. ${found.higher ? "Above" : "Below"} the line ${label} serves a client better than ${found.baseline}.`;
      const [low, high] = d3.extent(pairs.flatMap((one) => [one.x, one.y]));
      const tell = (one) => `client ${one.client}${one.group ? `, ${one.group}` : ""}\n${label}: ${short(one.y)}\n${found.baseline}: ${short(one.x)}`;
      const side = Math.min(width, 520);
      return frame(side, {
        ariaLabel: "a method against the baseline, client by client",
        height: side,
        x: { label: `${found.baseline}, ${found.title}`, grid: true, ticks: 5 },
        y: { label, grid: true, ticks: 5 },
        color: { type: "identity" },
        marks: [
          Plot.line([[low, low], [high, high]], { stroke: "currentColor", strokeOpacity: 0.5, strokeDasharray: "4 3" }),
          Plot.dot(pairs, { x: "x", y: "y", r: 3.5, fill: (one) => colour(one.group), fillOpacity: 0.7 }),
          Plot.tip(pairs, Plot.pointer({ x: "x", y: "y", title: tell })),
        ],
      });
    }

    const names = { client: "client", group: "group", rows: "rows", held_out: "held out", classes: "classes", took_part: "took part" };
    const models = { federated: "federated", home: "home", alone: "alone", pooled: "pooled" };
    function fill() {
      const run = runOf(others.length ? at("served-method").value : found.methods[0].label) ?? found.methods[0].runs[0];
      const facts = Object.keys(names).filter((name) => run[name] && (name !== "group" || groups.length));
      const scores = Object.keys(models).filter((name) => run[name]);
      const cell = (tag, text, numeric) => Object.assign(document.createElement(tag), { textContent: text, className: numeric ? "n" : "" });
      const row = (cells) => {
        const line = document.createElement("tr");
        line.append(...cells);
        return line;
      };
      const numeric = (name) => name !== "group";
      const wanted = at("served-search").value.trim().toLowerCase();
      const places = d3.range(run.client.length).filter((i) => !wanted || `${run.client[i]}` === wanted || run.group[i].toLowerCase().includes(wanted));
      const table = at("served-clients");
      table.tHead.replaceChildren(row([...facts.map((name) => cell("th", names[name], numeric(name))), ...scores.map((name) => cell("th", models[name], true))]));
      table.tBodies[0].replaceChildren(
        ...places.slice(0, 500).map((i) =>
          row([...facts.map((name) => cell("td", run[name][i] ?? "-", numeric(name))), ...scores.map((name) => cell("td", run[name][i] === null ? "-" : short(run[name][i]), true))]),
        ),
      );
      at("served-count").value = `${places.length} of ${run.client.length} clients` + (places.length > 500 ? ", 500 shown" : "");
    }

    const redraws = [keep(at("served-chart"), drawAll), keep(at("paired-chart"), drawPairs), fill];
    fill();
    for (const id of ["served-seed", "served-method", "served-search"]) at(id).addEventListener("input", () => redraws.forEach((redraw) => redraw()));
  }

  learningCurves();
  holdings();
  served();
  analyses();
  window.addEventListener("beforeprint", () => {
    for (const closed of document.querySelectorAll("details")) closed.open = true;
  });
})();
