// SPDX-License-Identifier: Apache-2.0
// safetensors: 8 bytes with the length of a JSON header, the header, the tensors' bytes. Several files have
// an index that says which tensor is in which.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "checkpoint/little_endian.h"
#include "checkpoint/readers.h"
#include "checkpoint/safetensors_dtypes.h"
#include "json/tape.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

namespace fs = std::filesystem;
constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kMostHeaderBytes = 100'000'000;  // as the format's own library has it

class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path) {
    checkpoint_.format = CheckpointFormat::kSafetensors;
    checkpoint_.path = path;
  }

  Status AddTensorsOf(const std::string& path) {
    const Result<InputFile> file = InputFile::Open(path);
    if (!file) return std::unexpected(file.error());
    if (file->size() < kLengthBytes)
      return file->ErrorAt(0, "too short for a file of safetensors", fmt::format("{} bytes", file->size()),
                           "at least 8");
    const Result<std::string> length = file->Read(0, kLengthBytes);
    if (!length) return std::unexpected(length.error());
    const std::uint64_t header_bytes = LittleEndian(*length, 0, 8);
    const auto most = std::min(kMostHeaderBytes, file->size() - kLengthBytes);
    if (header_bytes > static_cast<std::uint64_t>(most))
      return file->ErrorAt(0, "the header of safetensors does not lie in the file",
                           fmt::format("{} bytes", header_bytes), fmt::format("at most {}", most));
    const Result<std::string> header = file->Read(kLengthBytes, static_cast<std::int64_t>(header_bytes));
    if (!header) return std::unexpected(header.error());
    const Result<JsonTape> tape = JsonTape::Parse(*header);
    if (!tape) {
      Error error = tape.error();
      error.file = path;
      error.message = "the header of safetensors: " + error.message;
      return std::unexpected(std::move(error));
    }
    return AddTensors(*file, *tape, kLengthBytes + static_cast<std::int64_t>(header_bytes));
  }

  Result<Checkpoint> Finish(std::size_t first = 0) {
    std::sort(checkpoint_.tensors.begin() + static_cast<std::ptrdiff_t>(first), checkpoint_.tensors.end(),
              [](const CheckpointTensor& a, const CheckpointTensor& b) {
                return std::tie(a.pieces[0].file, a.pieces[0].offset, a.name) <
                       std::tie(b.pieces[0].file, b.pieces[0].offset, b.name);
              });
    return std::move(checkpoint_);
  }

  const std::map<std::string, std::int32_t>& names() const { return names_; }
  const Checkpoint& checkpoint() const { return checkpoint_; }

 private:
  static std::unexpected<Error> Wrong(const InputFile& file, const JsonTape& tape, JsonIndex node,
                                      std::string message, std::string expected) {
    return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                 .message = "the header of safetensors: " + std::move(message),
                                 .file = file.path(),
                                 .pointer = tape.Pointer(node),
                                 .found = tape.Describe(node),
                                 .expected = std::move(expected)});
  }

  Status AddTensors(const InputFile& file, const JsonTape& tape, std::int64_t data) {
    if (tape[0].kind != JsonKind::kObject) return Wrong(file, tape, 0, "no object", "an object");
    const std::int32_t index = AddFile(checkpoint_, file);
    std::vector<std::pair<std::int64_t, std::int64_t>> taken;
    for (JsonIndex key = 1; key < tape[0].end; key = tape[key + 1].end) {
      if (tape.String(key) == "__metadata__") continue;
      if (Status status = AddTensor(file, tape, key, index, data, taken); !status) return status;
    }
    std::ranges::sort(taken);
    for (std::size_t t = 1; t < taken.size(); ++t) {
      if (taken[t].first < taken[t - 1].second)
        return file.ErrorAt(data + taken[t].first, "two tensors of safetensors overlap");
    }
    return {};
  }

  static bool Integers(const JsonTape& tape, JsonIndex list, std::vector<std::int64_t>& integers) {
    if (list == 0 || tape[list].kind != JsonKind::kArray) return false;
    for (JsonIndex item = list + 1; item < tape[list].end; item = tape[item].end) {
      if (tape[item].kind != JsonKind::kInteger || tape[item].integer < 0) return false;
      integers.push_back(tape[item].integer);
    }
    return true;
  }

  Status AddTensor(const InputFile& file, const JsonTape& tape, JsonIndex key, std::int32_t index,
                   std::int64_t data, std::vector<std::pair<std::int64_t, std::int64_t>>& taken) {
    const JsonIndex entry = key + 1;
    CheckpointTensor tensor{.name = std::string(tape.String(key))};
    const JsonIndex dtype = tape.Find(entry, "dtype");
    if (dtype == 0 || tape[dtype].kind != JsonKind::kString)
      return Wrong(file, tape, entry, "a tensor without a dtype", "dtype, shape and data_offsets");
    const std::optional<DType> known = SafetensorsDType(tape.String(dtype));
    if (!known) return Wrong(file, tape, dtype, "a dtype that is not supported", SafetensorsDTypes());
    tensor.dtype = *known;
    const JsonIndex shape = tape.Find(entry, "shape");
    if (!Integers(tape, shape, tensor.shape) || std::ssize(tensor.shape) > kMostTensorDims)
      return Wrong(file, tape, shape == 0 ? entry : shape, "no shape of a tensor",
                   fmt::format("at most {} numbers from 0", kMostTensorDims));
    const std::int64_t numel = CheckedNumel(tensor.shape, tensor.dtype);
    const JsonIndex at = tape.Find(entry, "data_offsets");
    std::vector<std::int64_t> offsets;
    if (!Integers(tape, at, offsets) || offsets.size() != 2)
      return Wrong(file, tape, at == 0 ? entry : at, "no place of a tensor", "data_offsets: begin and end");
    const std::int64_t room = file.size() - data;
    if (numel < 0 || offsets[0] > offsets[1] || offsets[1] - offsets[0] != numel * SizeBytes(tensor.dtype))
      return Wrong(
          file, tape, at, "a tensor of another size than its shape and dtype say",
          numel < 0 ? "a shape that numbers hold" : fmt::format("{} bytes", numel * SizeBytes(tensor.dtype)));
    if (offsets[1] > room)
      return Wrong(file, tape, at, "a tensor behind the end of the file",
                   fmt::format("an end within {} bytes", room));
    if (!names_.emplace(tensor.name, index).second)
      return Wrong(file, tape, entry, "two tensors have one name", "each name once");
    if (numel > 0) taken.emplace_back(offsets[0], offsets[1]);
    tensor.pieces.push_back({index, data + offsets[0], std::vector<std::int64_t>(tensor.shape.size(), 0),
                             tensor.shape, RowMajorStrides(tensor.shape)});
    checkpoint_.tensors.push_back(std::move(tensor));
    return {};
  }

  Checkpoint checkpoint_;
  std::map<std::string, std::int32_t> names_;  // and the file that has it
};

// The files of an index, each once. kBadInput: it names what lies elsewhere.
Result<std::map<std::string, std::string>> ReadIndex(const std::string& path) {
  const Result<std::string> text = ReadFile(path);
  if (!text) return std::unexpected(text.error());
  const auto wrong = [&](std::string pointer, std::string message, std::string found) {
    Error error = MakeInputError(std::move(pointer), std::move(message), std::move(found)).error();
    error.file = path;
    return std::unexpected(std::move(error));
  };
  const Result<JsonTape> tape = JsonTape::Parse(*text);
  if (!tape) return wrong(tape.error().pointer, tape.error().message, tape.error().found);
  const JsonIndex map = tape->Find(0, "weight_map");
  if (map == 0 || (*tape)[map].kind != JsonKind::kObject)
    return wrong("", "an index of safetensors has a weight_map", tape->Describe(map));
  std::map<std::string, std::string> files;  // by the tensor's name
  for (JsonIndex key = map + 1; key < (*tape)[map].end; key = (*tape)[key + 1].end) {
    const std::string file((*tape)[key + 1].kind == JsonKind::kString ? tape->String(key + 1) : "");
    if (file.empty() || file.find('/') != std::string::npos || file == "..")
      return wrong(tape->Pointer(key + 1), "no name of a file in the same folder", tape->Describe(key + 1));
    files.emplace(tape->String(key), file);
  }
  return files;
}

Result<Checkpoint> ReadIndexed(const std::string& path, const std::string& index) {
  const Result<std::map<std::string, std::string>> by_tensor = ReadIndex(index);
  if (!by_tensor) return std::unexpected(by_tensor.error());
  std::set<std::string> files;
  for (const auto& [tensor, file] : *by_tensor) files.insert(file);
  SafetensorsReader reader(path);
  const fs::path folder = fs::path(index).parent_path();
  for (const std::string& file : files) {
    if (Status status = reader.AddTensorsOf((folder / file).string()); !status)
      return std::unexpected(status.error());
  }
  for (const auto& [tensor, file] : *by_tensor) {
    const auto found = reader.names().find(tensor);
    const std::string there = (folder / file).string();
    if (found == reader.names().end() || reader.checkpoint().files[found->second].path != there)
      return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                   .message = "a tensor of the index is not in its file",
                                   .file = index,
                                   .pointer = "/weight_map/" + PointerToken(tensor),
                                   .found = Printable(there)});
  }
  return reader.Finish();
}

}  // namespace

Result<Checkpoint> ReadSafetensors(const std::string& path) {
  if (path.ends_with(".json")) return ReadIndexed(path, path);
  if (!fs::is_directory(path)) {
    SafetensorsReader reader(path);
    if (Status status = reader.AddTensorsOf(path); !status) return std::unexpected(status.error());
    return reader.Finish();
  }
  std::set<std::string> files;
  std::set<std::string> indices;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".safetensors")) files.insert(entry.path().string());
    if (name.ends_with(".safetensors.index.json")) indices.insert(entry.path().string());
  }
  if (indices.size() == 1) return ReadIndexed(path, *indices.begin());
  SafetensorsReader reader(path);
  for (const std::string& file : files) {
    if (Status status = reader.AddTensorsOf(file); !status) return std::unexpected(status.error());
  }
  return reader.Finish();
}

}  // namespace shardplan
