// The page: drawings become batches, StepTrainer trains on them. Everything happens in this tab.
import { StepTrainer, readSafetensors } from "./step_trainer.js";

const SIZE = 28, BATCH = 16, STEPS = 50;
// Not ort.webgpu.min.mjs: its CPU part has no float64, in which the step model computes Adam's bias corrections (1.30).
const RUNTIMES = { wasm: "ort.wasm.min.mjs", webgpu: "ort.min.mjs" };
const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** What a test or the console may look at; the buttons use the same functions. */
const app = { trainer: null, backend: null, drawings: [], losses: [], start, trainBatch, guess, ready: null };
window.digits = app;
let ort, training = false, asked = null, queue = Promise.resolve();
/** The trainer does one thing at a time: what is asked for meanwhile waits. */
const inTurn = (work) => (queue = queue.then(work, work));

// ---- the model

/** Begin with a state (bytes of a state.safetensors; by default the model's own) on a backend: "wasm" or "webgpu". */
async function start(backend, state) {
  tell(`Starting ${backend} …`);
  const model = await read("model/step_model.onnx"), begin = state ?? (await read("model/state.safetensors"));
  if (backend !== "wasm") await compare(backend, model, begin);
  [ort, app.trainer] = await open(backend, model, begin);
  app.backend = backend;
  show();
  await guess();
  tell("Ready.");
}

async function open(backend, model, state) {
  const runtime = await import(`./node_modules/onnxruntime-web/dist/${RUNTIMES[backend]}`).catch((error) => {
    throw new Error(`onnxruntime-web is not here: run "npm install onnxruntime-web" in this folder (${error.message})`);
  });
  runtime.env.wasm.numThreads = 1; // more need a server that sends cross-origin isolation headers
  return [runtime, await StepTrainer.create(runtime, model, state, { executionProviders: [backend] })];
}

/** Refuse a backend whose first step is not WebAssembly's: kernels and drivers have faults, and a wrong gradient trains something else. */
async function compare(backend, model, state) {
  const pixels = Float32Array.from({ length: 4 * SIZE * SIZE }, (_, i) => 0.5 + 0.5 * Math.sin(i * i));
  const states = [];
  for (const name of ["wasm", backend]) {
    const [runtime, trainer] = await open(name, model, state);
    await trainer.step(tensors(pixels, [1, 3, 5, 7], runtime), 0.001);
    states.push(readSafetensors(await trainer.save()).tensors);
  }
  for (const [name, { type, data }] of states[0]) {
    if (type !== "float32") continue;
    const most = data.reduce((found, value) => Math.max(found, Math.abs(value)), 1e-6);
    const off = data.reduce((found, value, i) => Math.max(found, Math.abs(value - states[1].get(name).data[i])), 0);
    if (!(off <= 0.01 * most)) throw new Error(`${backend} computes ${name} otherwise than WebAssembly does here (onnxruntime-web's kernel or the driver): not used.`);
  }
}

async function read(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path} is not here: run make_model.py first`);
  return new Uint8Array(await answer.arrayBuffer());
}

/** One update with a batch: pixels (Float32Array of n * 28 * 28 values from 0 to 1), labels (array of n digits). Returns the loss. */
async function trainBatch(pixels, labels, lr) {
  const begun = performance.now();
  const { loss } = await inTurn(() => app.trainer.step(tensors(pixels, labels), lr));
  app.losses.push(loss);
  $("pace").textContent = (performance.now() - begun).toFixed(1);
  return loss;
}

function tensors(pixels, labels, { Tensor } = ort) {
  return {
    pixels: new Tensor("float32", pixels, [labels.length, 1, SIZE, SIZE]),
    labels: new Tensor("int64", BigInt64Array.from(labels, BigInt), [labels.length]),
  };
}

async function train() {
  training = true;
  update();
  const lr = Number($("rate").value);
  for (let step = 0; step < STEPS && training; step += 1) {
    const chosen = Array.from({ length: BATCH }, () => app.drawings[Math.floor(Math.random() * app.drawings.length)]);
    const pixels = new Float32Array(BATCH * SIZE * SIZE);
    chosen.forEach(({ image }, place) => pixels.set(moved(image), place * SIZE * SIZE));
    await trainBatch(pixels, chosen.map(({ label }) => label), lr);
    show();
    await new Promise(requestAnimationFrame);
  }
  training = false;
  update();
  guess();
}

/** The image, shifted, turned and scaled a little: few drawings stand for many. */
function moved(image) {
  const [dx, dy, angle, scale] = [4, 4, 0.3, 0.2].map((range) => (Math.random() - 0.5) * range);
  const [c, s] = [Math.cos(angle) * (1 + scale), Math.sin(angle) * (1 + scale)];
  const out = new Float32Array(SIZE * SIZE), middle = (SIZE - 1) / 2;
  for (let y = 0; y < SIZE; y += 1) for (let x = 0; x < SIZE; x += 1) {
    const [u, v] = [x - middle - dx, y - middle - dy];
    const [sx, sy] = [c * u - s * v + middle, s * u + c * v + middle];
    const [x0, y0] = [Math.floor(sx), Math.floor(sy)];
    let sum = 0;
    for (const [px, py] of [[x0, y0], [x0 + 1, y0], [x0, y0 + 1], [x0 + 1, y0 + 1]]) {
      if (px >= 0 && py >= 0 && px < SIZE && py < SIZE) sum += image[py * SIZE + px] * (1 - Math.abs(sx - px)) * (1 - Math.abs(sy - py));
    }
    out[y * SIZE + x] = sum;
  }
  return out;
}

/** Show what the network thinks of the drawing. */
async function guess() {
  if (!app.trainer || training) return null;
  if (asked) return (asked.again = true), null;
  asked = { again: false };
  try {
    return await guessNow();
  } finally {
    const { again } = asked;
    asked = null;
    if (again) guess();
  }
}

async function guessNow() {
  const { image, empty } = drawn();
  const { output } = await inTurn(() => app.trainer.evaluate(tensors(image, [0])));
  const logits = [...(await output.getData())];
  const top = Math.max(...logits), weights = logits.map((value) => Math.exp(value - top));
  const total = weights.reduce((one, two) => one + two), odds = weights.map((value) => value / total);
  const best = odds.indexOf(Math.max(...odds));
  odds.forEach((value, digit) => {
    const bar = $("bars").children[digit];
    bar.classList.toggle("best", !empty && digit === best);
    bar.querySelector("i").style.width = empty ? "0" : `${value * 100}%`;
    bar.lastChild.textContent = empty ? "" : `${Math.round(value * 100)} %`;
  });
  $("verdict").textContent = empty ? "Draw something." : app.trainer.updates ? `Looks like a ${best}.` : "It has learned nothing yet.";
  return odds;
}

// ---- drawing

const pad = $("pad"), pen = pad.getContext("2d", { willReadFrequently: true });
let last = null;
function place(event) {
  const box = pad.getBoundingClientRect();
  return [((event.clientX - box.x) / box.width) * pad.width, ((event.clientY - box.y) / box.height) * pad.height];
}
pad.addEventListener("pointerdown", (event) => { pad.setPointerCapture(event.pointerId); last = place(event); stroke(last, last); });
pad.addEventListener("pointermove", (event) => { if (last) { const now = place(event); stroke(last, now); last = now; } });
for (const name of ["pointerup", "pointercancel"]) pad.addEventListener(name, () => { last = null; guess(); });

function stroke([x0, y0], [x1, y1]) {
  Object.assign(pen, { lineWidth: 22, lineCap: "round", lineJoin: "round", strokeStyle: color("--ink") });
  pen.beginPath(); pen.moveTo(x0, y0); pen.lineTo(x1, y1); pen.stroke();
}
function clear() { pen.clearRect(0, 0, pad.width, pad.height); guess(); }

/** The drawing as 28 x 28 values, cut out, scaled to 20 x 20 and put in the middle, as in MNIST. */
function drawn(canvas = pad) {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  let [left, right, top, bottom] = [width, -1, height, -1];
  for (let y = 0; y < height; y += 1) for (let x = 0; x < width; x += 1) if (data[(y * width + x) * 4 + 3] > 20) {
    left = Math.min(left, x); right = Math.max(right, x); top = Math.min(top, y); bottom = Math.max(bottom, y);
  }
  const image = new Float32Array(SIZE * SIZE);
  if (right < 0) return { image, empty: true };
  const [w, h] = [right - left + 1, bottom - top + 1], factor = 20 / Math.max(w, h);
  const small = Object.assign(document.createElement("canvas"), { width: SIZE, height: SIZE }).getContext("2d");
  small.imageSmoothingQuality = "high";
  small.drawImage(canvas, left, top, w, h, (SIZE - w * factor) / 2, (SIZE - h * factor) / 2, w * factor, h * factor);
  const pixels = small.getImageData(0, 0, SIZE, SIZE).data;
  for (let i = 0; i < image.length; i += 1) image[i] = pixels[i * 4 + 3] / 255;
  return { image, empty: false };
}

function add(image, label) {
  const entry = { image, label };
  app.drawings.push(entry);
  const figure = document.createElement("figure"), canvas = Object.assign(document.createElement("canvas"), { width: SIZE, height: SIZE });
  const context = canvas.getContext("2d"), data = context.createImageData(SIZE, SIZE);
  const ink = color("--ink").match(/\w\w/g).map((part) => parseInt(part, 16));
  image.forEach((value, i) => data.data.set([...ink, value * 255], i * 4));
  context.putImageData(data, 0, 0);
  canvas.title = "click to remove";
  canvas.onclick = () => { app.drawings.splice(app.drawings.indexOf(entry), 1); figure.remove(); update(); };
  figure.append(canvas, String(label));
  $("gallery").querySelector("p")?.remove();
  $("gallery").append(figure);
  update();
}

/** Digits of a few fonts, for those who want to see it train at once. */
function printed() {
  const canvas = Object.assign(document.createElement("canvas"), { width: 140, height: 140 }), context = canvas.getContext("2d");
  for (const font of ["110px serif", "bold 110px sans-serif", "italic 110px sans-serif"]) for (let digit = 0; digit < 10; digit += 1) {
    context.clearRect(0, 0, 140, 140);
    Object.assign(context, { font, textAlign: "center", textBaseline: "middle" }).fillText(String(digit), 70, 75);
    add(drawn(canvas).image, digit);
  }
}

// ---- the rest of the page

function tell(text, bad = false) { $("status").textContent = text; $("status").classList.toggle("bad", bad); }
function update() {
  $("count").textContent = app.drawings.length;
  const labels = new Set(app.drawings.map(({ label }) => label));
  $("train").disabled = !training && (!app.trainer || labels.size < 2);
  $("train").textContent = training ? "Stop" : `Train ${STEPS} steps`;
  for (const id of ["backend", "download", "upload"]) $(id).disabled = training || !app.trainer;
}
function show() {
  const { losses } = app;
  $("loss").textContent = losses.length ? losses.at(-1).toFixed(4) : "–";
  $("updates").textContent = app.trainer.updates;
  const most = Math.max(2.5, ...losses), width = 540, height = 180, x = (i) => 45 + (i / Math.max(1, losses.length - 1)) * width, y = (v) => 10 + height * (1 - v / most);
  const line = (values, kind) => `<polyline class="${kind}" points="${values.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ")}"/>`;
  const mean = losses.map((_, i) => { const part = losses.slice(Math.max(0, i - 4), i + 1); return part.reduce((a, b) => a + b) / part.length; });
  const grid = [0, 0.5, 1].map((part) => `<line class="grid" x1="45" x2="585" y1="${y(most * part)}" y2="${y(most * part)}"/><text x="38" y="${y(most * part) + 4}" text-anchor="end">${(most * part).toFixed(1)}</text>`).join("");
  const note = losses.length ? `<text x="585" y="212" text-anchor="end">${losses.length} steps in this tab</text>` : '<text x="315" y="105" text-anchor="middle">The loss appears here.</text>';
  $("curve").innerHTML = grid + line(losses, "each") + line(mean, "mean") + note;
}

for (let digit = 0; digit < 10; digit += 1) {
  const key = Object.assign(document.createElement("button"), { type: "button", textContent: digit });
  key.onclick = () => { const { image, empty } = drawn(); if (empty) return tell("Draw a digit first."); add(image, digit); clear(); tell(`Kept as a ${digit}.`); };
  $("labels").append(key);
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.innerHTML = `<span>${digit}</span><div><i></i></div><span></span>`;
  $("bars").append(bar);
}
const attempt = (work) => Promise.resolve().then(work).then(update, (error) => { training = false; tell(error.message, true); update(); });
$("clear").onclick = clear;
$("printed").onclick = printed;
$("train").onclick = () => (training ? (training = false) : attempt(train));
$("backend").onchange = () => attempt(async () => {
  try {
    await start($("backend").value, await inTurn(() => app.trainer.save()));
  } finally {
    $("backend").value = app.backend; // a backend that does not work leaves the old one
  }
});
$("upload").onchange = () => attempt(async () => { app.losses.length = 0; await start(app.backend, new Uint8Array(await $("upload").files[0].arrayBuffer())); });
$("download").onclick = () => attempt(async () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([await inTurn(() => app.trainer.save())], { type: "application/octet-stream" }));
  link.download = "state.safetensors";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});
if (!navigator.gpu) $("backend").querySelector("[value=webgpu]").disabled = true;
app.ready = attempt(() => start("wasm"));
