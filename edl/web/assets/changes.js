// Changes of the world with their causes and costs, from the entries of the history. Pure.

const CAUSES = new Set([
  "node-joined", "node-returned", "node-lost", "node-leaving", "worker-failed", "world-stopped", "scale", "drain",
  "slot", "waiting",
]);
const FAILURES = new Set(["node-lost", "worker-failed"]);
const COST = new RegExp(
  "the change took ([\\d.,]+) s and cost ([\\d.,]+) s of slot time(?: \\(([^)]*)\\))?(?:, ([\\d.,]+) s of training redone)?",
);
const WORKERS = /([\d,]+) workers?\b/;
const MOST_CAUSES = 6;
/** Part of the whole time. */
const THINNEST = 1 / 300;

const number = (text) => Number(text.replaceAll(",", ""));

/** What a line about a world that is underway says of the change before it; null: nothing. */
export function costOf(text) {
  const found = COST.exec(text);
  if (!found) return null;
  const [, took, slots, parts, redone] = found;
  return { tookS: number(took), slotS: number(slots), parts: parts ?? "", redoneS: redone ? number(redone) : 0 };
}

/** The number of workers in a line about a new world; null: it has none. */
export function workersOf(text) {
  const found = WORKERS.exec(text);
  return found ? number(found[1]) : null;
}

/** One entry for each world, newest first: round, time, causes, cost. */
export function worldChanges(entries) {
  const found = [];
  const byRound = new Map();
  let causes = [];
  for (const entry of entries) {
    if (CAUSES.has(entry.kind)) {
      causes.push(entry);
    } else if (entry.kind === "world-formed") {
      const change = {
        round: entry.round,
        formed: entry,
        causes: causes.slice(-MOST_CAUSES),
        more: Math.max(0, causes.length - MOST_CAUSES),
        failure: causes.some((cause) => FAILURES.has(cause.kind)),
        cost: null,
      };
      found.push(change);
      byRound.set(entry.round, change);
      causes = [];
    } else if (entry.kind === "world-underway" && byRound.has(entry.round)) {
      const change = byRound.get(entry.round);
      change.underway = entry;
      change.cost = costOf(entry.text);
    }
  }
  return found.reverse();
}

/** Whether no world runs any more after this entry. A lost node stops the world without an entry of its own about that. */
const stops = (entry) => entry.kind === "world-stopped" || entry.kind === "waiting" ||
  (entry.kind === "scale" && entry.text.startsWith("the job is suspended"));

/** The size of the world over time: times in seconds, and numbers of workers. Pauses that would be thinner than a line
 * are left out. */
export function sizes(entries) {
  const span = entries.length ? entries[entries.length - 1].at_s - entries[0].at_s : 0;
  const times = [];
  const workers = [];
  for (const entry of entries) {
    const value = entry.kind === "world-formed" ? workersOf(entry.text) : stops(entry) ? 0 : null;
    if (value === null) continue;
    const last = times.length - 1;
    if (value > 0 && workers[last] === 0 && entry.at_s - times[last] < span * THINNEST) {
      times.pop();
      workers.pop();
    }
    if (value === workers[workers.length - 1]) continue;
    times.push(times.length ? Math.max(entry.at_s, times[times.length - 1]) : entry.at_s);
    workers.push(value);
  }
  return [times, workers];
}
