// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "checkpoints/host_copy.h"
#include "shardplan/checkpoints/checkpoint.h"
#include "shardplan/executor/checkpoints.h"
#include "shardplan/executor/torch_device.h"
#include "shardplan/schemas/printable.h"
#include "torch/agreement.h"

namespace shardplan::executor {
namespace {

using SessionClock = std::chrono::steady_clock;

// Bytes of a device's memory that are read to from a file at a time.
constexpr std::int64_t kLoadBytes = std::int64_t{64} << 20;

std::int64_t SinceNs(SessionClock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(SessionClock::now() - begin).count();
}

// Errors of torch (no memory, a broken device) as an Error.
template <typename Work>
Status Caught(const Work& work) {
  try {
    return work();
  } catch (const std::exception& exception) {
    const std::string what = exception.what();
    return MakeError(ErrorCode::kEnvironment, what.substr(0, what.find('\n')));
  }
}

// A box's elements in a storage that BoxesOf has cut.
Result<at::Tensor> InStorage(const StateTensor& tensor, const StateBox& box, const at::Tensor& storage) {
  std::int64_t bytes = SizeBytes(tensor.dtype);
  for (const std::int64_t extent : box.size) bytes *= extent;
  if (!storage.defined() || !storage.is_contiguous() ||
      static_cast<std::int64_t>(storage.nbytes()) < box.offset_bytes + bytes)
    return MakeError(
        ErrorCode::kUsage,
        fmt::format("the storage of {} is not there, not contiguous or too small", Printable(tensor.name)));
  return storage.view({-1}).view(at::kByte).narrow(0, box.offset_bytes, bytes);
}

}  // namespace

Result<SessionState> StateOfRank(const StateLayout& layout, std::int64_t rank,
                                 const ReshardStorage& storage) {
  SessionState state{.description = DescribeState(layout), .boxes = {}};
  for (const StateBox& box : state.description.boxes) {
    if (box.rank != rank) continue;
    const StateTensor& tensor = layout.tensors[box.tensor];
    Result<at::Tensor> bytes = InStorage(tensor, box, storage(tensor));
    if (!bytes) return std::unexpected(bytes.error());
    state.boxes.push_back(std::move(*bytes));
  }
  return state;
}

class Session::Impl {
 public:
  explicit Impl(SessionOptions options) : options_(std::move(options)) {}
  ~Impl() {
    if (thread_.joinable()) thread_.join();
  }

  Status Save(const std::string& path, SessionState state, const SaveOptions& how) {
    if (Status status = Wait(); !status) return status;
    const auto begin = SessionClock::now();
    if (Status status = Begin(path, state, how); !status) return status;
    at::Tensor on_host;
    Status status =
        Write(path, state.description, how, [&](std::size_t box) -> Result<std::span<const std::byte>> {
          const at::Tensor& tensor = state.boxes[box];
          on_host = tensor.is_cpu() ? tensor : tensor.cpu();
          return std::span(static_cast<const std::byte*>(on_host.const_data_ptr()), on_host.nbytes());
        });
    const std::int64_t took = SinceNs(begin);
    SetFigures({BytesOfBoxes(state), took, took});
    return status;
  }

  Status SaveInBackground(const std::string& path, SessionState state, const SaveOptions& how) {
    if (Status status = Wait(); !status) return status;
    const auto begin = SessionClock::now();
    if (Status status = Begin(path, state, how); !status) return status;
    // A rank whose copy fails says so in its thread, where the others listen.
    const Status copied = Caught([&]() -> Status {
      copy_.Take(state.boxes);
      return {};
    });
    const std::int64_t bytes = BytesOfBoxes(state);
    const std::int64_t held = SinceNs(begin);
    saving_ = true;
    thread_ = std::thread(
        [this, path, how, copied, bytes, held, begin, description = std::move(state.description)] {
          Status status =
              Write(path, description, how, [&](std::size_t box) -> Result<std::span<const std::byte>> {
                if (!copied) return std::unexpected(copied.error());
                if (Status done = Caught([&]() -> Status {
                      copy_.Synchronize();
                      return {};
                    });
                    !done)
                  return std::unexpected(done.error());
                return copy_.Bytes(box);
              });
          if (!copied && status) status = copied;
          SetFigures({bytes, held, SinceNs(begin)});
          const std::lock_guard lock(mutex_);
          outcome_ = std::move(status);
          saving_ = false;
        });
    return {};
  }

  Status Wait() {
    if (thread_.joinable()) thread_.join();
    const std::lock_guard lock(mutex_);
    return std::exchange(outcome_, Status());
  }

  void HoldBack() { copy_.HoldBack(); }
  bool IsSaving() const { return saving_; }
  SaveFigures figures() const {
    const std::lock_guard lock(mutex_);
    return figures_;
  }

  Status Load(const std::string& path, const StateLayout& layout, const ReshardStorage& storage) {
    if (Status status = Wait(); !status) return status;
    const Status own = Caught([&] { return LoadOwn(path, layout, storage); });
    return AgreeThat("is loaded", path, own);
  }

 private:
  static std::int64_t BytesOfBoxes(const SessionState& state) {
    std::int64_t bytes = 0;
    for (const at::Tensor& box : state.boxes) bytes += static_cast<std::int64_t>(box.nbytes());
    return bytes;
  }
  void SetFigures(const SaveFigures& figures) {
    const std::lock_guard lock(mutex_);
    figures_ = figures;
  }

  // All ranks have done their part of something, or all have the error. This rank's own error is told to the
  // others.
  Status AgreeThat(const char* what, const std::string& path, const Status& own) {
    if (options_.ranks < 2) return own;
    Statement statement{.facts = {}, .failure = own ? std::string() : ToString(own.error())};
    if (own) statement.facts = {{fmt::format("the checkpoint that {}", what), path}};
    std::vector<std::int64_t> all(static_cast<std::size_t>(options_.ranks));
    std::iota(all.begin(), all.end(), 0);
    const auto store = c10::make_intrusive<c10d::PrefixStore>(
        fmt::format("shardplan/session/{}", agreements_++), options_.store);
    Status agreed = Agree(store, options_.rank, all, statement, options_.timeout, options_.peers.get());
    return own ? agreed : own;
  }

  Status Begin(const std::string& path, const SessionState& state, const SaveOptions& how) {
    Status own;
    const auto needed = std::ranges::count(state.description.boxes, options_.rank, &StateBox::rank);
    if (needed != std::ssize(state.boxes))
      own = MakeError(ErrorCode::kUsage, fmt::format("{} boxes of {} that the description has are given",
                                                     state.boxes.size(), needed));
    if (own && options_.rank == 0) own = BeginState(path, how.replaces);
    const Status agreed = AgreeThat("is to be written", path, own);
    if (own && !agreed && options_.rank == 0) GiveUpState(path);
    return agreed;
  }

  // `bytes`: of this rank's boxes, by their order.
  Status Write(const std::string& path, const StateDescription& description, const SaveOptions& how,
               const BoxBytes& bytes) {
    std::size_t next = 0;
    const Status own = Caught([&] {
      return WriteStateOfRank(description, path, options_.rank, [&](std::size_t) { return bytes(next++); });
    });
    const Status written = AgreeThat("is written", path, own);
    if (!written) {
      if (options_.rank == 0) GiveUpState(path);
      return written;
    }
    Status named;
    if (options_.rank == 0) named = FinishState(description, path, how.replaces);
    if (!named) GiveUpState(path);
    return AgreeThat("has its name", path, named);
  }

  Status LoadOwn(const std::string& path, const StateLayout& layout, const ReshardStorage& storage) {
    const Result<Checkpoint> checkpoint = ReadCheckpoint(path);
    if (!checkpoint) return std::unexpected(checkpoint.error());
    Result<StateReader> reader = StateReader::Open(*checkpoint);
    if (!reader) return std::unexpected(reader.error());
    for (std::size_t t = 0; t < layout.tensors.size(); ++t) {
      const StateTensor& tensor = layout.tensors[t];
      const std::int32_t found = reader->Find(tensor.name);
      if (found < 0)
        return std::unexpected(
            Error{.code = ErrorCode::kBadInput,
                  .message = fmt::format("the checkpoint lacks {}", Printable(tensor.name)),
                  .file = path});
      const CheckpointTensor& saved = checkpoint->tensors[found];
      if (saved.shape != tensor.shape || saved.dtype != tensor.dtype)
        return std::unexpected(
            Error{.code = ErrorCode::kBadInput,
                  .message = fmt::format("{} is another tensor in the checkpoint", Printable(tensor.name)),
                  .file = path,
                  .found = fmt::format("{} [{}]", Name(saved.dtype), fmt::join(saved.shape, ", ")),
                  .expected = fmt::format("{} [{}]", Name(tensor.dtype), fmt::join(tensor.shape, ", "))});
      if (Status status = LoadTensor(*reader, found, layout, static_cast<std::int32_t>(t), storage); !status)
        return status;
    }
    return reader->CheckUnchanged();
  }

  Status LoadTensor(StateReader& reader, std::int32_t found, const StateLayout& layout, std::int32_t t,
                    const ReshardStorage& storage) {
    const StateTensor& tensor = layout.tensors[t];
    for (const StateBox& box : BoxesOf(layout, t, options_.rank)) {
      const Result<at::Tensor> bytes = InStorage(tensor, box, storage(tensor));
      if (!bytes) return std::unexpected(bytes.error());
      if (Status status = LoadBox(reader, found, box, *bytes); !status) return status;
    }
    return {};
  }

  // Row by row, where it is large and not in host memory.
  static Status LoadBox(StateReader& reader, std::int32_t found, const StateBox& box,
                        const at::Tensor& bytes) {
    if (bytes.is_cpu() || bytes.numel() <= kLoadBytes || box.size.empty() || box.size.front() == 1) {
      const at::Tensor host = bytes.is_cpu() ? bytes : at::empty(bytes.sizes(), at::kByte);
      Status status =
          reader.Read(found, box.low, box.size, {static_cast<std::byte*>(host.data_ptr()), host.nbytes()});
      if (status && !bytes.is_cpu()) bytes.copy_(host);
      return status;
    }
    const std::int64_t row = bytes.numel() / box.size.front();
    const std::int64_t rows = std::max<std::int64_t>(1, kLoadBytes / row);
    for (std::int64_t first = 0; first < box.size.front(); first += rows) {
      StateBox part = box;
      part.low.front() += first;
      part.size.front() = std::min(rows, box.size.front() - first);
      const at::Tensor of_part = bytes.narrow(0, first * row, part.size.front() * row);
      const at::Tensor host = at::empty(of_part.sizes(), at::kByte);
      if (Status status = reader.Read(found, part.low, part.size,
                                      {static_cast<std::byte*>(host.data_ptr()), host.nbytes()});
          !status)
        return status;
      of_part.copy_(host);
    }
    return {};
  }

  const SessionOptions options_;
  HostCopy copy_;
  std::int64_t agreements_ = 0;  // the caller's and the thread's follow one another
  std::thread thread_;
  std::atomic<bool> saving_ = false;
  mutable std::mutex mutex_;  // of what follows
  Status outcome_;
  SaveFigures figures_;
};

Session::Session(SessionOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Session::~Session() = default;

Status Session::Save(const std::string& path, SessionState state, const SaveOptions& options) {
  return impl_->Save(path, std::move(state), options);
}
Status Session::SaveInBackground(const std::string& path, SessionState state, const SaveOptions& options) {
  return impl_->SaveInBackground(path, std::move(state), options);
}
Status Session::Wait() { return impl_->Wait(); }
void Session::HoldBack() { impl_->HoldBack(); }
bool Session::IsSaving() const { return impl_->IsSaving(); }
SaveFigures Session::figures() const { return impl_->figures(); }
Status Session::Load(const std::string& path, const StateLayout& layout, const ReshardStorage& storage) {
  return impl_->Load(path, layout, storage);
}

}  // namespace shardplan::executor
