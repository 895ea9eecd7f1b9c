// SPDX-License-Identifier: Apache-2.0
// safetensors: 8 bytes with the length of a JSON header, the header, the tensors' bytes. Several files have
// an index that says which tensor is in which.
//
// [Note: shards in safetensors]
// torch.distributed.checkpoint's HuggingFaceStorageWriter(save_distributed=True) writes a file for each rank,
// without an index. A tensor's name is in several of them, each with the shape of its part. The header's
// __metadata__ has the place of the part, as JSON in text: DCP_SHARDING_INFO, {name: {"saved_offsets":
// [...]}}. The whole shape is nowhere: it is where the parts end. So one file says nothing of what the others
// have.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include "checkpoints/files/little_endian.h"
#include "checkpoints/files/readers.h"
#include "checkpoints/files/safetensors_dtypes.h"
#include "json/fields.h"
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

  // Files of shards that were read.
  std::int64_t shards() const { return shards_; }

  Result<Checkpoint> Finish(std::size_t first = 0) {
    for (CheckpointTensor& tensor : checkpoint_.tensors) {
      for (const CheckpointPiece& piece : tensor.pieces) {
        for (std::size_t d = 0; d < piece.low.size(); ++d)
          tensor.shape[d] = std::max(tensor.shape[d], piece.low[d] + piece.size[d]);
      }
    }
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
    const Result<std::optional<Offsets>> offsets = OffsetsOf(file, tape);
    if (!offsets) return std::unexpected(offsets.error());
    if (*offsets) ++shards_;
    std::vector<std::pair<std::int64_t, std::int64_t>> taken;
    for (JsonIndex key = 1; key < tape[0].end; key = tape[key + 1].end) {
      if (tape.String(key) == "__metadata__") continue;
      if (Status status = AddTensor(file, tape, key, index, data, *offsets, taken); !status) return status;
    }
    std::ranges::sort(taken);
    for (std::size_t t = 1; t < taken.size(); ++t) {
      if (taken[t].first < taken[t - 1].second)
        return file.ErrorAt(data + taken[t].first, "two tensors of safetensors overlap");
    }
    return {};
  }

  using Offsets = std::map<std::string, std::vector<std::int64_t>, std::less<>>;

  // The places of the file's tensors in the whole ones; nothing: they are whole.
  static Result<std::optional<Offsets>> OffsetsOf(const InputFile& file, const JsonTape& tape) {
    const JsonIndex metadata = tape.Find(0, "__metadata__");
    if (metadata == 0 || tape[metadata].kind != JsonKind::kObject) return std::nullopt;
    const JsonIndex info = tape.Find(metadata, "DCP_SHARDING_INFO");
    if (info == 0) return std::nullopt;
    constexpr const char* kExpected = "JSON in text: {name: {\"saved_offsets\": [...]}}";
    if (tape[info].kind != JsonKind::kString)
      return Wrong(file, tape, info, "no places of shards", kExpected);
    const std::string text(tape.String(info));
    const Result<JsonTape> places = JsonTape::Parse(text);
    if (!places || (*places)[0].kind != JsonKind::kObject)
      return Wrong(file, tape, info, "no places of shards", kExpected);
    Offsets offsets;
    for (JsonIndex key = 1; key < (*places)[0].end; key = (*places)[key + 1].end) {
      std::vector<std::int64_t> low;
      const JsonIndex list =
          (*places)[key + 1].kind == JsonKind::kObject ? places->Find(key + 1, "saved_offsets") : 0;
      if (!Integers(*places, list, low)) return Wrong(file, tape, info, "no places of shards", kExpected);
      offsets.emplace(places->String(key), std::move(low));
    }
    return offsets;
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
                   std::int64_t data, const std::optional<Offsets>& places,
                   std::vector<std::pair<std::int64_t, std::int64_t>>& taken) {
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
    if (numel > 0) taken.emplace_back(offsets[0], offsets[1]);
    CheckpointPiece piece{index, data + offsets[0], std::vector<std::int64_t>(tensor.shape.size(), 0),
                          tensor.shape, RowMajorStrides(tensor.shape)};
    if (places) {
      const auto place = places->find(tensor.name);
      if (place == places->end() || place->second.size() != tensor.shape.size())
        return Wrong(file, tape, entry, "a shard without its place",
                     fmt::format("{} saved_offsets in DCP_SHARDING_INFO", tensor.shape.size()));
      for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
        if (place->second[d] > kMaxExact - tensor.shape[d])
          return Wrong(file, tape, entry, "a shard that lies nowhere", "saved_offsets below 2^53");
      }
      piece.low = place->second;
      return AddShard(file, tape, entry, std::move(tensor), std::move(piece));
    }
    if (!names_.emplace(tensor.name, index).second)
      return Wrong(file, tape, entry, "two tensors have one name", "each name once");
    tensor.pieces.push_back(std::move(piece));
    checkpoint_.tensors.push_back(std::move(tensor));
    return {};
  }

  // The first or a further part of a tensor. Parts that are empty say nothing.
  Status AddShard(const InputFile& file, const JsonTape& tape, JsonIndex entry, CheckpointTensor tensor,
                  CheckpointPiece piece) {
    const auto [at, added] = sharded_.try_emplace(tensor.name, checkpoint_.tensors.size());
    if (added) {
      if (!names_.emplace(tensor.name, piece.file).second)
        return Wrong(file, tape, entry, "two tensors have one name", "each name once");
      tensor.pieces.push_back(std::move(piece));
      checkpoint_.tensors.push_back(std::move(tensor));
      return {};
    }
    CheckpointTensor& whole = checkpoint_.tensors[at->second];
    if (whole.dtype != tensor.dtype || whole.shape.size() != tensor.shape.size())
      return Wrong(file, tape, entry, "shards of one tensor are of other dtypes or dimensions",
                   fmt::format("{}, {} dimensions", Name(whole.dtype), whole.shape.size()));
    whole.pieces.push_back(std::move(piece));
    return {};
  }

  Checkpoint checkpoint_;
  std::map<std::string, std::int32_t> names_;   // and the file that has it
  std::map<std::string, std::size_t> sharded_;  // names of tensors in parts; where they are
  std::int64_t shards_ = 0;
};

// One file of shards: nothing says what is in the others.
Status CheckShards(const SafetensorsReader& reader, const std::string& path) {
  if (reader.shards() != 1) return {};
  return std::unexpected(
      Error{.code = ErrorCode::kBadInput,
            .message = "the file has the shards of one rank, and their tensors' whole shapes are nowhere",
            .file = path,
            .pointer = "/__metadata__/DCP_SHARDING_INFO",
            .found = "one file of shards",
            .expected = "the folder with the files of all ranks"});
}

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
    if (Status whole = CheckShards(reader, path); !whole) return std::unexpected(whole.error());
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
  if (Status whole = CheckShards(reader, path); !whole) return std::unexpected(whole.error());
  return reader.Finish();
}

}  // namespace shardplan
