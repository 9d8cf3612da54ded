// Progress of the data sets, and the load of the parameter servers.
import { bytes, count, counted, digits, duration, percent } from "../format.js";
import { html } from "../html.js";
import { countsOf } from "../status.js";
import { Panel } from "./panel.js";

const ALL = "pservers";

export function DataSets({ status }) {
  const alone = !status.services.some((one) => one.service === "ps");
  const sets = status.services.filter((one) => one.service === "data");
  if (!sets.length) return null;
  return html`
    <${Panel} id="data" title="Data" wide=${alone ? "full" : "half"}>
      <div class="sets">${sets.map((one) => html`<${DataSet} key=${one.name} one=${one} />`)}</div>
    <//>`;
}

function DataSet({ one }) {
  const counts = countsOf(one);
  const records = counts.records > 0 && counts.done_records !== undefined;
  const [done, all] = records ? [counts.done_records, counts.records] : [counts.done_shards ?? 0, counts.shards ?? 0];
  if (!all) return html`<p class="line">${one.text}</p>`;
  const noun = records ? "records" : "shards";
  return html`
    <div class="progress">
      <p><strong>${one.name}</strong>${counts.epoch !== undefined && html` <span class="quiet">epoch ${count(counts.epoch)}</span>`}
        <span class="right">${percent(done / all)}</span></p>
      <progress max=${all} value=${done} aria-label=${`Progress of data set ${one.name}`}></progress>
      <p class="quiet small">${count(done)} of ${count(all)} ${noun}${counts.records_per_s > 0 ? `, ${digits(counts.records_per_s)} records/s` : ""}${counts.left_s > 0 ? `, ${duration(counts.left_s)} left` : ""}${counts.leased_shards > 0 ? `, ${counted(counts.leased_shards, "shard")} leased` : ""}</p>
      ${counts.quarantined_shards > 0 && html`<p class="small tone-warn">${counted(counts.quarantined_shards, "shard")} quarantined</p>`}
    </div>`;
}

export function ParameterServers({ status }) {
  const items = status.services.filter((one) => one.service === "ps");
  if (!items.length) return null;
  const servers = items.filter((one) => countsOf(one).number !== undefined && countsOf(one).owned_buckets !== undefined);
  const lines = items.filter((one) => !servers.includes(one));
  const most = Math.max(1, ...servers.map((one) => countsOf(one).rows_bytes ?? 0));
  return html`
    <${Panel} id="ps" title="Parameter servers" wide="half">
      ${lines.map((one) => html`<p key=${one.name} class="line"><strong>${one.name === ALL ? "All" : one.name}</strong> ${one.text}</p>`)}
      ${servers.length > 0 && html`
        <div class="scroller" role="region" aria-label="Table: load of the parameter servers" tabindex="0">
        <table>
          <thead><tr><th scope="col">Pserver</th><th scope="col" class="number">Buckets</th><th scope="col" class="number">Copies</th>
            <th scope="col" class="number">Rows</th><th scope="col" class="number step">Memory</th><th scope="col" class="number">Lag</th></tr></thead>
          <tbody>${servers.map((one) => html`<${Server} key=${one.name} one=${one} most=${most} />`)}</tbody>
        </table></div>`}
    <//>`;
}

function Server({ one, most }) {
  const counts = countsOf(one);
  return html`
    <tr title=${one.text}>
      <th scope="row">${one.name}</th>
      <td class="number">${count(counts.owned_buckets)}</td>
      <td class="number">${count(counts.copied_buckets)}</td>
      <td class="number">${counts.rows === undefined ? "–" : count(counts.rows)}</td>
      <td class="number step"><span class="meter" aria-hidden="true"><span style=${{ width: `${(100 * (counts.rows_bytes ?? 0)) / most}%` }}></span></span>
        <span>${counts.rows_bytes === undefined ? "–" : bytes(counts.rows_bytes)}</span></td>
      <td class=${`number ${counts.lag_s > 1 ? "tone-warn" : ""}`}>${counts.lag_s > 0.1 ? duration(counts.lag_s) : "–"}</td>
    </tr>`;
}

/** Services of other kinds, as lines. */
export function OtherServices({ status }) {
  const items = status.services.filter((one) => one.service !== "data" && one.service !== "ps");
  if (!items.length) return null;
  return html`
    <${Panel} id="services" title="Services" wide="half">
      ${items.map((one) => html`<p key=${one.service + one.name} class="line"><strong>${one.service}</strong> ${one.text}</p>`)}
    <//>`;
}
