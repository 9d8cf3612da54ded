// The connection to the job: finds a launcher that answers, follows the status, and begins again when it breaks.
import { ApiError, jobPath, send, sendJson } from "./api.js";
import { read } from "./sse.js";
import { changed } from "./status.js";

const PROBE_MS = 5_000;
const SILENT_MS = 45_000;
const FIRST_MS = 500;
const LONGEST_MS = 15_000;

/** Milliseconds to wait after this many failures in a row: doubled each time, with a random part so that many pages do
 * not come at once. `drawn`: from 0 to 1. */
export const pauseMs = (failures, drawn) => Math.min(LONGEST_MS, FIRST_MS * 2 ** Math.min(failures, 10)) * (0.5 + drawn / 2);

export class Live {
  /** `told`: called with `{status}`, `{found: {job, rights, base, clockS}}`, `{lost: why}` or `{unauthorized: why}`. */
  constructor(launchers, told) {
    this.launchers = launchers;
    this.told = told;
    this.token = "";
    this.stopping = null;
  }

  /** Connect, or connect again, with this token; runs until `stop`. */
  start(token) {
    this.stop();
    this.token = token;
    this.stopping = new AbortController();
    this.#run(this.stopping.signal);
  }

  /** End the connection. */
  stop() {
    this.stopping?.abort();
    this.stopping = null;
  }

  async #run(signal) {
    let failures = 0;
    while (!signal.aborted) {
      let why = new ApiError(0, "no launcher answers");
      let denied = null;
      for (const base of this.launchers.candidates()) {
        if (signal.aborted) return;
        try {
          await this.#follow(base, signal, () => (failures = 0));
          why = new ApiError(200, "the Master has ended its stream");
          break;
        } catch (error) {
          if (signal.aborted) return;
          if (error.code === 401) denied = error;
          else if (!why.code || error.code) why = error;
          if (denied && base === this.launchers.own) break;
        }
      }
      if (denied && !why.code) { // nobody knows this token
        this.told({ unauthorized: this.token ? denied.message : "" });
        return;
      }
      this.told({ lost: why.message });
      await pause(pauseMs(failures, Math.random()), signal);
      failures += 1;
    }
  }

  /** Follow the status at one launcher until it ends. Throws `ApiError`. */
  async #follow(base, signal, succeeded) {
    const token = this.token;
    const jobs = await sendJson(base, "v1/jobs", { token, signal: AbortSignal.any([signal, AbortSignal.timeout(PROBE_MS)]) });
    this.launchers.learnMaster(jobs.master);
    const silent = new AbortController();
    let timer = setTimeout(() => silent.abort(), SILENT_MS);
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENT_MS);
    };
    try {
      const response = await send(base, jobPath(jobs.jobs[0], "status"), {
        token,
        accept: "text/event-stream",
        signal: AbortSignal.any([signal, silent.signal]),
      });
      this.launchers.current = base;
      const date = Date.parse(response.headers.get("Date") ?? "");
      const clockS = Number.isNaN(date) ? 0 : (date - Date.now()) / 1000;
      this.told({ found: { job: jobs.jobs[0], rights: jobs.rights, base, clockS } });
      let status = null;
      for await (const event of read(response.body, alive)) {
        if (event.event === "status") status = JSON.parse(event.data);
        else if (event.event === "change" && status) status = changed(status, JSON.parse(event.data));
        else continue;
        succeeded();
        this.launchers.learnNodes(status.nodes);
        this.told({ status });
      }
    } catch (error) {
      throw error instanceof ApiError ? error : new ApiError(0, `the stream broke off (${error.message})`);
    } finally {
      clearTimeout(timer);
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    }, { once: true });
  });
}
