// SPDX-License-Identifier: Apache-2.0
// A checkpoint in another layout or format: read, cut and written in pieces, beside its place until it is
// whole.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "checkpoints/files/box_reader.h"
#include "checkpoints/files/file_sink.h"
#include "checkpoints/files/journal.h"
#include "checkpoints/files/outputs.h"
#include "checkpoints/files/write_worker.h"
#include "shardplan/schemas/io.h"

namespace shardplan {
namespace {

namespace fs = std::filesystem;

// Buffers are read into while others are written: enough of them that neither side waits for the other to
// wake.
constexpr std::size_t kBuffers = 8;
constexpr std::int64_t kMostWindow = std::int64_t{2} << 20;  // it stays in the processor's caches
constexpr std::int64_t kMostBetweenEntries = std::int64_t{64} << 20;

class Rewriter {
 public:
  Rewriter(const Checkpoint& checkpoint, fs::path path, const CheckpointRewrite& how)
      : checkpoint_(checkpoint),
        how_(how),
        path_(std::move(path)),
        partial_(path_.parent_path() / fmt::format(".shardplan-{}.partial", path_.filename().string())),
        window_(std::clamp<std::int64_t>(how.budget_bytes / static_cast<std::int64_t>(kBuffers + 1), 1024,
                                         kMostWindow)),
        between_entries_(std::min(kMostBetweenEntries, 32 * window_)),
        is_file_(how.format == CheckpointFormat::kTorchSave ||
                 (how.format == CheckpointFormat::kSafetensors && path_.extension() == ".safetensors")) {}

  Result<CheckpointRewritten> Run() {
    if (Status status = CheckPlace(); !status) return std::unexpected(status.error());
    Result<std::unique_ptr<CheckpointOutput>> output = MakeOutput();
    if (!output) return std::unexpected(output.error());
    output_ = std::move(*output);
    for (std::int32_t f = 0; f < output_->files(); ++f) {
      const Result<OutputFile> file = output_->Make(f);
      if (!file) return std::unexpected(file.error());
      sizes_.emplace_back(file->name, file->size_bytes);
      result_.bytes += file->size_bytes;
    }
    result_.files = std::ssize(sizes_);
    fingerprint_ = Fingerprint();
    std::error_code error;
    if (fs::exists(fs::symlink_status(path_, error))) {
      if (Status status = FindWhole(); !status) return std::unexpected(status.error());
      return result_;
    }
    if (Status status = WriteAll(); !status) return std::unexpected(status.error());
    return result_;
  }

 private:
  std::unexpected<Error> Wrong(ErrorCode code, std::string message) const {
    return std::unexpected(Error{.code = code, .message = std::move(message), .file = path_.string()});
  }

  Status CheckPlace() const {
    std::error_code error;
    const fs::path parent = fs::canonical(path_.parent_path(), error);
    if (error)
      return Wrong(
          ErrorCode::kEnvironment,
          fmt::format("cannot write there: {}",
                      fs::exists(path_.parent_path()) ? error.message() : "its folder is not there"));
    const fs::path source = fs::canonical(checkpoint_.path, error);
    const fs::path target = parent / path_.filename();
    const auto [from, to] = std::ranges::mismatch(source, target);
    if (from == source.end())
      return Wrong(ErrorCode::kUsage, "the new checkpoint would lie within the one that is read");
    return {};
  }

  Result<std::unique_ptr<CheckpointOutput>> MakeOutput() const {
    const std::string name = is_file_ ? path_.filename().string() : std::string();
    switch (how_.format) {
      case CheckpointFormat::kSafetensors:
        return MakeSafetensorsOutput(checkpoint_, how_, name);
      case CheckpointFormat::kTorchSave:
        return MakeTorchSaveOutput(checkpoint_, how_, name);
      default:
        return MakeDistributedOutput(checkpoint_, how_);
    }
  }

  // Equal: the same bytes are to be written, in the same pieces.
  std::string Fingerprint() const {
    std::string text = fmt::format("{}\n{}\n{}\n{}", static_cast<int>(how_.format), how_.tensors_only,
                                   window_, ToJson(how_.layout));
    for (const CheckpointFile& file : checkpoint_.files)
      text += fmt::format("{} {} {}\n", file.path, file.size_bytes, file.modified_ns);
    for (const CheckpointTensor& tensor : checkpoint_.tensors) text += tensor.name + "\n";
    for (const CheckpointObject& object : checkpoint_.objects) text += object.name + "\n";
    return Digest(text);
  }

  // ---- what is there already ----

  // `path_` is there: the same checkpoint, whole, or something else.
  Status FindWhole() {
    const fs::path folder = is_file_ ? partial_ : path_;
    const std::map<std::string, WrittenPart> written = Journal::Read(folder.string(), fingerprint_);
    for (const auto& [name, size] : sizes_) {
      const auto found = written.find(name);
      std::error_code error;
      const fs::path file = is_file_ ? path_ : path_ / name;
      if (found == written.end() || found->second.bytes != size ||
          fs::file_size(file, error) != static_cast<std::uintmax_t>(size) || error)
        return Wrong(ErrorCode::kUsage, "it is there already, and nothing is overwritten");
    }
    if (how_.verify) {
      if (Status status = VerifyFiles(is_file_ ? path_.parent_path() : path_, written); !status)
        return status;
    }
    std::error_code error;
    if (is_file_) fs::remove_all(partial_, error);
    result_.was_there = true;
    result_.kept_bytes = result_.bytes;
    return {};
  }

  Status VerifyFiles(const fs::path& folder, const std::map<std::string, WrittenPart>& written) const {
    for (const auto& [name, size] : sizes_) {
      const Result<WrittenPart> found = ChecksumOfFile((folder / name).string());
      if (!found) return std::unexpected(found.error());
      const WrittenPart& expected = written.at(name);
      if (found->bytes != expected.bytes || found->crc32 != expected.crc32)
        return std::unexpected(Error{.code = ErrorCode::kNegative,
                                     .message = "the file does not have the checksum of what was written",
                                     .file = (folder / name).string(),
                                     .found = fmt::format("CRC-32 {:08x}", found->crc32),
                                     .expected = fmt::format("{:08x}", expected.crc32)});
    }
    return {};
  }

  // ---- writing ----

  Status WriteAll() {
    Result<BoxReader> reader = BoxReader::Open(checkpoint_);
    if (!reader) return std::unexpected(reader.error());
    if (::mkdir(partial_.c_str(), 0777) != 0 && errno != EEXIST)
      return SystemError(ErrorCode::kEnvironment, partial_.string(), "create the folder");
    Result<Journal> journal = Journal::Open(partial_.string(), fingerprint_);
    if (!journal) return std::unexpected(journal.error());
    if (Status status = RemoveOthers(journal->is_same()); !status) return status;
    if (Status status = CheckSpace(journal->written()); !status) return status;
    for (std::size_t f = 0; f < sizes_.size(); ++f) {
      const Result<OutputFile> file = output_->Make(static_cast<std::int32_t>(f));
      if (!file) return std::unexpected(file.error());
      if (Status status = WriteOne(*file, *reader, *journal); !status) return status;
    }
    if (Status status = reader->CheckUnchanged(); !status) return status;
    // Not file by file: the disk is to be busy with one while the next is read.
    for (const auto& [name, size] : sizes_) {
      if (Status status = FlushFile((partial_ / name).string()); !status) return status;
    }
    if (how_.verify) {
      if (Status status = VerifyFiles(partial_, journal->written()); !status) return status;
    }
    if (Status status = journal->Flush(); !status) return status;
    return TakeName();
  }

  // Files of another run, which would stay in the folder.
  Status RemoveOthers(bool is_same) const {
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(partial_, error)) {
      const std::string name = entry.path().filename().string();
      const bool is_ours =
          std::ranges::find(sizes_, name, &std::pair<std::string, std::int64_t>::first) != sizes_.end();
      if (name == kJournalName || (is_same && is_ours)) continue;
      std::error_code removed;
      fs::remove_all(entry.path(), removed);
      if (removed) return Wrong(ErrorCode::kEnvironment, "cannot remove what another run has left there");
    }
    return {};
  }

  Status CheckSpace(const std::map<std::string, WrittenPart>& written) const {
    std::int64_t needed = result_.bytes;
    for (const auto& [name, part] : written) needed -= part.bytes;
    struct statvfs space = {};
    if (::statvfs(partial_.c_str(), &space) != 0) return {};
    const auto free = static_cast<std::int64_t>(space.f_bavail * space.f_frsize);
    if (needed <= free) return {};
    return std::unexpected(Error{.code = ErrorCode::kEnvironment,
                                 .message = "there is not enough space for the checkpoint",
                                 .file = path_.string(),
                                 .found = fmt::format("{} bytes free", free),
                                 .expected = fmt::format("{}", needed)});
  }

  Status WriteOne(const OutputFile& file, BoxReader& reader, Journal& journal) {
    const auto known = journal.written().find(file.name);
    WrittenPart kept = known == journal.written().end() ? WrittenPart{} : known->second;
    const std::int64_t done_before = done_;
    Result<bool> right = WriteSteps(file, reader, journal, kept);
    if (right && !*right) {  // what was kept is not what the journal says
      done_ = done_before;
      right = WriteSteps(file, reader, journal, {});
    }
    if (!right) return std::unexpected(right.error());
    return {};
  }

  // False: what was kept is wrong.
  Result<bool> WriteSteps(const OutputFile& file, BoxReader& reader, Journal& journal, WrittenPart kept) {
    Result<FileSink> sink = FileSink::Open(partial_.string(), file, kept);
    if (!sink) return std::unexpected(sink.error());
    kept = sink->kept();
    std::int64_t entry_at = kept.bytes;
    for (Buffer& buffer : buffers_) buffer.used_by = 0;
    WriteWorker worker;
    // The worker writes an entry of the journal now and then, after a piece.
    const std::function<Status()> note = [&]() -> Status {
      const WrittenPart part = sink->written();
      // An entry over wrong bytes would have the next run take them for right, were this one killed.
      if (!sink->KeptIsRight() || part.bytes - entry_at < between_entries_) return {};
      entry_at = part.bytes;
      return journal.Add(file.name, part);
    };
    std::int64_t position = 0;
    for (std::size_t s = 0; s < file.steps.size(); ++s) {
      const auto step = static_cast<std::int32_t>(s);
      worker.Push([&sink, &note, step]() -> Status {
        if (Status status = sink->Literal(step); !status) return status;
        return note();
      });
      position += std::ssize(file.steps[s].literal);
      if (file.steps[s].tensor < 0) continue;
      Status status = WriteData(file.steps[s], step, reader, worker, *sink, note, position, kept.bytes);
      if (!status) return std::unexpected(status.error());
    }
    if (Status status = worker.WaitForAll(); !status) return std::unexpected(status.error());
    if (!sink->KeptIsRight()) return false;
    result_.kept_bytes += kept.bytes;
    if (Status status = sink->Finish(); !status) return std::unexpected(status.error());
    if (const WrittenPart part = sink->written(); part.bytes != kept.bytes || kept.bytes == 0) {
      if (Status status = journal.Add(file.name, part); !status) return std::unexpected(status.error());
    }
    return true;
  }

  // The data of a step, window by window. `position`: in the file, ahead of what the worker has done.
  Status WriteData(const OutputStep& of, std::int32_t step, BoxReader& reader, WriteWorker& worker,
                   FileSink& sink, const std::function<Status()>& note, std::int64_t& position,
                   std::int64_t kept_bytes) {
    const CheckpointTensor& tensor = checkpoint_.tensors[of.tensor];
    const std::int64_t element = SizeBytes(tensor.dtype);
    const std::size_t dims = std::max<std::size_t>(1, of.size.size());
    PartBox box;
    if (of.size.empty()) box.high[0] = 1;
    for (std::size_t d = 0; d < of.size.size(); ++d) {
      box.low[d] = of.low[d];
      box.high[d] = of.low[d] + of.size[d];
    }
    Status status;
    ForEachSlab(box, dims, element, window_, [&](const PartBox& slab) {
      std::int64_t bytes = element;
      for (std::size_t d = 0; d < dims; ++d) bytes *= slab.high[d] - slab.low[d];
      position += bytes;
      if (position <= kept_bytes) {
        status = worker.WaitFor(worker.Push([&sink, step, bytes] { return sink.Keep(step, bytes); }));
      } else {
        Buffer& buffer = buffers_[next_buffer_++ % kBuffers];
        status = worker.WaitFor(buffer.used_by);
        if (!status) return false;
        buffer.bytes.resize(static_cast<std::size_t>(std::max(window_, bytes)));
        status = reader.Read(of.tensor, slab, buffer.bytes.data());
        if (!status) return false;
        buffer.used_by = worker.Push([&sink, &note, &buffer, step, bytes]() -> Status {
          if (Status written = sink.Data(step, buffer.bytes.data(), bytes); !written) return written;
          return note();
        });
      }
      done_ += bytes;
      if (how_.progress) how_.progress(done_, result_.bytes);
      return status.has_value();
    });
    return status;
  }

  Status TakeName() const {
    const auto flush = [](const fs::path& folder) {
      const Descriptor open(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      if (open.value() >= 0) (void)::fsync(open.value());  // some file systems cannot
    };
    flush(partial_);
    const fs::path from = is_file_ ? partial_ / path_.filename() : partial_;
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE) != 0)
      return SystemError(ErrorCode::kEnvironment, path_.string(), "give the checkpoint its name");
    flush(path_.parent_path());
    std::error_code error;
    if (is_file_) fs::remove_all(partial_, error);
    return {};
  }

  struct Buffer {
    std::vector<char> bytes;
    std::int64_t used_by = 0;  // a write of the worker at hand
  };

  const Checkpoint& checkpoint_;
  const CheckpointRewrite& how_;
  const fs::path path_, partial_;
  const std::int64_t window_, between_entries_;
  const bool is_file_;
  std::unique_ptr<CheckpointOutput> output_;
  std::vector<std::pair<std::string, std::int64_t>> sizes_;  // of the files, by name
  std::string fingerprint_;
  std::array<Buffer, kBuffers> buffers_;
  std::size_t next_buffer_ = 0;
  std::int64_t done_ = 0;
  CheckpointRewritten result_;
};

}  // namespace

Result<CheckpointRewritten> RewriteCheckpoint(const Checkpoint& checkpoint, const std::string& path,
                                              const CheckpointRewrite& how) {
  if (how.budget_bytes < kLeastReshardBudget)
    return MakeError(ErrorCode::kUsage, fmt::format("the budget is at least {} bytes", kLeastReshardBudget));
  fs::path target = fs::absolute(path).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();
  if (path.empty() || !target.has_filename())
    return MakeError(ErrorCode::kUsage, "the new checkpoint needs a name");
  return Rewriter(checkpoint, target, how).Run();
}

}  // namespace shardplan
