// The status of the job, as edl status --json prints it, and what follows from it. Pure.
import { count, digits } from "./format.js";

const SLOW = 1.1;
const OUTSIDE = 1e6;

/** The status after a change, as the event `change` describes it. */
export function changed(status, change) {
  const nodes = new Map(status.nodes.map((node) => [node.node, node]));
  for (const node of change.nodes) nodes.set(node.node, node);
  for (const name of change.gone) nodes.delete(name);
  return { ...status, ...change.fields, nodes: inOrder([...nodes.values()]) };
}

/** Nodes in the order of their ranks; those outside the world last. */
function inOrder(nodes) {
  const place = (node) => (node.position < 0 ? OUTSIDE : node.position);
  return nodes.sort((one, other) => place(one) - place(other));
}

/** `0–3`, `4` for a single rank, `–` outside the world. */
export function ranks(node) {
  if (!(node.first_rank >= 0)) return "–";
  const workers = node.places?.length || node.slots;
  return workers === 1 ? `${node.first_rank}` : `${node.first_rank}–${node.first_rank + workers - 1}`;
}

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** How fast the job trains: the median of the nodes' step times, and the slowest node if it is well above that. */
export function pace(status) {
  const reporting = status.nodes.filter((node) => node.step_s > 0);
  if (!reporting.length) return { stepS: 0, rate: 0, slowest: null, nodes: 0 };
  const stepS = median(reporting.map((node) => node.step_s));
  const last = reporting.reduce((one, other) => (other.step_s > one.step_s ? other : one));
  return { stepS, rate: 1 / stepS, slowest: isSlow(last, stepS) ? last : null, nodes: reporting.length };
}

/** Whether a node's steps take well longer than the median. */
export const isSlow = (node, medianS) => node.step_s > 0 && node.step_s >= SLOW * medianS;

/** Seconds per step that a worker spent neither in collectives nor on commits, so that the others may have waited for it;
 * null: not measured. */
function ownS(worker) {
  if (!(worker.peers_share >= 0)) return null;
  return Math.min(1, Math.max(0, 1 - worker.peers_share - (worker.commit_share ?? 0))) * worker.step_s;
}

/** The rank whose own time is longest: `{node, rank, ownS, medianS}`; null if none is well above the median, or if the
 * Master does not report ranks. Workers that step together have equal step times; this says who makes them wait. */
export function slowestRank(status) {
  const found = status.nodes.flatMap((node) =>
    (node.ranks ?? []).map((worker, at) => ({ node, rank: node.first_rank + at, ownS: ownS(worker) })));
  const measured = found.filter((one) => one.ownS !== null && one.node.first_rank >= 0);
  if (measured.length < 2) return null;
  const medianS = median(measured.map((one) => one.ownS));
  const last = measured.reduce((one, other) => (other.ownS > one.ownS ? other : one));
  return last.ownS > 0 && last.ownS >= SLOW * medianS ? { ...last, medianS } : null;
}

/** The words for a node's state. */
export function stateOf(node) {
  const words = [node.state];
  if (node.draining) words.push("draining");
  if (!node.attached) words.push("not attached");
  return words.join(", ");
}

const GOOD = new Set(["running", "done"]);
const CALM = new Set(["spare", "ready", "warming", "preparing", "loading"]);

/** How a node's state is coloured. */
export function toneOf(node) {
  if (!node.attached) return "bad";
  if (node.draining || node.state === "leaving" || node.state === "cordoned") return "warn";
  return GOOD.has(node.state) ? "good" : CALM.has(node.state) ? "calm" : "warn";
}

/** Nodes by their state, for the line above the table. */
export function statesOf(nodes) {
  const found = new Map();
  for (const node of nodes) found.set(stateOf(node), (found.get(stateOf(node)) ?? 0) + 1);
  return [...found].sort((one, other) => other[1] - one[1]);
}

/** What is prescribed for batch and learning rate, as far as it is. */
export function settingsText(settings) {
  const parts = [];
  if (settings.global_batch > 0) parts.push(`batch ${count(settings.global_batch)}`);
  if (settings.factor > 0) parts.push(`learning rate × ${digits(settings.factor)}`);
  return `number ${settings.number}${parts.length ? `: ${parts.join(", ")}` : ""}`;
}

/** The counts of a service's item by name. */
export const countsOf = (service) => Object.fromEntries(service.counts.map((one) => [one.name, one.value]));

/** Slot-seconds by use, the largest first after `useful`; and their sum. */
export function goodput(status) {
  const parts = status.goodput.filter((one) => one.value > 0);
  const total = parts.reduce((sum, one) => sum + one.value, 0);
  const rank = (one) => (one.name === "useful" ? -Infinity : -one.value);
  return { total, parts: parts.sort((one, other) => rank(one) - rank(other)) };
}
