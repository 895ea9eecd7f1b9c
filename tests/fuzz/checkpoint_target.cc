// SPDX-License-Identifier: Apache-2.0
// Files of checkpoints: read, and where they read well, written in another format and read again.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "shardplan/checkpoints/checkpoint.h"
#include "shardplan/checkpoints/reshard.h"
#include "tests/fuzz/fuzz_targets.h"

namespace shardplan::test {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMostTensorBytes = std::int64_t{1} << 20;
constexpr std::size_t kLengthBytes = 4;

void Insist(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what.c_str());
  std::abort();
}

void Write(const fs::path& path, std::string_view bytes) { std::ofstream(path, std::ios::binary) << bytes; }

// A folder that goes with the object.
class Scratch {
 public:
  Scratch() {
    const fs::path memory = "/dev/shm";
    std::string name =
        ((fs::exists(memory) ? memory : fs::temp_directory_path()) / "shardplan-fuzz-XXXXXX").string();
    Insist(::mkdtemp(name.data()) != nullptr, "a folder can be made");
    path_ = name;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// 'F' and the bytes of a file; or 'D', the length of .metadata, .metadata and the bytes of __0_0.distcp.
std::string Unpack(std::string_view bytes, const fs::path& folder) {
  if (bytes.starts_with('D') && bytes.size() > kLengthBytes) {
    std::size_t length = 0;
    for (std::size_t i = 0; i < kLengthBytes; ++i)
      length |= std::size_t{static_cast<unsigned char>(bytes[1 + i])} << (8 * i);
    const std::string_view rest = bytes.substr(1 + kLengthBytes);
    fs::create_directory(folder / "in");
    Write(folder / "in" / ".metadata", rest.substr(0, length));
    Write(folder / "in" / "__0_0.distcp", rest.substr(std::min(length, rest.size())));
  } else {
    Write(folder / "in", bytes.substr(std::min<std::size_t>(1, bytes.size())));
  }
  return (folder / "in").string();
}

std::map<std::string, std::pair<DType, std::vector<std::int64_t>>> Shapes(const Checkpoint& checkpoint) {
  std::map<std::string, std::pair<DType, std::vector<std::int64_t>>> shapes;
  for (const CheckpointTensor& tensor : checkpoint.tensors)
    shapes[tensor.name] = {tensor.dtype, tensor.shape};
  return shapes;
}

}  // namespace

void FuzzCheckpoint(std::string_view bytes) {
  const Scratch scratch;
  const Result<Checkpoint> checkpoint = ReadCheckpoint(Unpack(bytes, scratch.path()));
  if (!checkpoint) {
    const Error& error = checkpoint.error();
    Insist(error.code == ErrorCode::kBadInput && !error.message.empty() && !error.file.empty(),
           "damaged files are bad input: " + ToString(error));
    return;
  }
  if (TensorBytes(*checkpoint) > kMostTensorBytes || Shapes(*checkpoint).size() != checkpoint->tensors.size())
    return;
  for (const CheckpointFormat format :
       {CheckpointFormat::kDistributed, CheckpointFormat::kTorchSave, CheckpointFormat::kSafetensors}) {
    CheckpointRewrite how{.format = format, .tensors_only = format == CheckpointFormat::kSafetensors};
    const bool is_distributed = format == CheckpointFormat::kDistributed;
    Result<StateLayout> layout = LayoutOfCheckpoint(
        *checkpoint, {.layout = is_distributed ? CheckpointLayout::kFlat : CheckpointLayout::kWhole,
                      .mesh = {{"shard", 3}}});
    if (!layout) continue;
    how.layout = std::move(*layout);
    how.budget_bytes = kLeastReshardBudget;
    const std::string target = (scratch.path() / ("out" + std::to_string(static_cast<int>(format)))).string();
    const Result<CheckpointRewritten> written = RewriteCheckpoint(*checkpoint, target, how);
    if (!written) {
      Insist(written.error().code == ErrorCode::kBadInput,
             "what was read is written: " + ToString(written.error()));
      continue;
    }
    const Result<Checkpoint> again = ReadCheckpoint(target);
    Insist(again.has_value(), again ? "" : "what was written is read: " + ToString(again.error()));
    Insist(Shapes(*again) == Shapes(*checkpoint), "the same tensors are read again");
  }
}

}  // namespace shardplan::test
