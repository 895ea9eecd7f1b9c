// SPDX-License-Identifier: Apache-2.0
// A state in memory as a torch.distributed.checkpoint directory, and boxes of checkpoints into memory.
#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <unordered_map>
#include <utility>

#include "checkpoints/files/box_reader.h"
#include "checkpoints/files/file_sink.h"
#include "checkpoints/files/outputs.h"
#include "checkpoints/layouts/part_boxes.h"
#include "documents/descriptor.h"
#include "shardplan/checkpoints/checkpoint.h"

namespace shardplan {
namespace {

namespace files = std::filesystem;

files::path PlaceOf(const std::string& path) {
  files::path place = files::absolute(path).lexically_normal();
  return place.has_filename() ? place : place.parent_path();
}

files::path PartialOf(const files::path& place) {
  return place.parent_path() / fmt::format(".shardplan-{}.partial", place.filename().string());
}

std::unexpected<Error> CannotSave(ErrorCode code, const files::path& place, std::string message) {
  return std::unexpected(Error{.code = code, .message = std::move(message), .file = place.string()});
}

StateBox BoxOf(const PartBox& part, std::int32_t tensor, std::size_t dims, std::int64_t element_bytes) {
  StateBox box{.tensor = tensor, .offset_bytes = part.at * element_bytes};
  for (std::size_t d = 0; d < dims; ++d) {
    box.low.push_back(part.low[d]);
    box.size.push_back(part.high[d] - part.low[d]);
  }
  return box;
}

std::int64_t BytesOf(const StateDescription& state, const StateBox& box) {
  std::int64_t bytes = SizeBytes(state.tensors[box.tensor].dtype);
  for (const std::int64_t extent : box.size) bytes *= extent;
  return bytes;
}

Status WriteFile(const files::path& folder, const OutputFile& file,
                 const std::function<Result<std::span<const std::byte>>()>& next_data) {
  Result<FileSink> sink = FileSink::Open(folder.string(), file, {});
  if (!sink) return std::unexpected(sink.error());
  for (std::size_t s = 0; s < file.steps.size(); ++s) {
    const auto step = static_cast<std::int32_t>(s);
    if (Status status = sink->Literal(step); !status) return status;
    if (file.steps[s].tensor < 0 || file.steps[s].data_bytes == 0) continue;
    const Result<std::span<const std::byte>> data = next_data();
    if (!data) return std::unexpected(data.error());
    if (std::ssize(*data) != file.steps[s].data_bytes)
      return MakeError(ErrorCode::kInternal, fmt::format("a box of {} bytes is given as {}",
                                                         file.steps[s].data_bytes, data->size()));
    Status status = sink->Data(step, reinterpret_cast<const char*>(data->data()), std::ssize(*data));
    if (!status) return status;
  }
  if (Status status = sink->Finish(); !status) return status;
  return FlushFile((folder / file.name).string());
}

void FlushFolder(const files::path& folder) {
  const Descriptor open(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (open.value() >= 0) (void)::fsync(open.value());  // some file systems cannot
}

}  // namespace

std::vector<StateBox> BoxesOf(const StateLayout& layout, std::int32_t tensor, std::int64_t rank) {
  const StateTensor& of = layout.tensors[tensor];
  std::vector<StateBox> boxes;
  for (const HeldPart& part : HeldPartsOf(layout, of)) {
    if (!std::ranges::binary_search(part.ranks, rank)) continue;
    for (const PartBox& box : part.boxes) {
      boxes.push_back(BoxOf(box, tensor, of.shape.size(), SizeBytes(of.dtype)));
      boxes.back().rank = rank;
    }
  }
  return boxes;
}

StateDescription DescribeState(const StateLayout& layout) {
  StateDescription state;
  std::vector<std::int64_t> bytes_of_rank(static_cast<std::size_t>(RanksOf(layout)), 0);
  for (std::size_t t = 0; t < layout.tensors.size(); ++t) {
    const StateTensor& tensor = layout.tensors[t];
    state.tensors.push_back(
        {.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .pieces = {}});
    for (const HeldPart& part : HeldPartsOf(layout, tensor)) {
      const std::int64_t rank = *std::ranges::min_element(
          part.ranks, {}, [&](std::int64_t r) { return bytes_of_rank[static_cast<std::size_t>(r)]; });
      for (const PartBox& box : part.boxes) {
        state.boxes.push_back(
            BoxOf(box, static_cast<std::int32_t>(t), tensor.shape.size(), SizeBytes(tensor.dtype)));
        state.boxes.back().rank = rank;
        bytes_of_rank[static_cast<std::size_t>(rank)] += BytesOf(state, state.boxes.back());
      }
    }
  }
  return state;
}

Status BeginState(const std::string& path, bool replaces) {
  const files::path place = PlaceOf(path);
  std::error_code error;
  const files::file_status there = files::symlink_status(place, error);
  if (files::exists(there) && !replaces)
    return CannotSave(ErrorCode::kUsage, place, "it is there already, and nothing is overwritten");
  if (files::exists(there) && !files::is_directory(there))
    return CannotSave(ErrorCode::kUsage, place, "it is there already, and no folder that could be replaced");
  if (files::exists(there) && !files::is_empty(place, error) && !files::exists(place / ".metadata", error))
    return CannotSave(ErrorCode::kUsage, place, "it is a folder without a checkpoint, which is not replaced");
  const files::path partial = PartialOf(place);
  files::remove_all(partial, error);  // of a save that was killed
  if (error) return CannotSave(ErrorCode::kEnvironment, partial, "cannot remove it: " + error.message());
  files::create_directories(partial, error);
  if (error) return CannotSave(ErrorCode::kEnvironment, partial, "cannot create it: " + error.message());
  return {};
}

Status WriteStateOfRank(const StateDescription& state, const std::string& path, std::int64_t rank,
                        const BoxBytes& bytes) {
  const files::path partial = PartialOf(PlaceOf(path));
  const std::unique_ptr<StateOutput> output = MakeStateOutput(state);
  const std::int32_t file = output->FileOf(rank);
  if (file < 0) return {};
  const Result<OutputFile> made = output->Make(file);
  if (!made) return std::unexpected(made.error());
  std::vector<std::size_t> own;
  for (std::size_t b = 0; b < state.boxes.size(); ++b) {
    if (state.boxes[b].rank == rank) own.push_back(b);
  }
  std::size_t next = 0;
  return WriteFile(partial, *made,
                   [&]() -> Result<std::span<const std::byte>> { return bytes(own[next++]); });
}

Status FinishState(const StateDescription& state, const std::string& path, bool replaces) {
  const files::path place = PlaceOf(path);
  const files::path partial = PartialOf(place);
  const std::unique_ptr<StateOutput> output = MakeStateOutput(state);
  for (std::int32_t f = 0; f < output->files(); ++f) {
    const Result<OutputFile> file = output->Make(f);
    if (!file) return std::unexpected(file.error());
    if (f + 1 == output->files()) {
      if (Status status = WriteFile(partial, *file, {}); !status) return status;
      continue;
    }
    std::error_code error;
    const std::uintmax_t size = files::file_size(partial / file->name, error);
    if (error || size != static_cast<std::uintmax_t>(file->size_bytes))
      return CannotSave(
          ErrorCode::kEnvironment, partial / file->name,
          "the file of a rank is not there, or not whole: do all ranks write to one file system?");
  }
  FlushFolder(partial);
  const bool exchanges = replaces && files::exists(place);
  const unsigned how = exchanges ? RENAME_EXCHANGE : RENAME_NOREPLACE;
  if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, place.c_str(), how) != 0)
    return SystemError(ErrorCode::kEnvironment, place.string(), "give the checkpoint its name");
  FlushFolder(place.parent_path());
  if (exchanges) GiveUpState(path);  // the old one
  return {};
}

void GiveUpState(const std::string& path) {
  std::error_code ignored;
  files::remove_all(PartialOf(PlaceOf(path)), ignored);
}

// ---- reading ----

struct StateReader::Impl {
  const Checkpoint& checkpoint;
  BoxReader reader;
  std::unordered_map<std::string_view, std::int32_t> tensors;
};

StateReader::StateReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StateReader::StateReader(StateReader&&) noexcept = default;
StateReader& StateReader::operator=(StateReader&&) noexcept = default;
StateReader::~StateReader() = default;

Result<StateReader> StateReader::Open(const Checkpoint& checkpoint) {
  Result<BoxReader> reader = BoxReader::Open(checkpoint);
  if (!reader) return std::unexpected(reader.error());
  auto impl = std::make_unique<Impl>(checkpoint, std::move(*reader));
  for (std::size_t t = 0; t < checkpoint.tensors.size(); ++t)
    impl->tensors.emplace(checkpoint.tensors[t].name, static_cast<std::int32_t>(t));
  return StateReader(std::move(impl));
}

std::int32_t StateReader::Find(const std::string& name) const {
  const auto found = impl_->tensors.find(name);
  return found == impl_->tensors.end() ? -1 : found->second;
}

Status StateReader::Read(std::int32_t tensor, const std::vector<std::int64_t>& low,
                         const std::vector<std::int64_t>& size, std::span<std::byte> to) {
  const CheckpointTensor& of = impl_->checkpoint.tensors[tensor];
  std::int64_t bytes = SizeBytes(of.dtype);
  PartBox box;
  if (of.shape.empty()) box.high[0] = 1;
  bool fits = low.size() == of.shape.size() && size.size() == of.shape.size();
  for (std::size_t d = 0; fits && d < of.shape.size(); ++d) {
    fits = low[d] >= 0 && size[d] >= 0 && size[d] <= of.shape[d] && low[d] <= of.shape[d] - size[d];
    box.low[d] = low[d];
    box.high[d] = low[d] + size[d];
    bytes *= size[d];
  }
  if (!fits || bytes != std::ssize(to))
    return MakeError(ErrorCode::kUsage, fmt::format("no box of {}, or memory of another size", of.name));
  if (bytes == 0) return {};
  return impl_->reader.Read(tensor, box, reinterpret_cast<char*>(to.data()));
}

Status StateReader::CheckUnchanged() const { return impl_->reader.CheckUnchanged(); }

}  // namespace shardplan
