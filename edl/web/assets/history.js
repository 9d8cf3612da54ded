// The entries of the history that the page holds: a bounded number of the newest, and older ones on request.
import { jobPath } from "./api.js";

export const PAGE = 500;
export const MOST = 5_000;

/** Entries of both lists in the order of their numbers, each once, at most `most`; the newest are kept. Pure. */
export function merged(entries, more, most = MOST) {
  const last = entries.length ? entries[entries.length - 1].number : 0;
  if (more.every((entry, at) => entry.number > (at ? more[at - 1].number : last))) return [...entries, ...more].slice(-most);
  const byNumber = new Map();
  for (const entry of [...entries, ...more]) byNumber.set(entry.number, entry);
  return [...byNumber.values()].sort((one, other) => one.number - other.number).slice(-most);
}

/** Whether entries may be missing between what is held and the last entries of a status. */
export function hasGap(entries, tail) {
  if (!tail.length) return false;
  return !entries.length || tail[0].number > entries[entries.length - 1].number + 1;
}

/** Whether the last entries of a status are those of another run of the job, whose numbers begin with 1 again. Pure. */
export function otherRun(entries, tail) {
  if (!entries.length || !tail.length) return false;
  if (tail[tail.length - 1].number < entries[entries.length - 1].number) return true;
  const times = new Map(entries.slice(-PAGE).map((entry) => [entry.number, entry.at_s]));
  return tail.some((entry) => times.has(entry.number) && times.get(entry.number) !== entry.at_s);
}

export class History {
  constructor() {
    this.entries = [];
    /** Whether there may be older entries at the Master. */
    this.older = true;
    this.loading = null;
  }

  /** Take the last entries of a status; `ask(path)` returns a response. Fetches what is missing between. */
  async follow(tail, job, ask) {
    if (otherRun(this.entries, tail)) {
      this.entries = [];
      this.older = true;
    }
    if (!hasGap(this.entries, tail)) {
      const last = this.entries[this.entries.length - 1].number;
      const later = tail.filter((entry) => entry.number > last);
      if (later.length) this.entries = merged(this.entries, later);
      return later.length > 0;
    }
    if (this.loading) return false;
    const after = this.entries.length ? this.entries[this.entries.length - 1].number : 0;
    const found = await this.#load(job, ask, `after=${after}&last=${PAGE}`);
    if (!after) this.older = found.length === PAGE;
    this.entries = merged(this.entries, merged(found, tail));
    return true;
  }

  /** Fetch the page before the first entry. Room for it is limited: beyond `MOST` entries nothing older is fetched. */
  async loadOlder(job, ask) {
    if (this.loading || !this.older || !this.entries.length) return false;
    const room = MOST - this.entries.length;
    if (room <= 0) return false;
    const found = await this.#load(job, ask, `before=${this.entries[0].number}&last=${Math.min(PAGE, room)}`);
    this.older = found.length > 0;
    this.entries = merged(found, this.entries);
    return true;
  }

  async #load(job, ask, query) {
    this.loading = ask(`${jobPath(job, "events")}?${query}`);
    try {
      const text = await (await this.loading).text();
      return text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
    } finally {
      this.loading = null;
    }
  }
}

