// Requests to the server that sent this page.

export class ServerError extends Error {}

export function url(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== ""));
  return `${path}?${query}`;
}

async function answer(response) {
  if (response.ok) return response.json();
  const text = await response.text();
  let reason = text.trim() || `HTTP ${response.status}`;
  try {
    reason = JSON.parse(text).error;
  } catch {
    // It is plain text.
  }
  throw new ServerError(reason);
}

export async function get(path, parameters, signal) {
  return answer(await fetch(url(path, parameters), { signal }));
}
