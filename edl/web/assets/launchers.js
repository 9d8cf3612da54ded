// The launchers at which the job may be found: this page's own, Masters, and the other nodes of the job.

const MOST_MASTERS = 4;
const OTHERS_AT_ONCE = 4;

export class Launchers {
  /** `own`: the address that this page came from, with a slash at its end. */
  constructor(own) {
    this.own = own;
    this.current = own;
    this.masters = [];
    this.hosts = [];
    this.offset = 0;
  }

  /** Remember the address of a Master. */
  learnMaster(url) {
    if (!url) return;
    const base = url.endsWith("/") ? url : `${url}/`;
    this.masters = [base, ...this.masters.filter((one) => one !== base)].slice(0, MOST_MASTERS);
  }

  /** Remember the hosts of the job's nodes. */
  learnNodes(nodes) {
    this.hosts = [...new Set(nodes.map((node) => node.host))];
  }

  /** Addresses to try now, the likeliest first. Each call goes on to other nodes. */
  candidates() {
    const ports = new Set([this.own, ...this.masters].map((base) => new URL(base).port));
    const { protocol } = new URL(this.own);
    const others = [];
    for (const host of this.hosts) {
      const name = host.includes(":") ? `[${host}]` : host;
      for (const port of ports) others.push(`${protocol}//${name}${port ? `:${port}` : ""}/`);
    }
    const begin = others.length ? this.offset % others.length : 0;
    this.offset += OTHERS_AT_ONCE;
    const some = [...others.slice(begin), ...others.slice(0, begin)].slice(0, OTHERS_AT_ONCE);
    return [...new Set([this.current, this.own, ...this.masters, ...some])];
  }
}
