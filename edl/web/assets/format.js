// Numbers, durations and times for people. Pure.

const NUMBER = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** A number with thousands separators: `5,310`. */
export const count = (value) => NUMBER.format(value ?? 0);

/** A number with its noun: `1 node`, `2 nodes`. */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** About three significant digits. */
export function digits(value) {
  if (!Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 99.95) return count(value);
  return String(Number(value.toPrecision(3)));
}

/** Exactly three significant digits, or all that stand before the point: of equal length below each other. */
export const three = (value) => (Math.abs(value) >= 99.95 ? count(value) : value.toPrecision(3));

/** A step time: `81 ms`, `1.25 s`; a dash if there is none. */
export function step(seconds) {
  if (!(seconds > 0)) return "–";
  return seconds >= 0.9995 ? `${three(seconds)} s` : `${three(1000 * seconds)} ms`;
}

/** A duration: `40 s`, `3 min`, `2 h 5 min`, `4 d 2 h`. */
export function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 1) return seconds > 0 ? `${Math.max(1, Math.round(1000 * seconds))} ms` : "0 s";
  if (seconds < 90) return `${seconds < 10 ? digits(seconds) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  const hours = Math.round(minutes / 60);
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A share: `97.6 %`. Neither 0 nor 100 unless it is exactly that. */
export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const value = 100 * share;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  if (value > 99.9 && value < 100) return "> 99.9 %";
  return `${value >= 99.95 || value === 0 ? value.toFixed(0) : value.toFixed(1)} %`;
}

/** An amount of bytes: `12.0 MiB`. */
export function bytes(size) {
  let value = size ?? 0;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024 || unit === "TiB") return `${unit === "B" ? count(value) : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return "–";
}

const two = (value) => String(value).padStart(2, "0");

/** The time of day of an event, with the date unless it is today: `13:21:17`, `11-28 13:21:17`. */
export function clock(atSeconds, nowSeconds) {
  const at = new Date(1000 * atSeconds);
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const today = new Date(1000 * nowSeconds).toDateString() === at.toDateString();
  return today ? time : `${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}`;
}
