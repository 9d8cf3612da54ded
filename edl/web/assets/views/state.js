// Checkpoint, commits, settings.
import { checkpointOf } from "../checkpoint.js";
import { count, counted, duration } from "../format.js";
import { html } from "../html.js";
import { settingsText } from "../status.js";
import { Panel } from "./panel.js";

export function State({ model }) {
  const { status } = model;
  const saved = checkpointOf(status, model.history.entries, model.nowS());
  const { settings, scale } = status;
  const rows = [
    ["Checkpoint", saved.commit ? `commit ${count(saved.commit)} of era ${status.saved.era}` : "none"],
    saved.commit && ["Age", saved.ageS === null ? "unknown" : duration(saved.ageS)],
    status.saved_in && ["Location", html`<code>${status.saved_in}</code>`],
    ["Newest commit", status.commit ? `${count(status.commit)}${saved.behind > 0 ? `, ${counted(saved.behind, "commit")} after the checkpoint` : ""}` : "none reported"],
    status.holders > 0 && ["Commits in memory", status.holders === 1 ? "on one node only" : `each on ${count(status.holders)} nodes or more`],
    status.restored.commit > 0 && ["World began from", `commit ${count(status.restored.commit)} of era ${status.restored.era}`],
    settings?.number > 0 && ["Settings", settingsText(settings)],
    scale.need_s > 0 && ["To leave, a node needs", duration(scale.need_s)],
    scale.owner && ["Size decided by", scale.owner],
    scale.by && ["Last request", `${scale.by}${scale.reason ? `: ${scale.reason}` : ""}`],
    ["Fault tolerance", status.fault_tolerance],
    ["Master", status.master],
  ].filter(Boolean);
  return html`
    <${Panel} id="state" title="State" wide="third">
      <dl class="facts">${rows.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <//>`;
}
