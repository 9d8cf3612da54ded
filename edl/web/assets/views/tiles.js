// The job in a few numbers.
import { checkpointOf } from "../checkpoint.js";
import { count, counted, duration, percent, step, three } from "../format.js";
import { html } from "../html.js";
import { goodput, pace, ranks } from "../status.js";

function Tile({ name, value, unit, tone, children }) {
  return html`
    <div class=${`tile ${tone ?? ""}`}>
      <dt>${name}</dt>
      <dd><span class="value">${value}</span>${unit && html`<span class="unit"> ${unit}</span>`}</dd>
      <dd class="note">${children}</dd>
    </div>`;
}

export function Tiles({ model }) {
  const { status } = model;
  const { scale } = status;
  const speed = pace(status);
  const slots = goodput(status);
  const saved = checkpointOf(status, model.history.entries, model.nowS());
  const short = scale.desired && scale.nodes < scale.desired;
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
      <${Tile} name="Slowest node" value=${speed.slowest ? step(speed.slowest.step_s) : "none"} tone=${speed.slowest ? "warn" : ""}>
        ${speed.slowest ? `${speed.slowest.node}, ranks ${ranks(speed.slowest)}` : speed.rate ? "all within 10 % of the median" : "–"}
      <//>
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
