// Values over time for a chart, at most `most` of them: when there are more, every second one goes.

export class Samples {
  constructor(most = 3_600) {
    this.most = most;
    this.times = [];
    this.values = [];
    this.everyS = 1;
  }

  /** Add a value, unless the last one is too recent. `value` null: unknown, a gap in the line. */
  add(atS, value) {
    const last = this.times[this.times.length - 1];
    if (last !== undefined && atS - last < this.everyS) return;
    this.times.push(atS);
    this.values.push(value);
    if (this.times.length <= this.most) return;
    this.times = this.times.filter((_, at) => at % 2 === 0);
    this.values = this.values.filter((_, at) => at % 2 === 0);
    this.everyS *= 2;
  }
}
