// The whole page.
import { useState } from "../vendor/hooks.js";
import { clock } from "../format.js";
import { html } from "../html.js";
import { ActionDialog } from "./action_dialog.js";
import { Changes } from "./changes.js";
import { Charts } from "./charts.js";
import { Dialog } from "./dialog.js";
import { Errors } from "./errors.js";
import { Events } from "./events.js";
import { Goodput } from "./goodput.js";
import { Nodes } from "./nodes.js";
import { OutputDialog } from "./output_dialog.js";
import { Problems } from "./problems.js";
import { DataSets, OtherServices, ParameterServers } from "./services.js";
import { State } from "./state.js";
import { Tiles } from "./tiles.js";
import { TokenForm } from "./token_form.js";
import { TopBar } from "./top_bar.js";

export function App({ model }) {
  const [asked, setAsked] = useState(null);
  const [entries, setEntries] = useState(null);
  const [looked, setLooked] = useState(null);
  const look = (kind, node) => setLooked({ kind, node });
  const act = (action, node) => setAsked({ action, node });
  const { status } = model;
  if (model.locked !== null) return html`<${Locked} model=${model} />`;
  return html`
    <${TopBar} model=${model} act=${act} />
    <main id="main">
      <${Problems} model=${model} />
      ${status ? html`
        <p class="reason">${status.reason}</p>
        <${Tiles} model=${model} />
        <div class="panels">
          <${Charts} model=${model} /><${Goodput} model=${model} />
          <${Changes} model=${model} show=${setEntries} /><${State} model=${model} />
          <${Errors} model=${model} />
          <${DataSets} status=${status} /><${ParameterServers} status=${status} /><${OtherServices} status=${status} />
          <${Nodes} model=${model} act=${act} look=${look} />
          <${Events} model=${model} show=${setEntries} />
        </div>` : html`<p class="empty">${model.lost ? "Looking for the Master at all launchers that this page knows." : "Connecting…"}</p>`}
    </main>
    <${Outcome} model=${model} />
    ${asked && status && html`<${ActionDialog} model=${model} action=${asked.action} node=${asked.node} close=${() => setAsked(null)} />`}
    ${looked && html`<${OutputDialog} model=${model} kind=${looked.kind} node=${looked.node} close=${() => setLooked(null)} />`}
    ${entries && html`<${Entries} model=${model} entries=${entries} close=${() => setEntries(null)} />`}`;
}

function Locked({ model }) {
  return html`
    <main id="main" class="locked">
      <div class="card">
        <img src="assets/icon.svg" alt="" width="36" height="36" />
        <h1>edl dashboard</h1>
        <${TokenForm} label="Token of the job" why=${model.locked || model.lost} enter=${(token) => model.enter(token)} />
      </div>
    </main>`;
}

function Outcome({ model }) {
  return html`
    <div class="outcome" role="status">
      ${model.outcome && html`<p>${model.outcome.text} <button type="button" class="plain" onClick=${() => model.dismiss()}>Dismiss</button></p>`}
    </div>`;
}

function Entries({ model, entries, close }) {
  const now = model.nowS();
  return html`
    <${Dialog} title=${entries.length === 1 ? `Event ${entries[0].number}` : `Round ${entries[entries.length - 1].round}`} onClose=${close}>
      <ol class="entries">
        ${entries.map((entry) => html`
          <li key=${entry.number}><p class="quiet small">${clock(entry.at_s, now)} · ${entry.kind}${entry.node ? ` · ${entry.node}` : ""} · round ${entry.round}</p><p>${entry.text}</p></li>`)}
      </ol>
      <div class="buttons"><button type="button" onClick=${close}>Close</button></div>
    <//>`;
}
