// One image or failed job, with all that is known of it.

import { get, url } from "./server.js";

const byId = id => document.getElementById(id);
const number = new Intl.NumberFormat();
const moment = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

function element(kind, text = "", name = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = name;
  return made;
}

export class Viewer {
  constructor({ where, row, isImage, total, left, choose, tell }) {
    this.where = where; // row => the parameters that name it
    this.row = row; // rank => its row, from the server if need be
    this.isImage = isImage; // () => whether the list is of images
    this.total = total; // () => how many there are
    this.left = left; // rank => the list goes there
    this.choose = choose; // (filter, value) => shows what has that LoRA or worker
    this.tell = tell; // shows a sentence
    this.dialog = byId("viewer");
    this.dialog.addEventListener("keydown", event => this.key(event));
    this.dialog.addEventListener("cancel", event => {
      event.preventDefault();
      this.close();
    });
    byId("previous").addEventListener("click", () => this.step(1));
    byId("next").addEventListener("click", () => this.step(-1));
    byId("close").addEventListener("click", () => this.close());
    byId("copy").addEventListener("click", () => this.copy());
    // On a phone one goes back to the list.
    addEventListener("popstate", () => this.dialog.open && this.hide());
  }

  get isOpen() {
    return this.dialog.open;
  }

  open(rank) {
    if (!this.isOpen) {
      history.pushState({ viewer: true }, "");
      this.dialog.showModal();
      this.dialog.focus();
    }
    this.show(rank);
  }

  close() {
    if (history.state?.viewer) history.back();
    else this.hide();
  }

  hide() {
    this.dialog.close();
    byId("picture").removeAttribute("src");
    byId("picture").hidden = true;
    this.left(this.rank);
  }

  step(ranks) {
    const rank = this.rank + ranks;
    if (rank >= 0 && rank < this.total()) this.show(rank);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "ArrowLeft") this.step(1);
    else if (event.key === "ArrowRight") this.step(-1);
    else if (event.key === "c") this.copy();
    else return;
    event.preventDefault();
  }

  // The list was put in order anew.
  moved(ranks) {
    if (!this.isOpen) return;
    this.rank = Math.max(0, this.rank + ranks);
    this.showPlace();
  }

  showPlace() {
    const rank = this.rank, total = this.total();
    byId("previous").disabled = rank >= total - 1;
    byId("next").disabled = rank <= 0;
    byId("place").textContent = `${number.format(total - rank)} of ${number.format(total)}`;
  }

  async show(rank) {
    const shown = this.shown = {};
    this.record = this.address = null; // no button is about what was shown before
    this.rank = rank;
    this.showPlace();
    try {
      const row = await this.row(rank);
      if (this.shown !== shown || !row) return;
      const where = this.where(row);
      byId("title").textContent = row[1];
      byId("reason").hidden = true;
      byId("save").href = url("/picture", where);
      if (this.isImage()) this.showPicture(row, where);
      const record = await get("/api/record", where);
      if (this.shown !== shown || !this.isOpen) return;
      this.record = record;
      this.address = where;
      this.fill(record);
      this.prepare(this.rank - 1);
    } catch (error) {
      this.tell(error.message);
    }
  }

  // The next picture is there when it is asked for.
  async prepare(rank) {
    const row = rank >= 0 && (await this.row(rank));
    if (row && this.record?.blob) {
      new Image().src = url("/picture", this.where(row));
    }
  }

  fill(record) {
    const isImage = record.outcome === "completed";
    byId("title").textContent = record.images > 1 ? `${record.id} (${record.index + 1} of ${record.images})` : record.id;
    this.dialog.setAttribute("aria-label", isImage ? "Image" : "Job");
    this.dialog.querySelector(".actions").hidden = false;
    byId("save").hidden = !isImage;
    byId("save").download = (record.blob ?? "image").split("/").pop();
    byId("again").hidden = record.outcome !== "failed";
    byId("again").textContent = `To send it again: imagefleet replay ${record.campaign}/${record.id}`;
    byId("picture").alt = record.prompt ?? record.id;
    if (!isImage) {
      byId("picture").hidden = true;
      this.showReason(record.error ?? record.outcome, record.reason ?? "");
    }
    byId("facts").replaceChildren(...this.facts(record));
    this.dialog.querySelector("aside").scrollTop = 0;
  }

  // The thumbnail at once, then the picture itself.
  showPicture(row, where) {
    const shown = this.shown, preview = byId("picture"), full = new Image();
    preview.alt = full.alt = row[1];
    preview.className = "preview";
    preview.hidden = false;
    preview.src = url("/thumbnail", where);
    full.id = "picture";
    full.src = url("/picture", where);
    const isShown = () => this.shown === shown && this.isOpen;
    full.decode().then(
      () => isShown() && byId("picture").replaceWith(full),
      () => isShown() && this.failedPicture(where),
    );
  }

  async failedPicture(where) {
    const shown = this.shown;
    byId("picture").hidden = true;
    this.showReason("This picture cannot be shown", "");
    try {
      const response = await fetch(url("/picture", where));
      if (!response.ok && this.shown === shown) {
        byId("reason").querySelector("p").textContent = (await response.json()).error;
      }
    } catch {
      // The list says that the server is gone.
    }
  }

  showReason(title, text) {
    byId("reason").hidden = false;
    byId("reason").querySelector("b").textContent = title;
    byId("reason").querySelector("p").textContent = text;
  }

  *facts(record) {
    if (record.prompt) yield* this.words("Prompt", record.prompt);
    if (record.negative_prompt) yield* this.words("Negative prompt", record.negative_prompt);
    if (record.loras?.length) {
      yield element("h3", "LoRAs");
      const chips = element("div", "", "chips");
      for (const [name, weight] of record.loras) {
        const chip = this.filter("lora", name, "chip");
        chip.append(" ", element("small", String(weight)));
        chips.append(chip);
      }
      yield chips;
    }
    const list = document.createElement("dl");
    const size = record.width && record.height ? `${record.width} × ${record.height}` : null;
    const bytes = record.size_bytes ? `${number.format(Math.max(1, Math.round(record.size_bytes / 1000)))} kB` : null;
    const rows = [
      ["Seed", record.seed], ["Size", size], ["Steps", record.steps], ["Sampler", record.sampler],
      ["CFG scale", record.cfg_scale], ["Clip skip", record.clip_skip > 1 ? record.clip_skip : null],
      ["Stage", record.stages > 1 ? `${record.stage ?? 1} of ${record.stages}` : null],
      ["Model", record.model], ["Worker", record.worker === "?" ? null : this.filter("worker", record.worker, "link")],
      ["GPU", record.gpu], ["Time in the worker", record.seconds == null ? null : `${record.seconds.toFixed(1)} s`],
      ["Attempts", record.attempts > 1 ? record.attempts : null],
      [record.outcome === "completed" ? "Stored" : "Ended", moment.format(new Date(record.at))],
      ["File", bytes], ["Blob", record.blob], ["Message", record.outcome === "completed" ? null : record.source],
    ];
    for (const [name, value] of Object.entries(record.scores ?? {})) rows.push([`Score ${name}`, value]);
    for (const [name, value] of Object.entries(record.metadata ?? {})) {
      rows.push([name, typeof value === "string" ? value : JSON.stringify(value)]);
    }
    for (const [name, value] of rows) {
      if (value === null || value === undefined || value === "") continue;
      const fact = document.createElement("dd");
      fact.append(typeof value === "number" && name !== "Seed" ? number.format(value) : value);
      list.append(element("dt", name), fact);
    }
    yield list;
  }

  *words(title, text) {
    yield element("h3", title);
    yield element("p", text, "words");
  }

  filter(name, value, look) {
    const button = element("button", value, look);
    button.title = `Only images of this ${name === "lora" ? "LoRA" : name}`;
    button.addEventListener("click", () => {
      const choose = () => this.choose(name, value);
      if (history.state?.viewer) addEventListener("popstate", choose, { once: true });
      this.close();
      if (!history.state?.viewer) choose();
    });
    return button;
  }

  async copy() {
    if (!this.record) return this.tell("One moment: its parameters are still being read");
    try {
      await navigator.clipboard.writeText(this.record.text);
      this.tell("The job is in the clipboard, as JSON");
    } catch {
      this.tell("The browser does not allow copying here: open the gallery at localhost");
    }
  }
}
