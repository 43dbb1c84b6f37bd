// Trains a step model (torch-ort-ckpt step-model) with the stock C++ API of ONNX Runtime, and saves the state.
//
//   g++ -std=c++17 -O2 train.cpp -I <onnxruntime headers> -L <folder of libonnxruntime.so> -lonnxruntime -o train
//   ./train <folder with step_model.onnx and state.safetensors> <batch.safetensors> <steps> <lr> <new state.safetensors>
//
// batch.safetensors holds the model's data inputs by their names. A real client would make its own batches.
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

// ---- safetensors: eight bytes with the header's length, the header (JSON), then the tensors' bytes

struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<char> data;
};

struct File {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

// The little of JSON that a safetensors header uses: objects, texts, arrays of whole numbers.
class Json {
 public:
  explicit Json(const std::string& text) : text_(text) {}
  bool take(char wanted) {
    while (at_ < text_.size() && std::strchr(" \t\r\n,:", text_[at_])) ++at_;
    if (at_ < text_.size() && text_[at_] == wanted) return ++at_, true;
    return false;
  }
  void need(char wanted) {
    if (!take(wanted)) throw std::runtime_error("not a safetensors header");
  }
  std::string word() {
    need('"');
    std::string found;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] != '\\') { found += text_[at_++]; continue; }
      if (++at_ >= text_.size()) break;
      const char mark = text_[at_++];
      const char* known = std::strchr("n\nt\tr\rb\bf\f", mark);
      if (mark == 'u') append_utf8(found, std::stoul(text_.substr(at_, 4), nullptr, 16)), at_ += 4;
      else found += known && std::strchr("ntrbf", mark) ? known[1] : mark;
    }
    need('"');
    return found;
  }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> found;
    for (need('['); !take(']');) {
      size_t used = 0;
      found.push_back(std::stoll(text_.substr(at_, 24), &used));
      at_ += used;
    }
    return found;
  }

 private:
  static void append_utf8(std::string& out, unsigned long code) {  // half of a surrogate pair is kept as it is
    if (code < 0x80) out += static_cast<char>(code);
    else if (code < 0x800) out += static_cast<char>(0xC0 | code >> 6), out += static_cast<char>(0x80 | (code & 0x3F));
    else out += static_cast<char>(0xE0 | code >> 12), out += static_cast<char>(0x80 | (code >> 6 & 0x3F)), out += static_cast<char>(0x80 | (code & 0x3F));
  }
  const std::string& text_;
  size_t at_ = 0;
};

File read(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(stream), {}};
  uint64_t length = 0;  // little endian, as every machine that ONNX Runtime runs on
  if (bytes.size() >= 8) std::memcpy(&length, bytes.data(), 8);
  if (bytes.size() < 8 || length > bytes.size() - 8) throw std::runtime_error(path + " is not a safetensors file");
  const std::string header(bytes.data() + 8, length);
  const size_t start = 8 + length;
  File file;
  Json json(header);
  for (json.need('{'); !json.take('}');) {
    const std::string name = json.word();
    json.need('{');
    if (name == "__metadata__") {
      while (!json.take('}')) { const std::string key = json.word(); file.metadata[key] = json.word(); }
      continue;
    }
    Tensor tensor;
    std::vector<int64_t> place;
    while (!json.take('}')) {
      const std::string key = json.word();
      if (key == "dtype") tensor.dtype = json.word();
      else if (key == "shape") tensor.shape = json.numbers();
      else place = json.numbers();
    }
    if (place.size() != 2 || place[0] < 0 || place[0] > place[1] || start + place[1] > bytes.size()) throw std::runtime_error(name + " lies outside the file");
    tensor.data.assign(bytes.begin() + start + place[0], bytes.begin() + start + place[1]);
    file.tensors[name] = std::move(tensor);
  }
  return file;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    char code[8];
    if (c == '"' || c == '\\') out += '\\', out += c;
    else if (static_cast<unsigned char>(c) < 0x20) std::snprintf(code, sizeof code, "\\u%04x", c), out += code;
    else out += c;
  }
  return out + '"';
}

void write(const File& file, const std::string& path) {
  std::string header = "{\"__metadata__\":{", data;
  for (const auto& [key, value] : file.metadata) header += (header.back() == '{' ? "" : ",") + quoted(key) + ":" + quoted(value);
  header += "}";
  for (const size_t width : {8, 4, 2, 1}) {  // wide elements first: every tensor is aligned
    for (const auto& [name, tensor] : file.tensors) {
      const std::string& type = tensor.dtype;
      if (width != (type == "BOOL" ? 1 : std::stoul(type.substr(type.find_first_of("0123456789"))) / 8)) continue;
      std::string shape;
      for (const int64_t size : tensor.shape) shape += (shape.empty() ? "" : ",") + std::to_string(size);
      header += "," + quoted(name) + ":{\"dtype\":" + quoted(type) + ",\"shape\":[" + shape + "],\"data_offsets\":[" + std::to_string(data.size());
      data.append(tensor.data.begin(), tensor.data.end());
      header += "," + std::to_string(data.size()) + "]}";
    }
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  std::ofstream stream(path, std::ios::binary);
  stream.write(reinterpret_cast<const char*>(&length), 8) << header << data;
  if (!stream.flush()) throw std::runtime_error("can't write " + path);
}

// ---- training

const std::map<std::string, ONNXTensorElementDataType> kTypes = {
    {"F64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE}, {"F32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, {"I64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
    {"I32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}, {"U8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}, {"BOOL", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL}};
const Ort::MemoryInfo kCpu = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU);

Ort::Value value_of(Tensor& tensor) {  // borrows the tensor's memory
  return Ort::Value::CreateTensor(kCpu, tensor.data.data(), tensor.data.size(), tensor.shape.data(), tensor.shape.size(), kTypes.at(tensor.dtype));
}

int main(int count, char** arguments) try {
  if (count != 6) return std::fprintf(stderr, "train FOLDER BATCH STEPS LR NEW_STATE\n"), 2;
  const std::string folder = arguments[1];
  File state = read(folder + "/state.safetensors"), batch = read(arguments[2]);
  const int steps = std::stoi(arguments[3]);
  float lr = std::stof(arguments[4]);
  int64_t done = std::stoll(state.metadata["torch_ort_ckpt.step"]);

  Ort::Env env;
  Ort::Session session(env, (folder + "/step_model.onnx").c_str(), Ort::SessionOptions{});
  const std::vector<std::string> inputs = session.GetInputNames(), outputs = session.GetOutputNames();
  std::vector<const char*> input_names, output_names;
  for (const auto& name : inputs) input_names.push_back(name.c_str());
  for (const auto& name : outputs) output_names.push_back(name.c_str());

  std::map<std::string, Ort::Value> current;
  for (auto& [name, tensor] : state.tensors) current.emplace(name, value_of(tensor));
  for (int i = 0; i < steps; ++i) {
    int64_t step = done + 1, seed = i;
    std::vector<Ort::Value> values;
    for (const auto& name : inputs) {
      if (auto found = current.find(name); found != current.end()) values.push_back(std::move(found->second));
      else if (auto data = batch.tensors.find(name); data != batch.tensors.end()) values.push_back(value_of(data->second));
      else if (name == "lr") values.push_back(Ort::Value::CreateTensor<float>(kCpu, &lr, 1, nullptr, 0));
      else values.push_back(Ort::Value::CreateTensor<int64_t>(kCpu, name == "seed" ? &seed : &step, 1, nullptr, 0));
    }
    auto results = session.Run(Ort::RunOptions{}, input_names.data(), values.data(), values.size(), output_names.data(), output_names.size());
    std::printf("%.9g\n", *results[0].GetTensorData<float>());
    bool updated = true;  // with accumulation, most batches make no update
    for (size_t k = 0; k < outputs.size(); ++k) {
      const std::string& name = outputs[k];
      if (name.size() < 4 || name.compare(name.size() - 4, 4, ".new") != 0) continue;
      if (name == "accumulated.count.new") updated = *results[k].GetTensorData<int64_t>() == 0;
      current.insert_or_assign(name.substr(0, name.size() - 4), std::move(results[k]));  // X.new is the next step's X
    }
    done += updated;
  }
  for (auto& [name, tensor] : state.tensors) {  // a value that no step replaced still lies in the tensor's own memory
    const char* data = static_cast<const char*>(current.at(name).GetTensorRawData());
    if (data != tensor.data.data()) std::memcpy(tensor.data.data(), data, tensor.data.size());
  }
  state.metadata["torch_ort_ckpt.step"] = std::to_string(done);
  state.metadata["torch_ort_ckpt.lr"] = arguments[4];
  write(state, arguments[5]);
  return 0;
} catch (const std::exception& error) {
  return std::fprintf(stderr, "%s\n", error.what()), 1;
}
