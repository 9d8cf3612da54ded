// All nodes of the job: state, ranks, step times.
import { useMemo, useState } from "../vendor/hooks.js";
import * as actions from "../actions.js";
import { count, step } from "../format.js";
import { html } from "../html.js";
import { isSlow, pace, ranks, slowestRank, stateOf, statesOf, toneOf } from "../status.js";
import { useNarrow } from "./narrow.js";
import { OUTPUT, STACKS } from "./output_dialog.js";
import { Panel } from "./panel.js";
import { VirtualTable } from "./virtual_table.js";

const ORDERS = {
  rank: (one, other) => (one.position < 0) - (other.position < 0) || one.position - other.position,
  node: (one, other) => one.node.localeCompare(other.node, "en", { numeric: true }),
  state: (one, other) => stateOf(one).localeCompare(stateOf(other)) || ORDERS.rank(one, other),
  step: (one, other) => one.step_s - other.step_s,
};

export function Nodes({ model, act, look }) {
  const { status } = model;
  const narrow = useNarrow();
  const [search, setSearch] = useState("");
  const [state, setState] = useState("");
  const [order, setOrder] = useState({ by: "rank", up: true });
  const speed = pace(status);
  const rows = useMemo(() => {
    const words = search.trim().toLowerCase();
    const found = status.nodes.filter((node) =>
      (!state || stateOf(node) === state) && (!words || `${node.node} ${node.host}`.toLowerCase().includes(words)));
    found.sort((one, other) => (order.up ? 1 : -1) * ORDERS[order.by](one, other));
    return found;
  }, [status.nodes, search, state, order]);
  const waitedFor = slowestRank(status)?.node.node;
  const longest = Math.max(...status.nodes.map((node) => node.step_s), 0);
  const sortable = (name) => ({
    sorted: order.by === name ? (order.up ? "ascending" : "descending") : "",
    sort: () => setOrder({ by: name, up: order.by === name ? !order.up : name !== "step" }),
  });
  const columns = [
    { name: "node", head: "Node", className: "grow name", cell: (node) => html`
      ${node.node}${!narrow && node.node === status.master && html` <span class="tag">Master</span>`}
      ${narrow && html`<span class="below quiet">${node.first_rank >= 0 ? `ranks ${ranks(node)}` : "no rank"}${node.node === status.master && ", Master"}</span>`}`, ...sortable("node") },
    { name: "state", head: "State", className: "state", cell: (node) => html`
      <span class=${`dot ${toneOf(node)}`}><span class="word">${stateOf(node)}</span></span>`, ...sortable("state") },
    !narrow && { name: "rank", head: "Ranks", className: "number tight", cell: ranks, ...sortable("rank") },
    { name: "step", head: "Step", className: "number step", cell: (node) => html`<${StepTime} node=${node} longest=${longest} slow=${isSlow(node, speed.stepS) || node.node === waitedFor} />`, ...sortable("step") },
    !narrow && { name: "host", head: "Host", className: "quiet", cell: (node) => node.host },
    !narrow && { name: "how", head: "Entered the round", className: "quiet how", cell: (node) => (node.underway ? node.how || "yes" : "–") },
    { name: "do", head: html`<span class="hidden">Actions</span>`, className: "tight", cell: (node) => html`<${NodeActions} node=${node} status=${status} act=${act} look=${look} />` },
  ].filter(Boolean);
  return html`
    <${Panel} id="nodes" title=${`Nodes (${count(status.nodes.length)})`} wide="full" note=${html`
      <div class="filters">
        <input type="search" aria-label="Search nodes by name or host" placeholder="Name or host" value=${search} onInput=${(event) => setSearch(event.target.value)} />
        <select aria-label="Only nodes in this state" value=${state} onChange=${(event) => setState(event.target.value)}>
          <option value="">All states</option>
          ${statesOf(status.nodes).map(([name, many]) => html`<option key=${name} value=${name}>${name} (${count(many)})</option>`)}
        </select>
      </div>`}>
      <${VirtualTable} label="Nodes" columns=${columns} rows=${rows} keyOf=${(node) => node.node} rowHeight=${narrow ? 46 : 34} height=${440}
        empty=${status.nodes.length ? "No node matches." : "No node has registered."} />
    <//>`;
}

function StepTime({ node, longest, slow }) {
  return html`
    <span class="meter" aria-hidden="true"><span class=${slow ? "warn" : ""} style=${{ width: `${longest ? (100 * node.step_s) / longest : 0}%` }}></span></span>
    <span>${step(node.step_s)}${slow && html` <span class="tag warn">slow</span>`}</span>`;
}

/** A menu, closed: four buttons in each of many rows would be noise. */
function NodeActions({ node, status, act, look }) {
  const cordoned = status.scale.cordoned.includes(node.node);
  const offered = { cordon: cordoned ? actions.uncordon : actions.cordon, drain: actions.drain };
  const choose = (event) => {
    const choice = event.target.value;
    const action = offered[choice];
    event.target.value = "";
    if (action) act(action, node);
    else if (choice) look(choice, node);
  };
  return html`
    <select class="menu" aria-label=${`Actions for node ${node.node}`} onChange=${choose}>
      <option value="">⋯</option>
      ${Object.entries(offered).map(([name, action]) => html`<option key=${name} value=${name}>${action.name}…</option>`)}
      <option value=${OUTPUT}>Output…</option>
      <option value=${STACKS}>Stacks…</option>
    </select>`;
}
