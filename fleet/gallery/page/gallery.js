// The page: which campaign and which of its images, and what is new.

import { Grid } from "./grid.js";
import { get, ServerError, url } from "./server.js";
import { Viewer } from "./viewer.js";

const POLL_MILLISECONDS = 1000;
const READING_MILLISECONDS = 50; // each poll reads some of the records
const NAMES_MILLISECONDS = 10_000;
const FIRST_NAMES_MILLISECONDS = 500; // after the first images
const TYPING_MILLISECONDS = 200;

const byId = id => document.getElementById(id);
const number = new Intl.NumberFormat();
const tabs = [...document.querySelectorAll("[role=tab]")];
const fields = ["text", "lora", "worker", "keep"];

// What is shown; the address has it too, so that it outlives a reload.
const shown = { campaign: "", tab: "images", text: "", lora: "", worker: "", keep: "" };
let generation = null;
let asked = new AbortController();
let index = "", timer, namesAt = FIRST_NAMES_MILLISECONDS - NAMES_MILLISECONDS, toastTimer;

// The parameters of a row; a new index numbers its rows anew.
const where = row => ({ campaign: shown.campaign, seq: row[0], index });

const grid = new Grid(byId("grid"), {
  async load(from, count, signal) {
    try {
      const answer = await get("/api/rows", { ...shown, from, count }, signal);
      return answer.generation === generation ? answer.rows : null;
    } catch (error) {
      if (error.name !== "AbortError") say(error);
      return null;
    }
  },
  picture: row => url("/thumbnail", where(row)),
  open: rank => viewer.open(rank),
  follow(count) {
    byId("newer").hidden = count <= 0;
    byId("newer").textContent = `${number.format(count)} newer`;
  },
});

const viewer = new Viewer({
  where,
  row: rank => grid.row(rank),
  isImage: () => shown.tab === "images",
  total: () => grid.total,
  left(rank) {
    grid.activate(rank);
    grid.scroller.focus({ preventScroll: true });
  },
  choose(name, value) {
    const select = byId(name);
    if (![...select.options].some(each => each.value === value)) select.add(new Option(value, value));
    change({ tab: "images", [name]: value });
  },
  tell,
});

function tell(sentence) {
  const toast = byId("toast");
  toast.textContent = sentence;
  toast.hidePopover();
  toast.showPopover(); // above a dialog
  toast.classList.add("on");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => {
    toast.classList.remove("on");
    toast.hidePopover();
  }, 3000);
}

function say(error) {
  const isOurs = error instanceof ServerError;
  if (!isOurs && !(error instanceof TypeError)) throw error; // fetch's, without a server
  showProblem(isOurs ? error.message : "The gallery has ended: start `imagefleet gallery` again.");
  showStatus("lost", "not connected");
}

function showProblem(text) {
  byId("problem").hidden = !text;
  byId("problem").textContent = text;
}

function showStatus(kind, text) {
  byId("status").className = `status ${kind}`;
  byId("status").lastElementChild.textContent = text;
}

// Shows something else, from its newest on.
function change(difference) {
  Object.assign(shown, difference);
  history.replaceState(history.state, "", `#${new URLSearchParams(Object.entries(shown).filter(([, value]) => value))}`);
  asked.abort();
  asked = new AbortController();
  generation = null;
  for (const tab of tabs) tab.setAttribute("aria-selected", tab.dataset.tab === shown.tab);
  for (const tab of tabs) tab.tabIndex = tab.dataset.tab === shown.tab ? 0 : -1;
  for (const name of fields) if (byId(name).value !== shown[name]) byId(name).value = shown[name];
  for (const name of ["lora", "worker"]) byId(name).classList.toggle("on", Boolean(shown[name]));
  byId("campaign").value = shown.campaign;
  document.title = `${shown.campaign || "gallery"} - imagefleet`;
  byId("empty").hidden = true;
  grid.scroller.setAttribute("aria-label", tabs.find(each => each.dataset.tab === shown.tab).firstChild.data.trim());
  grid.reset(shown.tab);
  poll();
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden && generation !== null) return; // visibilitychange goes on
  const request = asked;
  let wait = POLL_MILLISECONDS;
  try {
    if (!shown.campaign) await findCampaign();
    if (shown.campaign) {
      const state = await get("/api/state", shown, request.signal);
      if (request === asked) showState(state);
      if (state.reading && !state.problem) wait = READING_MILLISECONDS;
      if (performance.now() - namesAt > NAMES_MILLISECONDS) await showNames();
    }
  } catch (error) {
    if (error.name === "AbortError") return; // another poll has begun
    say(error);
  }
  if (request === asked) timer = setTimeout(poll, wait);
}

function showState(state) {
  showProblem(state.problem);
  const isNew = generation === null, isOther = !isNew && generation !== state.generation;
  generation = state.generation;
  index = state.index;
  if (isOther) viewer.moved(grid.refresh(state.total));
  else grid.update(state.total);
  for (const tab of tabs) {
    const count = state.counts[tab.dataset.tab];
    tab.lastElementChild.textContent = count || !["cancelled", "dropped"].includes(tab.dataset.tab) ? number.format(count) : "";
    tab.classList.toggle("bad", tab.dataset.tab === "failed" && count > 0);
  }
  const ended = state.jobs, isDone = state.sent && ended >= state.sent;
  byId("progress").hidden = !state.sent || isDone;
  if (state.sent) byId("progress").firstElementChild.style.transform = `scaleX(${Math.min(1, ended / state.sent)})`;
  if (state.problem) showStatus("lost", "not connected");
  else if (state.reading) showStatus("live", `reading the records, ${Math.floor(100 * state.read)} %`);
  else if (isDone) showStatus("done", `${number.format(state.sent)} jobs, all ended`);
  else showStatus("live", state.sent ? `${number.format(ended)} of ${number.format(state.sent)} jobs` : "live");
  const { damaged, misfits } = state, told = [];
  if (damaged) told.push(`${number.format(damaged)} damaged records are left out`);
  if (misfits) told.push(`${number.format(misfits)} of the records that were looked at do not fit`);
  byId("status").title = told.join("; ");
  showEmpty(state);
}

function showEmpty(state) {
  const box = byId("empty"), isFiltered = fields.some(name => shown[name]);
  box.hidden = state.total > 0 || state.reading;
  byId("clear").hidden = !isFiltered;
  box.querySelector("pre").hidden = true;
  const words = { images: ["No images yet", "They appear here as workers store them."],
    failed: ["No failed jobs", "Jobs that cannot succeed appear here with their reasons."],
    cancelled: ["No cancelled jobs", "Jobs that imagefleet cancel has stopped appear here."],
    dropped: ["No dropped jobs", "Jobs that keep none of their images appear here with the reason."] }[shown.tab];
  const [title, text] = isFiltered ? ["Nothing matches", "No prompt, LoRA, worker and scores are like this."] : words;
  box.querySelector("h1").textContent = title;
  box.querySelector("p").textContent = text;
}

function showNoCampaign() {
  const box = byId("empty");
  box.hidden = false;
  byId("clear").hidden = true;
  box.querySelector("h1").textContent = "No campaign yet";
  box.querySelector("p").textContent = "Images appear here as soon as a worker stores the first one:";
  box.querySelector("pre").hidden = false;
  box.querySelector("pre").textContent = "imagefleet load jobs.jsonl\nimagefleet worker --model ./model";
  showStatus("live", "waiting");
}

async function findCampaign() {
  const { newest } = await showCampaigns({ first: 1 });
  if (newest) change({ campaign: newest });
  else showNoCampaign();
}

async function showCampaigns(parameters) {
  const found = await get("/api/campaigns", parameters);
  const select = byId("campaign"), names = found.campaigns;
  if (names.join("/") !== [...select.options].map(each => each.value).join("/")) {
    select.replaceChildren(...names.map(name => new Option(name, name)));
    select.value = shown.campaign;
  }
  select.title = found.storage;
  return found;
}

async function showNames() {
  namesAt = performance.now();
  if (document.activeElement.matches("select")) return; // it may be open
  await showCampaigns();
  const found = await get("/api/names", { campaign: shown.campaign });
  for (const [name, every] of [["lora", "All LoRAs"], ["worker", "All workers"]]) {
    const options = found[name].map(([value, count]) => new Option(`${value} (${number.format(count)})`, value));
    if (shown[name] && !options.some(each => each.value === shown[name])) options.push(new Option(shown[name], shown[name]));
    byId(name).replaceChildren(new Option(every, ""), ...options);
    byId(name).value = shown[name];
  }
}

let typing;
byId("text").addEventListener("input", event => {
  clearTimeout(typing);
  typing = setTimeout(() => change({ text: event.target.value.trim() }), TYPING_MILLISECONDS);
});
byId("text").addEventListener("keydown", event => {
  if (event.key !== "Enter" && event.key !== "ArrowDown") return;
  event.preventDefault();
  clearTimeout(typing);
  if (event.target.value.trim() !== shown.text) change({ text: event.target.value.trim() });
  grid.scroller.focus({ preventScroll: true });
});
byId("filters").addEventListener("submit", event => event.preventDefault());
for (const name of ["lora", "worker", "keep"]) {
  byId(name).addEventListener("change", event => change({ [name]: event.target.value }));
}
byId("campaign").addEventListener("change", event => {
  namesAt = -Infinity;
  change({ campaign: event.target.value, lora: "", worker: "" });
});
for (const tab of tabs) tab.addEventListener("click", () => change({ tab: tab.dataset.tab }));
document.querySelector("[role=tablist]").addEventListener("keydown", event => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
  change({ tab: next.dataset.tab });
  next.focus();
});
byId("clear").addEventListener("click", () => {
  change({ text: "", lora: "", worker: "", keep: "" });
  grid.scroller.focus({ preventScroll: true }); // the button is gone
});
byId("newer").addEventListener("click", () => {
  grid.toTop();
  grid.scroller.focus({ preventScroll: true });
});
addEventListener("keydown", event => {
  if (event.key === "/" && !viewer.isOpen && !event.target.matches("input, select")) {
    event.preventDefault();
    byId("text").focus();
  }
});
document.addEventListener("visibilitychange", () => document.hidden || poll());

for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  if (name in shown) shown[name] = value;
}
if (shown.campaign) {
  for (const name of ["lora", "worker"]) if (shown[name]) byId(name).add(new Option(shown[name], shown[name]));
  byId("campaign").add(new Option(shown.campaign, shown.campaign));
  change({});
  showCampaigns().catch(say);
} else {
  poll();
}
grid.scroller.focus({ preventScroll: true });
