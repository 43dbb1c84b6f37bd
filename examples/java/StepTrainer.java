import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxValue;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/**
 * Trains a step model (torch-ort-ckpt step-model) with ONNX Runtime for Java: desktop, server, Android. One file without other
 * dependencies: copy it into your app.
 *
 * <pre>
 * try (StepTrainer trainer = new StepTrainer(env, modelBytes, stateBytes)) {
 *   float loss = trainer.step(Map.of("input", pixels, "labels", labels), 0.001f);
 *   byte[] file = trainer.save();
 * }
 * </pre>
 */
public final class StepTrainer implements AutoCloseable {
  private static final String STEP = "torch_ort_ckpt.step", RATE = "torch_ort_ckpt.lr", NEW = ".new", COUNT = "accumulated.count";
  private static final Map<String, OnnxJavaType> TYPES = Map.of(
      "F64", OnnxJavaType.DOUBLE, "F32", OnnxJavaType.FLOAT, "I64", OnnxJavaType.INT64, "I32", OnnxJavaType.INT32,
      "U8", OnnxJavaType.UINT8, "BOOL", OnnxJavaType.BOOL);

  private final OrtEnvironment env;
  private final OrtSession session;
  private final Map<String, OnnxTensor> state = new TreeMap<>();
  private final Map<String, String> dtypes = new TreeMap<>();
  private final Map<String, String> metadata = new LinkedHashMap<>();
  private OrtSession.Result last;
  private long updates;

  public StepTrainer(OrtEnvironment env, byte[] model, byte[] safetensors) throws OrtException {
    this.env = env;
    session = env.createSession(model, new OrtSession.SessionOptions());
    read(safetensors);
    updates = Long.parseLong(metadata.getOrDefault(STEP, "0"));
  }

  /** Updates made so far. */
  public long updates() {
    return updates;
  }

  /** One training step; returns the loss. The caller closes the batch's tensors. */
  public float step(Map<String, OnnxTensor> batch, float lr) throws OrtException {
    return step(batch, lr, updates);
  }

  /** The same, with the seed of a model that has dropout. */
  public float step(Map<String, OnnxTensor> batch, float lr, long seed) throws OrtException {
    Map<String, OnnxTensor> feeds = new TreeMap<>(state);
    feeds.putAll(batch);
    try (OnnxTensor rate = OnnxTensor.createTensor(env, FloatBuffer.wrap(new float[] {lr}), new long[0]);
        OnnxTensor step = whole(updates + 1);
        OnnxTensor number = whole(seed)) {
      feeds.put("lr", rate);
      feeds.put("step", step);
      feeds.put("seed", number);
      feeds.keySet().retainAll(session.getInputNames());
      OrtSession.Result results = session.run(feeds);
      boolean updated = true; // with accumulation, most batches make no update
      float loss = ((OnnxTensor) results.get(0)).getFloatBuffer().get(0);
      for (Map.Entry<String, OnnxValue> result : results) {
        String name = result.getKey();
        if (!name.endsWith(NEW)) continue;
        OnnxTensor value = (OnnxTensor) result.getValue();
        if (name.equals(COUNT + NEW)) updated = value.getLongBuffer().get(0) == 0;
        OnnxTensor old = state.put(name.substring(0, name.length() - NEW.length()), value); // X.new is the next step's X
        if (last == null) old.close(); // made from the file; later ones belong to the last result
      }
      if (last != null) last.close();
      last = results;
      if (updated) updates++;
      metadata.put(STEP, Long.toString(updates));
      metadata.put(RATE, Float.toString(lr));
      return loss;
    }
  }

  /** The bytes of a state.safetensors that torch_ort_ckpt.load and this class read. */
  public byte[] save() throws IOException {
    StringBuilder header = new StringBuilder("{\"__metadata__\":{");
    String comma = "";
    for (Map.Entry<String, String> text : metadata.entrySet()) {
      header.append(comma).append(quoted(text.getKey())).append(':').append(quoted(text.getValue()));
      comma = ",";
    }
    header.append('}');
    ByteArrayOutputStream data = new ByteArrayOutputStream();
    for (int width : new int[] {8, 4, 2, 1}) { // wide elements first: every tensor is aligned
      for (Map.Entry<String, OnnxTensor> entry : state.entrySet()) {
        OnnxTensor tensor = entry.getValue();
        if (tensor.getInfo().type.size != width) continue;
        ByteBuffer bytes = tensor.getByteBuffer();
        byte[] copy = new byte[bytes.remaining()];
        bytes.get(copy);
        int start = data.size();
        data.write(copy);
        header.append(',').append(quoted(entry.getKey())).append(":{\"dtype\":\"").append(dtypes.get(entry.getKey()))
            .append("\",\"shape\":").append(java.util.Arrays.toString(tensor.getInfo().getShape()))
            .append(",\"data_offsets\":[").append(start).append(',').append(data.size()).append("]}");
      }
    }
    header.append('}');
    byte[] text = header.toString().getBytes(StandardCharsets.UTF_8);
    int padding = (8 - text.length % 8) % 8;
    ByteArrayOutputStream file = new ByteArrayOutputStream();
    file.write(ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(text.length + padding).array());
    file.write(text);
    for (int i = 0; i < padding; i++) file.write(' ');
    file.write(data.toByteArray());
    return file.toByteArray();
  }

  @Override
  public void close() throws OrtException {
    if (last != null) last.close();
    else for (OnnxTensor tensor : state.values()) tensor.close();
    session.close();
  }

  private OnnxTensor whole(long value) throws OrtException {
    return OnnxTensor.createTensor(env, LongBuffer.wrap(new long[] {value}), new long[0]);
  }

  // safetensors: eight bytes with the header's length, the header (JSON), then the tensors' bytes

  private void read(byte[] file) throws OrtException {
    ByteBuffer bytes = ByteBuffer.wrap(file).order(ByteOrder.LITTLE_ENDIAN);
    long length = file.length < 8 ? -1 : bytes.getLong(0);
    if (length < 0 || length > file.length - 8) throw new IllegalArgumentException("not a safetensors file");
    int start = 8 + (int) length;
    Json json = new Json(new String(file, 8, (int) length, StandardCharsets.UTF_8));
    for (json.need('{'); !json.take('}'); ) {
      String name = json.word();
      json.need('{');
      if (name.equals("__metadata__")) {
        while (!json.take('}')) metadata.put(json.word(), json.word());
        continue;
      }
      String dtype = "";
      long[] shape = {}, place = {};
      while (!json.take('}')) {
        String key = json.word();
        if (key.equals("dtype")) dtype = json.word();
        else if (key.equals("shape")) shape = json.numbers();
        else place = json.numbers();
      }
      if (!TYPES.containsKey(dtype)) throw new IllegalArgumentException(name + ": element type " + dtype + " is not supported");
      // A direct buffer in the machine's order: ONNX Runtime uses it without a copy.
      ByteBuffer data = ByteBuffer.allocateDirect((int) (place[1] - place[0])).order(ByteOrder.nativeOrder());
      data.put(file, start + (int) place[0], data.capacity()).flip();
      state.put(name, OnnxTensor.createTensor(env, data, shape, TYPES.get(dtype)));
      dtypes.put(name, dtype);
    }
  }

  private static String quoted(String text) {
    StringBuilder out = new StringBuilder("\"");
    for (char c : text.toCharArray()) {
      if (c == '"' || c == '\\') out.append('\\').append(c);
      else if (c < 0x20) out.append(String.format("\\u%04x", (int) c));
      else out.append(c);
    }
    return out.append('"').toString();
  }

  /** The little of JSON that a safetensors header uses: objects, texts, arrays of whole numbers. */
  private static final class Json {
    private final String text;
    private int at;

    Json(String text) {
      this.text = text;
    }

    boolean take(char wanted) {
      while (at < text.length() && " \t\r\n,:".indexOf(text.charAt(at)) >= 0) at++;
      if (at >= text.length() || text.charAt(at) != wanted) return false;
      at++;
      return true;
    }

    void need(char wanted) {
      if (!take(wanted)) throw new IllegalArgumentException("not a safetensors header");
    }

    String word() {
      need('"');
      StringBuilder found = new StringBuilder();
      while (text.charAt(at) != '"') {
        char c = text.charAt(at++);
        if (c != '\\') {
          found.append(c);
          continue;
        }
        char mark = text.charAt(at++);
        int known = "ntrbf".indexOf(mark);
        if (mark == 'u') {
          found.append((char) Integer.parseInt(text.substring(at, at + 4), 16));
          at += 4;
        } else {
          found.append(known >= 0 ? "\n\t\r\b\f".charAt(known) : mark);
        }
      }
      at++;
      return found.toString();
    }

    long[] numbers() {
      List<Long> found = new ArrayList<>();
      for (need('['); !take(']'); ) {
        int end = at;
        while (Character.isDigit(text.charAt(end))) end++;
        found.add(Long.parseLong(text.substring(at, end)));
        at = end;
      }
      return found.stream().mapToLong(Long::longValue).toArray();
    }
  }
}
