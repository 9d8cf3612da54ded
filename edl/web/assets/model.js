// What the page knows, and what it does about it. Views read it; `changed` is called after each change.
import { jobPath, send, sendJson } from "./api.js";
import { History } from "./history.js";
import { Launchers } from "./launchers.js";
import { Live } from "./live.js";
import { Samples } from "./samples.js";
import { pace } from "./status.js";
import { keepToken, readToken } from "./token.js";

export class Model {
  constructor(own, changed) {
    this.changed = changed;
    this.launchers = new Launchers(own);
    this.live = new Live(this.launchers, (told) => this.#take(told));
    this.token = readToken();
    this.rights = "";
    this.job = "";
    this.base = own;
    this.status = null;
    /** Why there is no connection; empty: there is one, or none was tried. */
    this.lost = "";
    /** Why a token is needed; null: none is. */
    this.locked = null;
    this.clockS = 0;
    this.history = new History();
    this.rates = new Samples();
    /** The outcome of the last request: `{text, ok}`, or null. */
    this.outcome = null;
  }

  start() {
    this.live.start(this.token);
  }

  /** Seconds since 1970 by the clock of the launcher that answers. */
  nowS() {
    return Date.now() / 1000 + this.clockS;
  }

  /** The page came from another address than the launcher that answers now. */
  get moved() {
    return this.base !== this.launchers.own;
  }

  /** Use this token from now on. */
  enter(token) {
    this.token = token;
    keepToken(token);
    this.live.start(token); // the form stays until a launcher has accepted it
    this.changed();
  }

  /** Forget token and data. */
  leave() {
    this.live.stop();
    keepToken("");
    this.token = "";
    this.rights = "";
    this.status = null;
    this.history = new History();
    this.locked = "";
    this.changed();
  }

  /** Check a token for full access, and use it. Returns what is wrong with it; empty: nothing. */
  async unlock(token) {
    try {
      const { rights } = await sendJson(this.base, "v1/jobs", { token });
      if (rights !== "full") return "this token is read-only";
    } catch (error) {
      return error.message;
    }
    this.rights = "full";
    this.token = token;
    this.live.token = token;
    keepToken(token);
    this.changed();
    return "";
  }

  /** Send the request of an action; returns what is wrong, empty if it was accepted. */
  async act(action, node, value) {
    const { method, path, body } = action.request(this.job, node, value);
    try {
      const answer = await sendJson(this.base, path, { token: this.token, method, body: { ...body, requester: "dashboard" } });
      this.outcome = { ok: true, text: answer.message ?? `${action.name}: accepted` };
    } catch (error) {
      return error.message;
    } finally {
      this.changed();
    }
    return "";
  }

  /** The newest lines of a node's workers, or with `after` those since then. Throws `ApiError`. */
  output(node, after, lines) {
    const path = `${jobPath(this.job, "nodes", node.node, "output")}?after=${after}&lines=${lines}`;
    return sendJson(this.base, path, { token: this.token });
  }

  /** The stacks of a node's workers. Throws `ApiError`. */
  stacks(node) {
    return sendJson(this.base, jobPath(this.job, "nodes", node.node, "stacks"), { token: this.token, method: "POST" });
  }

  dismiss() {
    this.outcome = null;
    this.changed();
  }

  loadOlder() {
    this.#load(() => this.history.loadOlder(this.job, (path) => this.#ask(path)));
  }

  #ask(path) {
    return send(this.base, path, { token: this.token });
  }

  async #load(what) {
    try {
      if (await what()) this.changed();
    } catch {
      // the next status tries again
    }
  }

  #take(told) {
    if (told.found) {
      const { job, rights, base, clockS } = told.found;
      Object.assign(this, { job, rights, base, clockS, lost: "", locked: null });
    }
    if (told.status) {
      this.status = told.status;
      this.rates.add(this.nowS(), told.status.phase === "running" ? pace(told.status).rate || null : null);
      this.#load(() => this.history.follow(told.status.history, this.job, (path) => this.#ask(path)));
    }
    if (told.lost !== undefined) this.lost = told.lost;
    if (told.unauthorized !== undefined) this.locked = told.unauthorized;
    this.changed();
  }
}
