// The history, newest first.
import { useMemo, useState } from "../vendor/hooks.js";
import { MOST } from "../history.js";
import { clock, count } from "../format.js";
import { html } from "../html.js";
import { useNarrow } from "./narrow.js";
import { Panel } from "./panel.js";
import { VirtualTable } from "./virtual_table.js";

const BAD = new Set(["node-lost", "worker-failed", "drain-failed"]);
const WARN = new Set(["world-stopped", "waiting", "alarm", "slot"]);

function toneOf(entry) {
  if (entry.severity === "critical" || BAD.has(entry.kind)) return "bad";
  return entry.severity === "warning" || WARN.has(entry.kind) ? "warn" : "";
}

export function Events({ model, show }) {
  const { history } = model;
  const narrow = useNarrow();
  const [search, setSearch] = useState("");
  const [kind, setKind] = useState("");
  const kinds = useMemo(() => [...new Set(history.entries.map((entry) => entry.kind))].sort(), [history.entries]);
  const rows = useMemo(() => {
    const words = search.trim().toLowerCase();
    return history.entries
      .filter((entry) => (!kind || entry.kind === kind) && (!words || `${entry.text} ${entry.node}`.toLowerCase().includes(words)))
      .reverse();
  }, [history.entries, search, kind]);
  const now = model.nowS();
  const columns = [
    { name: "time", head: "Time", className: "time tight", cell: (entry) => clock(entry.at_s, now) },
    !narrow && { name: "round", head: "Round", className: "number tight", cell: (entry) => count(entry.round) },
    !narrow && { name: "kind", head: "Kind", className: "tight", cell: (entry) => html`<span class=${`dot ${toneOf(entry) || "calm"}`}>${entry.kind}</span>` },
    { name: "text", head: "What happened", className: "grow", cell: (entry) => html`
      <button type="button" class="plain text" onClick=${() => show([entry])}>${entry.text}</button>` },
  ].filter(Boolean);
  const more = history.older && history.entries.length < MOST;
  return html`
    <${Panel} id="events" title="Events" wide="full" note=${html`
      <div class="filters">
        <input type="search" aria-label="Search events" placeholder="Text or node" value=${search} onInput=${(event) => setSearch(event.target.value)} />
        <select aria-label="Only events of this kind" value=${kind} onChange=${(event) => setKind(event.target.value)}>
          <option value="">All kinds</option>
          ${kinds.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
        </select>
      </div>`}>
      <${VirtualTable} label="Events" columns=${columns} rows=${rows} keyOf=${(entry) => entry.number} rowHeight=${narrow ? 44 : 30}
        height=${420} toneOf=${toneOf} onEnd=${more ? () => model.loadOlder() : undefined} empty="No event matches." />
      <p class="foot quiet small">${count(rows.length)} of ${count(history.entries.length)} events here.
        ${more && html` <button type="button" class="plain link" onClick=${() => model.loadOlder()}>Load older ones</button>`}</p>
    <//>`;
}
