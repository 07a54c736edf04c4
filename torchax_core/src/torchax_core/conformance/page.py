"""The report as one HTML page: a heat map of ops and dtypes per mode; a click on a red cell says what failed, and where."""

from __future__ import annotations

import json
from pathlib import Path

from torchax_core.conformance.cells import ALL_MODES, DTYPES, FAILED
from torchax_core.conformance.known import reason
from torchax_core.conformance.report import Report

__all__ = ["write_page"]


def write_page(report: Report, file: Path) -> None:
    """Write the page, which needs no other file and no network."""
    order = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    cells = []
    details = {}
    for i, result in enumerate(report.results.values()):
        status = report.status(result)
        cell = result.cell
        cells.append(
            [cell.op, cell.dtype, ALL_MODES.index(cell.mode), status, result.samples, round(result.seconds, 2)]
        )
        if result.status in FAILED:
            details[i] = {
                "message": result.message,
                "detail": result.detail,
                "sample": result.sample,
                "definitions": result.definitions,
                "reason": reason(report.known, cell) or "",
                "status": result.status,
            }
    data = {
        "modes": ALL_MODES,
        "dtypes": order,
        "cells": cells,
        "details": details,
        "versions": report.versions,
        "choices": {name: value for name, value in report.choices.items() if value not in ("", None, False)},
        "seconds": round(report.seconds),
        "finished": report.finished,
    }
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # lest a message ends the script
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_PAGE.replace("DATA", text, 1), encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>torchax conformance</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 1.5em; color: #222; }
h1 { font-size: 1.3em; }
button { font: inherit; padding: .3em .8em; margin: 0 .3em .6em 0; border: 1px solid #bbb; background: #f5f5f5; cursor: pointer; }
button.on { background: #333; color: #fff; }
table { border-collapse: collapse; }
th { text-align: left; font-weight: normal; padding: 1px 8px 1px 0; position: sticky; top: 0; background: #fff; }
td { border: 1px solid #fff; width: 5.5em; height: 1.3em; text-align: center; font-size: 11px; }
td.passed { background: #b7e1b0; }
td.none { background: #eee; color: #999; }
td.known { background: #f3d98b; cursor: pointer; }
td.failed { background: #e06c5f; cursor: pointer; }
td.timeout { background: #b66fd0; cursor: pointer; }
td.crashed { background: #333; color: #fff; cursor: pointer; }
td:focus, td.chosen { outline: 2px solid #06c; }
#detail { position: fixed; right: 0; top: 0; bottom: 0; width: 45%; overflow: auto; background: #fafafa;
  border-left: 1px solid #ccc; padding: 1em; display: none; }
#detail pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #fff; border: 1px solid #ddd; padding: .6em; }
.small { color: #666; }
</style>
<h1>torchax conformance</h1>
<p class="small" id="about"></p>
<p id="modes"></p>
<p><input id="filter" placeholder="op (regular expression)" size="30">
<label><input type="checkbox" id="red"> only ops that fail</label> <span id="count" class="small"></span></p>
<table id="map"></table>
<div id="detail" role="dialog" aria-label="failure"></div>
<script type="application/json" id="data">DATA</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent);
const el = (tag, text, cls) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls; return e; };
const FAILED = ["failed", "timeout", "crashed"];
let mode = null;
const byMode = data.modes.map(() => new Map());
data.cells.forEach((c, i) => {
  const ops = byMode[c[2]];
  if (!ops.has(c[0])) ops.set(c[0], new Map());
  ops.get(c[0]).set(c[1], i);
});
const about = Object.entries(data.versions).map(([k, v]) => k + " " + v).join(", ");
const chosen = Object.entries(data.choices).map(([k, v]) => k + "=" + v).join(", ");
document.getElementById("about").textContent = data.cells.length + " cells in " + data.seconds + " s" +
  (data.finished ? "" : " (unfinished)") + "; " + about + "; " + chosen;
data.modes.forEach((name, m) => {
  if (!byMode[m].size) return;
  const all = data.cells.filter(c => c[2] === m && c[3] !== "none");
  const good = all.filter(c => c[3] === "passed").length;
  const share = all.length ? (100 * good / all.length).toFixed(1) + " %" : "-";
  const b = el("button", name + "  " + share);
  b.onclick = () => { mode = m; document.querySelectorAll("button").forEach(x => x.classList.toggle("on", x === b)); draw(); };
  document.getElementById("modes").append(b);
});
function draw() {
  const table = document.getElementById("map");
  table.replaceChildren();
  if (mode === null) return;
  let search = /(?:)/;
  try { search = new RegExp(document.getElementById("filter").value); } catch (e) { /* half typed */ }
  const red = document.getElementById("red").checked;
  const present = new Set(data.cells.filter(c => c[2] === mode).map(c => c[1]));
  const dtypes = [...data.dtypes.filter(d => present.has(d)), ...[...present].filter(d => !data.dtypes.includes(d))];
  const head = el("tr");
  head.append(el("th", "op"), ...dtypes.map(d => el("th", d)));
  table.append(head);
  let shown = 0;
  for (const [op, cells] of byMode[mode]) {
    if (!search.test(op)) continue;
    if (red && ![...cells.values()].some(i => FAILED.includes(data.cells[i][3]))) continue;
    const row = el("tr");
    row.append(el("th", op));
    for (const d of dtypes) {
      const i = cells.get(d);
      if (i === undefined) { row.append(el("td")); continue; }
      const c = data.cells[i];
      const td = el("td", c[3] === "passed" ? c[4] : c[3], c[3]);
      td.title = op + " " + d + ": " + c[3] + ", " + c[4] + " samples, " + c[5] + " s";
      if (data.details[i]) {
        td.tabIndex = 0;
        td.onclick = () => show(i, td);
        td.onkeydown = e => e.key === "Enter" && show(i, td);
      }
      row.append(td);
    }
    table.append(row);
    shown += 1;
  }
  document.getElementById("count").textContent = shown + " ops";
}
function show(i, td) {
  document.querySelectorAll("td.chosen").forEach(x => x.classList.remove("chosen"));
  td.classList.add("chosen");
  const c = data.cells[i], x = data.details[i], box = document.getElementById("detail");
  box.replaceChildren();
  const close = el("button", "close");
  close.onclick = () => { box.style.display = "none"; };
  box.append(close, el("h2", c[0] + " " + c[1] + ", " + data.modes[c[2]] + ": " + x.status), el("pre", x.message));
  if (x.reason) box.append(el("h3", "known"), el("p", x.reason));
  if (x.detail) box.append(el("pre", x.detail));
  if (x.sample) box.append(el("h3", "sample"), el("pre", x.sample));
  if (x.definitions.length) box.append(el("h3", "definitions that ran"), el("pre", x.definitions.join("\\n")));
  const again = "torchax conformance --ops '^" + c[0].replace(/[.]/g, "[.]") + "$' --mode " + data.modes[c[2]] +
    (c[1] === "-" ? "" : " --dtypes " + c[1]) + " -v";
  box.append(el("h3", "again"), el("pre", again));
  box.style.display = "block";
}
document.getElementById("filter").oninput = draw;
document.getElementById("red").onchange = draw;
const firstButton = document.querySelector("#modes button");
if (firstButton) firstButton.click();
</script>
</html>
"""
