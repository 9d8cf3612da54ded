// Requests to a launcher: with the token in a header, relayed to the Master if it is elsewhere.

const TIMEOUT_MS = 20_000;

/** A response other than success. `code` 0: there was no response. */
export class ApiError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).message ?? message;
  } catch {
    // no JSON: something else than edl has answered
  }
  return new ApiError(response.status, message);
}

/** Send a request; returns the response if it is a success. Throws `ApiError`. */
export async function send(base, path, { token, method = "GET", body, accept, signal } = {}) {
  const headers = { "Edl-Relay": "1" };
  if (token) headers.Authorization = `Bearer ${token}`;
  if (accept) headers.Accept = accept;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, base), {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: signal ?? AbortSignal.timeout(TIMEOUT_MS),
      cache: "no-store",
      redirect: "manual",
    });
  } catch (error) {
    throw new ApiError(0, `${new URL(base).host} does not answer (${error.message})`);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

/** As `send`, for JSON. */
export async function sendJson(base, path, options) {
  return (await send(base, path, options)).json();
}

/** The path of a part of a job. */
export const jobPath = (job, ...parts) => ["v1/jobs", job, ...parts].map((one, at) => (at ? encodeURIComponent(one) : one)).join("/");
