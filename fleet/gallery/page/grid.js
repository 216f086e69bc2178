// A list of any length of which only the rows near the screen are elements.
//
// An item is known by its rank: 0 is the oldest, so that new ones change no other's. The newest is
// shown first. Items come in pages, when they are near the screen.

const PAGE = 200;
const KEPT_PAGES = 60;
const GAP = 10;
const PADDING = 16;
const NARROW_PADDING = 8;
const SMALLEST_TILE = 168;
const NARROW_TILE = 116;
const JOB_HEIGHT = 88;
const NARROW_JOB_HEIGHT = 108; // two lines for the reason
const WIDEST_JOB = 560;

// Rows beyond the screen, as a share of its height: what a fast wheel moves between two frames.
const OVERSCAN = 1.2;

// Browsers limit an element's height, Firefox to 17.9 million pixels: longer lists scroll faster.
const MAX_HEIGHT = 12_000_000;

// Thumbnails beyond the screen that load at the same time, when those on it are there.
const FAR_AT_ONCE = 4;

// Of one row that is needed at once.
const ROW_TRIES = 20;
const ROW_MILLISECONDS = 100;

// Items that fly past are not asked for.
const FLYING_SCREENS = 2;
const LANDED_MILLISECONDS = 70;

export class Grid {
  constructor(scroller, { load, picture, open, follow }) {
    this.scroller = scroller;
    this.canvas = scroller.firstElementChild;
    this.load = load; // (first rank, count, signal) => rows
    this.picture = picture; // row => address of its thumbnail
    this.open = open; // rank => shows it
    this.follow = follow; // newer items that are not shown yet => shows their number
    this.reset("images");
    scroller.addEventListener("scroll", () => this.frame(), { passive: true });
    scroller.addEventListener("keydown", event => this.key(event));
    scroller.addEventListener("click", event => {
      const tile = event.target.closest(".tile");
      if (tile) this.choose(tile.rank);
    });
    new ResizeObserver(() => this.resize()).observe(scroller);
  }

  // Shows another list, which is empty until `update`.
  reset(kind) {
    this.kind = kind;
    this.total = 0;
    this.known = 0;
    this.active = null;
    this.pages = new Map();
    for (const request of this.requests?.values() ?? []) request.abort();
    this.requests = new Map();
    for (const tile of this.tiles?.values() ?? []) tile.remove();
    this.tiles = new Map();
    this.spare = [];
    this.loading = new Set();
    this.lastTop = 0;
    this.scroller.scrollTop = 0;
    this.scroller.removeAttribute("aria-activedescendant");
    this.measure();
    this.render();
  }

  // There are *total* items now; they appear at once for who looks at the newest.
  update(total) {
    const isFirst = this.total === 0;
    this.known = total;
    if (total === this.total) this.fill();
    else if (total < this.total || isFirst || this.virtualTop() < this.rowHeight / 2) this.showNew(!isFirst);
    this.follow(this.known - this.total);
  }

  // The items were put in order anew: what is on the screen stays until it is known what is there.
  // Returns by how much the ranks of the places on the screen have changed.
  refresh(total) {
    const waiting = this.known - this.total;
    const shift = Math.max(0, total - waiting) - this.total;
    this.pages.clear();
    for (const request of this.requests.values()) request.abort();
    this.requests.clear();
    this.total += shift;
    if (this.active !== null) this.active = Math.max(0, this.active + shift);
    const tiles = [...this.tiles.values()];
    this.tiles.clear();
    for (const tile of tiles) {
      this.name(tile, tile.rank + shift);
      tile.isOutdated = true;
      this.tiles.set(tile.rank, tile);
    }
    this.update(total);
    this.measure();
    this.render();
    return shift;
  }

  showNew(animated = false) {
    const before = this.total;
    if (before !== this.known) this.pages.delete(Math.floor(before / PAGE));
    this.total = this.known;
    if (animated && this.total - before < 100) this.newFrom = before;
    this.measure();
    this.render();
    this.newFrom = undefined;
    this.follow(0);
  }

  toTop() {
    this.scroller.scrollTop = 0;
    this.showNew();
  }

  measure() {
    const width = this.scroller.clientWidth, narrow = width < 520;
    this.height = this.scroller.clientHeight;
    this.padding = narrow ? NARROW_PADDING : PADDING;
    this.gap = narrow ? NARROW_PADDING : GAP;
    const inner = Math.max(1, width - 2 * this.padding), isJobs = this.kind !== "images";
    const smallest = isJobs ? WIDEST_JOB : narrow ? NARROW_TILE : SMALLEST_TILE;
    this.columns = Math.max(1, Math.floor((inner + this.gap) / (smallest + this.gap)));
    this.tileWidth = (inner - (this.columns - 1) * this.gap) / this.columns;
    this.tileHeight = isJobs ? (narrow ? NARROW_JOB_HEIGHT : JOB_HEIGHT) : this.tileWidth;
    this.rowHeight = this.tileHeight + this.gap;
    const rows = Math.ceil(this.total / this.columns);
    this.virtualHeight = rows ? rows * this.rowHeight - this.gap + 2 * this.padding : 0;
    this.realHeight = Math.min(this.virtualHeight, Math.max(MAX_HEIGHT, this.height));
    this.canvas.style.height = `${this.realHeight}px`;
  }

  // Keeps the item at the top where it is.
  resize() {
    const first = Math.floor(this.virtualTop() / (this.rowHeight || 1)) * this.columns;
    const columns = this.columns;
    this.measure();
    if (columns !== this.columns) this.scrollTo(Math.floor(first / this.columns) * this.rowHeight);
    this.render();
  }

  ratio() {
    const free = this.realHeight - this.height;
    return free > 0 ? (this.virtualHeight - this.height) / free : 1;
  }

  virtualTop() {
    return this.scroller.scrollTop * this.ratio();
  }

  scrollTo(virtualTop) {
    this.scroller.scrollTop = virtualTop / this.ratio();
  }

  frame() {
    if (this.framed) return;
    this.framed = true;
    requestAnimationFrame(() => {
      this.framed = false;
      this.render();
    });
  }

  render() {
    const top = this.virtualTop(), beyond = OVERSCAN * this.height;
    const first = Math.max(0, Math.floor((top - this.padding - beyond) / this.rowHeight));
    const last = Math.ceil((top - this.padding + this.height + beyond) / this.rowHeight);
    const from = first * this.columns, to = Math.min(this.total, last * this.columns);
    this.shift = this.scroller.scrollTop - top;
    const wanted = new Set();
    for (let item = from; item < to; item++) wanted.add(this.total - 1 - item);
    for (const [rank, tile] of this.tiles) if (!wanted.has(rank)) this.release(rank, tile);
    const middle = this.total - 1 - Math.floor((top + this.height / 2) / this.rowHeight) * this.columns;
    const ranks = [...wanted].sort((one, other) => Math.abs(one - middle) - Math.abs(other - middle));
    for (const rank of ranks) this.place(rank);
    for (const spare of this.spare.splice(0)) spare.remove();
    this.wanted = ranks;
    const isFlying = Math.abs(top - this.lastTop) > FLYING_SCREENS * this.height;
    this.lastTop = top;
    clearTimeout(this.landing);
    if (isFlying) this.landing = setTimeout(() => this.fill(), LANDED_MILLISECONDS);
    else this.fill();
  }

  place(rank) {
    let tile = this.tiles.get(rank);
    if (!tile) {
      tile = this.spare.pop() ?? this.create();
      this.name(tile, rank);
      tile.state = "";
      tile.className = this.kind === "images" ? "tile" : `tile job ${this.kind}`;
      if (rank >= this.newFrom) tile.classList.add("new");
      this.tiles.set(rank, tile);
      if (!tile.parentNode) this.canvas.append(tile);
    }
    const item = this.total - 1 - rank;
    const row = Math.floor(item / this.columns), column = item % this.columns;
    const x = this.padding + column * (this.tileWidth + this.gap);
    const y = this.padding + row * this.rowHeight + this.shift;
    const isActive = rank === this.active;
    const state = `${x} ${y} ${this.tileWidth} ${this.tileHeight} ${this.total} ${isActive}`;
    if (tile.state === state) return; // as most are in most frames
    tile.state = state;
    const style = tile.style;
    style.width = `${this.tileWidth}px`;
    style.height = `${this.tileHeight}px`;
    style.transform = `translate(${x}px, ${y}px)`;
    tile.setAttribute("aria-posinset", item + 1);
    tile.setAttribute("aria-setsize", this.total);
    tile.classList.toggle("active", isActive);
    tile.setAttribute("aria-selected", isActive);
  }

  name(tile, rank) {
    tile.rank = rank;
    tile.id = `item-${rank}`;
  }

  create() {
    const tile = document.createElement("div");
    tile.setAttribute("role", "option");
    const parts = [["img", "img"], ["why", "span"], ["what", "span"], ["id", "span"]];
    for (const [name, kind] of parts) {
      const part = document.createElement(kind);
      if (name !== "img") part.className = name;
      tile.append(part);
      tile[`${name}Part`] = part;
    }
    const caption = document.createElement("p");
    tile.words = document.createElement("span");
    caption.append(tile.words);
    tile.append(caption);
    tile.imgPart.alt = "";
    tile.imgPart.decoding = "async";
    tile.imgPart.addEventListener("load", () => this.arrived(tile, "loaded"));
    tile.imgPart.addEventListener("error", () => {
      if (tile.imgPart.hasAttribute("src")) this.arrived(tile, "broken");
    });
    return tile;
  }

  release(rank, tile) {
    this.tiles.delete(rank);
    tile.row = undefined;
    tile.imgPart.removeAttribute("src"); // the browser gives up on it
    this.loading.delete(tile);
    for (const part of [tile.whyPart, tile.whatPart, tile.idPart, tile.words]) part.textContent = "";
    this.spare.push(tile);
  }

  // Gives tiles their content, those in the middle of the screen first.
  fill() {
    const missing = new Set();
    for (const rank of this.wanted) {
      const tile = this.tiles.get(rank);
      if (!tile || (tile.row && !tile.isOutdated)) continue;
      const row = this.known_row(rank);
      if (!row) missing.add(Math.floor(rank / PAGE));
      else if (tile.row?.[0] === row[0]) tile.isOutdated = false;
      else if (this.isNear(rank) || this.loading.size < FAR_AT_ONCE) this.show(tile, row);
    }
    for (const [page, request] of this.requests) if (!missing.has(page)) request.abort();
    for (const page of missing) this.ask(page);
  }

  // On the screen: its thumbnail comes before others.
  isNear(rank) {
    const y = Math.floor((this.total - 1 - rank) / this.columns) * this.rowHeight - this.virtualTop();
    return y > -this.rowHeight - this.padding && y < this.height;
  }

  arrived(tile, how) {
    tile.classList.add(how);
    // Only now it is known that the record, and so its prompt, is of this picture.
    if (how === "loaded" && tile.row) this.describe(tile, tile.row[2] || tile.row[1]);
    this.loading.delete(tile);
    if (this.loading.size < FAR_AT_ONCE) this.fill();
  }

  show(tile, row) {
    tile.row = row;
    tile.isOutdated = false;
    const [, job, prompt, reason] = row;
    if (this.kind === "images") {
      this.describe(tile, job);
      tile.classList.remove("loaded", "broken");
      tile.imgPart.src = this.picture(row);
      this.loading.add(tile);
    } else {
      tile.setAttribute("aria-label", [reason, prompt || job].filter(Boolean).join(", "));
      tile.whyPart.textContent = reason || "cancelled";
      tile.whatPart.textContent = prompt || "no prompt";
      tile.idPart.textContent = job;
    }
  }

  describe(tile, words) {
    tile.words.textContent = words;
    tile.setAttribute("aria-label", words);
  }

  known_row(rank) {
    return this.pages.get(Math.floor(rank / PAGE))?.[rank % PAGE];
  }

  async ask(page) {
    if (this.requests.has(page)) return;
    const request = new AbortController();
    this.requests.set(page, request);
    try {
      const rows = await this.load(page * PAGE, PAGE, request.signal);
      if (!rows || this.requests.get(page) !== request) return;
      this.pages.delete(page);
      this.pages.set(page, rows);
      if (this.pages.size > KEPT_PAGES) this.pages.delete(this.pages.keys().next().value);
    } finally {
      if (this.requests.get(page) === request) this.requests.delete(page);
    }
    if ((page + 1) * PAGE <= this.total || this.known_row(this.total - 1)) this.fill();
  }

  // The row of a rank, from the server if it is not known. What is asked for may be given up for what
  // is on the screen, or be out of date when it comes: then it is asked for again.
  async row(rank) {
    for (let tries = 0; tries < ROW_TRIES && !this.known_row(rank); tries++) {
      if (tries) await new Promise(resolve => setTimeout(resolve, ROW_MILLISECONDS));
      await this.ask(Math.floor(rank / PAGE));
    }
    return this.known_row(rank);
  }

  choose(rank) {
    this.activate(rank);
    this.open(rank);
  }

  activate(rank) {
    this.active = Math.max(0, Math.min(this.total - 1, rank));
    const row = Math.floor((this.total - 1 - this.active) / this.columns);
    const top = row * this.rowHeight, current = this.virtualTop();
    const bottom = top + this.rowHeight + 2 * this.padding - this.gap;
    if (top < current) this.scrollTo(top);
    else if (bottom > current + this.height) this.scrollTo(bottom - this.height);
    this.render();
    this.scroller.setAttribute("aria-activedescendant", `item-${this.active}`);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.total) return;
    const screen = Math.max(1, Math.floor(this.height / this.rowHeight)) * this.columns;
    const steps = {
      ArrowLeft: 1, ArrowRight: -1, ArrowUp: this.columns, ArrowDown: -this.columns,
      PageUp: screen, PageDown: -screen, Home: Infinity, End: -Infinity,
    };
    if (event.key === "Enter" || event.key === " ") {
      if (this.active !== null) this.choose(this.active);
    } else if (event.key in steps) {
      if (this.active === null) {
        const item = Math.ceil(Math.max(0, this.virtualTop() - this.padding) / this.rowHeight) * this.columns;
        this.activate(event.key === "End" ? 0 : this.total - 1 - item);
      } else {
        this.activate(this.active + steps[event.key]);
      }
    } else {
      return;
    }
    event.preventDefault();
  }
}
