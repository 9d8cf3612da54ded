// The worlds of the job: why each was formed, how long that took, and what it cost.
import { useMemo, useState } from "../vendor/hooks.js";
import { worldChanges } from "../changes.js";
import { clock, count, duration } from "../format.js";
import { html } from "../html.js";
import { useNarrow } from "./narrow.js";
import { Panel } from "./panel.js";
import { VirtualTable } from "./virtual_table.js";

const causesOf = (change) => change.causes.map((cause) => cause.text).join("; ") || change.formed.text;

export function Changes({ model, show }) {
  const narrow = useNarrow();
  const [onlyFailures, setOnlyFailures] = useState(false);
  const all = useMemo(() => worldChanges(model.history.entries), [model.history.entries]);
  const rows = onlyFailures ? all.filter((change) => change.failure) : all;
  const now = model.nowS();
  const columns = [
    { name: "round", head: "Round", className: "number tight", cell: (change) => count(change.round) },
    { name: "time", head: "Time", className: "time tight", cell: (change) => clock(change.formed.at_s, now) },
    { name: "cause", head: "Cause", className: "grow", cell: (change) => html`
      <button type="button" class=${`plain text dot ${change.failure ? "bad" : "calm"}`} onClick=${() => show([...change.causes, change.formed, change.underway].filter(Boolean))}>${causesOf(change)}</button>` },
    { name: "took", head: "Took", className: "number tight", cell: (change) => (change.cost ? duration(change.cost.tookS) : "–") },
    !narrow && { name: "cost", head: "Slot time", className: "number tight", cell: (change) => (change.cost ? duration(change.cost.slotS) : "–") },
    !narrow && { name: "redone", head: "Redone", className: "number tight", cell: (change) => (change.cost ? duration(change.cost.redoneS) : "–") },
  ].filter(Boolean);
  return html`
    <${Panel} id="changes" title="Rounds and incidents" wide="two-thirds"
      note=${html`<label><input type="checkbox" checked=${onlyFailures} onChange=${(event) => setOnlyFailures(event.target.checked)} /> only failures</label>`}>
      <${VirtualTable} label="Rounds and incidents" columns=${columns} rows=${rows} keyOf=${(change) => change.round}
        rowHeight=${narrow ? 44 : 30} height=${330}
        empty=${onlyFailures ? "No failure is in the history." : "No world has been formed yet."} />
    <//>`;
}
