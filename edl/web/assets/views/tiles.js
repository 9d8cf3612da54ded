// The job in a few numbers.
import { checkpointOf } from "../checkpoint.js";
import { count, counted, duration, percent, step, three } from "../format.js";
import { html } from "../html.js";
import { goodput, pace, ranks, slowestRank } from "../status.js";

function Tile({ name, value, unit, tone, children }) {
  return html`
    <div class=${`tile ${tone ?? ""}`}>
      <dt>${name}</dt>
      <dd><span class="value">${value}</span>${unit && html`<span class="unit"> ${unit}</span>`}</dd>
      <dd class="note">${children}</dd>
    </div>`;
}

/** The rank that the others wait for, where that is measured; else the node with the longest steps. */
function Slowest({ status, speed }) {
  const rank = slowestRank(status);
  if (rank) {
    return html`
      <${Tile} name="Slowest rank" value=${step(rank.ownS)} unit="own time" tone="warn">
        rank ${rank.rank} on ${rank.node.node}; the median is ${step(rank.medianS)}
      <//>`;
  }
  const node = speed.slowest;
  return html`
    <${Tile} name="Slowest node" value=${node ? step(node.step_s) : "none"} tone=${node ? "warn" : ""}>
      ${node ? `${node.node}, ranks ${ranks(node)}` : speed.rate ? "all within 10 % of the median" : "–"}
    <//>`;
}

export function Tiles({ model }) {
  const { status } = model;
  const { scale } = status;
  const speed = pace(status);
  const slots = goodput(status);
  const saved = checkpointOf(status, model.history.entries, model.nowS());
  const short = scale.asked && scale.nodes < scale.desired;
  const useful = slots.parts.find((one) => one.name === "useful")?.value ?? 0;
  const left = status.restarts_allowed - status.restarts_used;
  return html`
    <dl class="tiles">
      <${Tile} name="Workers" value=${count(status.world_size)} tone=${short ? "warn" : ""}>
        on ${counted(scale.nodes, "node")}${short ? ` of ${scale.desired} wanted` : ""}, ${scale.minimum} to ${scale.maximum} allowed
      <//>
      <${Tile} name="Pace" value=${speed.rate ? three(speed.rate) : "–"} unit=${speed.rate ? "steps/s" : ""}>
        ${speed.rate ? `a step takes ${step(speed.stepS)}` : "no step times reported"}
      <//>
      <${Slowest} status=${status} speed=${speed} />
      <${Tile} name="Goodput" value=${slots.total ? percent(useful / slots.total) : "–"}>
        ${slots.total ? `of ${duration(slots.total)} of slot time` : "nothing counted yet"}
      <//>
      <${Tile} name="Checkpoint" value=${saved.commit ? count(saved.commit) : "none"}>
        ${saved.ageS === null ? (saved.commit ? "age unknown" : "nothing written yet") : `${duration(saved.ageS)} ago`}${saved.behind > 0 ? `, ${counted(saved.behind, "commit")} behind` : ""}
      <//>
      <${Tile} name="Restarts left" value=${count(left)} tone=${left <= 0 && status.restarts_allowed ? "bad" : ""}>
        of ${count(status.restarts_allowed)}
      <//>
    </dl>`;
}
