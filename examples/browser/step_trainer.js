// Trains a step model (torch-ort-ckpt step-model) with any ONNX Runtime for JavaScript: onnxruntime-web, onnxruntime-node, React Native.
// One file without dependencies: copy it into your app.
//
//   const trainer = await StepTrainer.create(ort, modelBytes, stateBytes);
//   const { loss } = await trainer.step({ input: pixels, labels }, 0.001);
//   const { output } = await trainer.evaluate({ input: pixels, labels });   // trains nothing; outputs by their names in the model
//   const file = await trainer.save();          // bytes of state.safetensors, with the moments and the step

const TYPES = {
  F64: ["float64", Float64Array], F32: ["float32", Float32Array], F16: ["float16", Uint16Array],
  I64: ["int64", BigInt64Array], I32: ["int32", Int32Array], I16: ["int16", Int16Array], I8: ["int8", Int8Array],
  U64: ["uint64", BigUint64Array], U32: ["uint32", Uint32Array], U16: ["uint16", Uint16Array], U8: ["uint8", Uint8Array],
  BOOL: ["bool", Uint8Array],
};
const NAMES = Object.fromEntries(Object.entries(TYPES).map(([name, [type]]) => [type, name]));
// Metadata entries (texts) of state.safetensors that a step changes; the others are kept as they are.
const STEP = "torch_ort_ckpt.step";
const RATE = "torch_ort_ckpt.lr";
const NEW = ".new";
const COUNT = "accumulated.count";

/** Tensors and metadata of a safetensors file: { tensors: Map name -> { type, dims, data }, metadata }. */
export function readSafetensors(bytes) {
  // A plain view: slice() of Node's Buffer, a subclass, would not copy.
  const whole = ArrayBuffer.isView(bytes) ? new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength) : new Uint8Array(bytes);
  if (whole.length < 8) throw new Error("not a safetensors file: it is shorter than its header");
  const length = new DataView(whole.buffer, whole.byteOffset, 8).getBigUint64(0, true);
  if (length > BigInt(whole.length - 8)) throw new Error("not a safetensors file: the header is longer than the file");
  const start = 8 + Number(length);
  const { __metadata__: metadata = {}, ...entries } = JSON.parse(new TextDecoder().decode(whole.subarray(8, start)));
  const tensors = new Map();
  for (const [name, { dtype, shape, data_offsets: [first, last] }] of Object.entries(entries)) {
    if (!(dtype in TYPES)) throw new Error(`${name}: element type ${dtype} is not supported`);
    const [type, Kind] = TYPES[dtype];
    const count = shape.reduce((product, size) => product * size, 1);
    if (last - first !== count * Kind.BYTES_PER_ELEMENT || start + last > whole.length || first < 0) {
      throw new Error(`${name}: its bytes do not fit its shape, or lie outside the file`);
    }
    // A typed array must start at a multiple of its element size: copy the bytes.
    const data = new Kind(whole.slice(start + first, start + last).buffer);
    tensors.set(name, { type, dims: shape, data });
  }
  return { tensors, metadata };
}

/** A safetensors file of `tensors` (Map or iterable of [name, { type, dims, data }]). */
export function writeSafetensors(tensors, metadata = {}) {
  // Wider elements first, as the reference implementation writes them: every tensor is then aligned.
  const sorted = [...tensors].sort(([one, a], [two, b]) =>
    TYPES[NAMES[b.type]][1].BYTES_PER_ELEMENT - TYPES[NAMES[a.type]][1].BYTES_PER_ELEMENT || (one < two ? -1 : 1));
  const header = Object.keys(metadata).length ? { __metadata__: metadata } : {};
  let end = 0;
  for (const [name, { type, dims, data }] of sorted) {
    if (!(type in NAMES)) throw new Error(`${name}: safetensors has no element type for ${type}`);
    header[name] = { dtype: NAMES[type], shape: [...dims], data_offsets: [end, end + data.byteLength] };
    end += data.byteLength;
  }
  let text = new TextEncoder().encode(JSON.stringify(header));
  const padding = (8 - (text.length % 8)) % 8;
  const file = new Uint8Array(8 + text.length + padding + end).fill(0x20, 8 + text.length, 8 + text.length + padding);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.length + padding), true);
  file.set(text, 8);
  let place = 8 + text.length + padding;
  for (const [, { data }] of sorted) {
    file.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), place);
    place += data.byteLength;
  }
  return file;
}

export class StepTrainer {
  /** `ort`: the runtime's module. `model`: step_model.onnx as a path, URL or bytes. `state`: the bytes of state.safetensors. */
  static async create(ort, model, state, sessionOptions = {}) {
    const { tensors, metadata } = readSafetensors(state);
    const session = await ort.InferenceSession.create(model, sessionOptions);
    const known = new Set(session.inputNames);
    const missing = session.outputNames.filter((name) => name.endsWith(NEW)).map((name) => name.slice(0, -NEW.length));
    for (const name of missing) {
      if (!tensors.has(name)) throw new Error(`state.safetensors has no ${name}: it belongs to another step model`);
    }
    const trainer = new StepTrainer();
    Object.assign(trainer, { _ort: ort, _session: session, _metadata: metadata, _known: known, _busy: false });
    /** Batches since the last update, with accumulation. */
    trainer._pending = tensors.has(COUNT) ? Number(tensors.get(COUNT).data[0]) : 0;
    /** Updates made so far. */
    trainer.updates = Number(metadata[STEP] ?? 0);
    /** Learning rate of `step` when none is given. */
    trainer.lr = Number(metadata[RATE] ?? 0.001);
    trainer._state = new Map([...tensors].map(([name, { type, dims, data }]) => [name, new ort.Tensor(type, data, dims)]));
    return trainer;
  }

  /**
   * One training step. `batch`: the model's inputs as ort.Tensor by name. Returns { loss, ...extra outputs }, loss as a number.
   * `seed` (for dropout) may be any whole number; by default it differs in every step, and is the same when a run is repeated.
   */
  async step(batch, lr = this.lr, seed = this.updates * 4096 + this._pending) {
    return this._exclusive(async () => {
      const results = await this._run(batch, lr, seed);
      for (const [name, value] of Object.entries(results)) {
        if (!name.endsWith(NEW)) continue;
        this._replace(name.slice(0, -NEW.length), value);
        if (name === COUNT + NEW) this._pending = Number((await value.getData())[0]);
      }
      if (this._pending === 0) this.updates += 1; // with accumulation, most batches make no update
      this.lr = lr;
      return this._outputs(results);
    });
  }

  /**
   * The same outputs for a batch, without any change to the state.
   * Layers compute as in training: dropout drops, BatchNorm takes the batch's statistics.
   */
  async evaluate(batch, seed = 0) {
    return this._exclusive(async () => {
      const results = await this._run(batch, 0, seed);
      for (const [name, value] of Object.entries(results)) if (name.endsWith(NEW)) release(value);
      return this._outputs(results);
    });
  }

  /** The bytes of a state.safetensors that `torch_ort_ckpt.load` and `StepTrainer.create` read. */
  async save() {
    const tensors = [];
    for (const [name, value] of this._state) tensors.push([name, { type: value.type, dims: value.dims, data: await value.getData() }]);
    return writeSafetensors(tensors, { ...this._metadata, [STEP]: String(this.updates), [RATE]: String(this.lr) });
  }

  async _exclusive(work) {
    if (this._busy) throw new Error("a step is still running: await it first");
    this._busy = true;
    try {
      return await work();
    } finally {
      this._busy = false;
    }
  }

  _run(batch, lr, seed) {
    const { Tensor } = this._ort;
    const feeds = { ...batch };
    for (const [name, value] of this._state) if (this._known.has(name)) feeds[name] = value;
    const whole = (number) => new Tensor("int64", BigInt64Array.of(BigInt(number)), []);
    const scalars = { lr: new Tensor("float32", Float32Array.of(lr), []), step: whole(this.updates + 1), seed: whole(seed) };
    for (const [name, value] of Object.entries(scalars)) if (this._known.has(name)) feeds[name] = value;
    return this._session.run(feeds);
  }

  async _outputs(results) {
    const outputs = Object.fromEntries(Object.entries(results).filter(([name]) => !name.endsWith(NEW)));
    const [loss] = this._session.outputNames;
    outputs[loss] = Number((await outputs[loss].getData())[0]);
    return outputs;
  }

  _replace(name, value) {
    const old = this._state.get(name);
    this._state.set(name, value);
    release(old);
  }
}

function release(tensor) {
  if (tensor.location === "gpu-buffer") tensor.dispose();
}
