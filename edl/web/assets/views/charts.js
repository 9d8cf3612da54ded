// The pace since the page was opened, and the size since the beginning of the history.
import { useMemo } from "../vendor/hooks.js";
import { sizes } from "../changes.js";
import { count, digits, three } from "../format.js";
import { html } from "../html.js";
import { pace } from "../status.js";
import { Chart } from "./chart.js";
import { Panel } from "./panel.js";

export function Charts({ model }) {
  const { status, history, rates } = model;
  const rate = pace(status).rate;
  const [times, workers] = useMemo(() => sizes(history.entries), [history.entries]);
  const until = Math.floor(model.nowS());
  const ended = status.phase === "ended" || !times.length;
  const size = ended ? [times, workers] : [[...times, Math.max(until, times[times.length - 1])], [...workers, workers[workers.length - 1]]];
  return html`
    <${Panel} id="charts" title="Over time" wide="two-thirds">
      <${Chart} title="Steps per second, since this page was opened" data=${[rates.times, rates.values]} format=${digits}
        summary=${rate ? `${three(rate)} now` : "none reported"} />
      <${Chart} title="Workers, as far as the history goes" data=${size} format=${count} stepped=${true}
        summary=${`${count(status.world_size)} now, in ${count(times.length)} changes`} />
    <//>`;
}
