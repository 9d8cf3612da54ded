// A line over time, drawn by uPlot in the colours of the page.
import { useEffect, useRef } from "../vendor/hooks.js";
import uPlot from "../vendor/uplot.js";
import { html } from "../html.js";

const HEIGHT = 212;
const DAY_S = 86_400;
const LEAST_S = 30;

const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name);

const two = (value) => String(value).padStart(2, "0");

/** Labels of points in time, as short as their distance allows. */
function labels(plot, times, _axis, _space, distanceS) {
  const days = plot.scales.x.max - plot.scales.x.min > DAY_S;
  return times.map((time) => {
    const at = new Date(1000 * time);
    const day = `${two(at.getMonth() + 1)}-${two(at.getDate())}`;
    const minute = `${two(at.getHours())}:${two(at.getMinutes())}`;
    if (distanceS >= DAY_S) return day;
    if (days) return `${day} ${minute}`;
    return distanceS >= 60 ? minute : `${minute}:${two(at.getSeconds())}`;
  });
}

/** The time that is shown: at least some seconds, also for a single value. */
function spanOf(plot) {
  const times = plot.data[0];
  const end = times.length ? times[times.length - 1] : Date.now() / 1000;
  return [Math.min(times.length ? times[0] : end, end - LEAST_S), end];
}

function optionsOf({ format, stepped }, width) {
  const axis = {
    stroke: colour("--quiet"),
    grid: { stroke: colour("--grid"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui, sans-serif",
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
    scales: { x: { range: spanOf }, y: { range: (_, low, high) => [0, high > 0 ? 1.15 * high : 1] } },
    axes: [
      { ...axis, space: 90, size: 26, values: labels },
      { ...axis, size: 46, space: 34, values: (_, values) => values.map(format) },
    ],
    series: [
      {},
      {
        stroke: colour("--accent"),
        fill: colour("--accent-soft"),
        width: 1.75,
        points: { show: false },
        paths: stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      },
    ],
  };
}

/** `data`: times and values. `summary`: the same in words, for those who do not see it. */
export function Chart({ title, data, summary, format, stepped }) {
  const place = useRef(null);
  const plot = useRef(null);
  const readout = useRef(null);
  useEffect(() => {
    const element = place.current;
    const made = new uPlot(
      {
        ...optionsOf({ format, stepped }, element.clientWidth),
        hooks: {
          setCursor: [
            (chart) => {
              const at = chart.cursor.idx;
              const value = at === null || at === undefined ? null : chart.data[1][at];
              const when = value === null ? "" : new Date(1000 * chart.data[0][at]).toLocaleTimeString();
              readout.current.textContent = value === null || value === undefined ? "" : `${format(value)} at ${when}`;
            },
          ],
        },
      },
      data,
      element,
    );
    plot.current = made;
    const fit = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    fit.observe(element);
    const redraw = () => made.redraw();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("theme", redraw);
    scheme.addEventListener("change", redraw);
    return () => {
      fit.disconnect();
      removeEventListener("theme", redraw);
      scheme.removeEventListener("change", redraw);
      made.destroy();
    };
  }, []);
  const last = data[0].length ? data[0][data[0].length - 1] : 0;
  useEffect(() => plot.current.setData(data), [data[0].length, last, data[1][data[1].length - 1]]);
  return html`
    <figure class="chart">
      <figcaption>${title} <span class="readout" ref=${readout} aria-hidden="true"></span></figcaption>
      <div ref=${place} role="img" aria-label=${`${title}: ${summary}`}></div>
    </figure>`;
}
