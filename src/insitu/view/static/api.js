/** Requests to the server that the page came from, with the token of its link if it needs one. */

import { address } from "./links.js";

const TOKEN = "insitu-view-token";

/** An answer that is an error. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Moves the token of a link (`#token=...`) out of the address, where it would be copied along. */
export function takeToken() {
  const match = /^#token=(.+)$/.exec(location.hash);
  if (!match) return;
  setToken(decodeURIComponent(match[1]));
  history.replaceState(history.state, "", location.pathname + location.search);
}

/** @param {string} token */
export function setToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

/** @returns {Record<string, string>} */
export function authorization() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

/**
 * The JSON of `/api/NAME`.
 * @param {string} name @param {Record<string, any>} [parameters] @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function get(name, parameters = {}, signal) {
  let response;
  try {
    response = await fetch(address(`/api/${name}`, parameters), { headers: authorization(), signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The server does not answer. Is `insitu view` still running?");
  }
  const body = await response.json().catch(() => null);
  if (!response.ok)
    throw new ApiError(response.status, body?.error?.message ?? `The server answered ${response.status}.`);
  return body;
}
