#include <fmt/format.h>

#include <unordered_set>

#include "documents/document_json.h"
#include "documents/trace_fields.h"
#include "json/json_writer.h"
#include "shardplan/schemas/io.h"

namespace shardplan {
namespace {

// What the field lists cannot say: storages that are used are born somewhere, names are unique, positions
// fit.
class TraceCheck {
 public:
  explicit TraceCheck(const Trace& trace) : trace_(trace) {}

  Status Run() {
    if (trace_.modules.empty())
      return MakeInputError("/modules", "there is no module", "an empty list", "the root");
    if (Status status = UniqueNames(); !status) return status;
    CollectStorages();
    const auto check_passes = [&](const std::vector<Pass>& passes, std::string_view list) -> Status {
      for (std::size_t i = 0; i < passes.size(); ++i) {
        if (Status status = CheckPass(passes[i], fmt::format("/{}/{}", list, i)); !status) return status;
      }
      return {};
    };
    if (Status status = check_passes(trace_.forwards, "forwards"); !status) return status;
    return check_passes(trace_.backwards, "backwards");
  }

 private:
  Status UniqueNames() const {
    std::unordered_set<std::string_view> modules;
    for (std::size_t i = 0; i < trace_.modules.size(); ++i) {
      if (modules.insert(trace_.modules[i].fqn).second) continue;
      return MakeInputError(fmt::format("/modules/{}/fqn", i), "another module has the same name",
                            trace_.modules[i].fqn, "a new name");
    }
    std::unordered_set<std::string_view> parameters;
    for (std::size_t i = 0; i < trace_.parameters.size(); ++i) {
      if (parameters.insert(trace_.parameters[i].fqn).second) continue;
      return MakeInputError(fmt::format("/parameters/{}/fqn", i), "another parameter has the same name",
                            trace_.parameters[i].fqn, "a new name");
    }
    return {};
  }

  void CollectStorages() {
    for (const TraceInput& input : trace_.inputs) storages_.insert(input.storage);
    for (const ModuleBuffer& buffer : trace_.buffers) storages_.insert(buffer.storage);
    for (const auto* passes : {&trace_.forwards, &trace_.backwards}) {
      for (const Pass& pass : *passes) {
        for (const TraceEvent& event : pass.events) {
          if (const auto* allocate = std::get_if<AllocateEvent>(&event)) storages_.insert(allocate->storage);
        }
      }
    }
    storages_.insert(-1);
  }

  Status CheckPass(const Pass& pass, const std::string& pointer) const {
    for (std::size_t i = 0; i < pass.tensors.size(); ++i) {
      if (storages_.contains(pass.tensors[i].storage)) continue;
      return Unborn(fmt::format("{}/tensors/{}/storage", pointer, i), pass.tensors[i].storage);
    }
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      const auto at = [&](std::string_view rest) { return fmt::format("{}/events/{}{}", pointer, i, rest); };
      Status status;
      if (const auto* op = std::get_if<OperatorEvent>(&pass.events[i])) {
        status = CheckStorages(op->reads, at("/8"));
        if (status) status = CheckStorages(op->writes, at("/9"));
      } else if (const auto* free = std::get_if<FreeEvent>(&pass.events[i])) {
        if (!storages_.contains(free->storage)) status = Unborn(at("/1"), free->storage);
      } else if (const auto* ready = std::get_if<OutputGradReadyEvent>(&pass.events[i])) {
        status = CheckForward(ready->forward, pass, at("/4"));
      } else if (const auto* done = std::get_if<InputsGradDoneEvent>(&pass.events[i])) {
        status = CheckForward(done->forward, pass, at("/3"));
      } else if (const auto* grad = std::get_if<ParameterGradEvent>(&pass.events[i])) {
        if (!storages_.contains(grad->storage)) status = Unborn(at("/2"), grad->storage);
      }
      if (!status) return status;
    }
    return {};
  }

  Status CheckStorages(const std::vector<StorageId>& ids, const std::string& pointer) const {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (!storages_.contains(ids[i])) return Unborn(fmt::format("{}/{}", pointer, i), ids[i]);
    }
    return {};
  }
  static Status CheckForward(std::int32_t forward, const Pass& pass, const std::string& pointer) {
    if (forward < static_cast<std::int32_t>(pass.forwards.size())) return {};
    return MakeInputError(pointer, "not one of the forwards that this backward covers",
                          fmt::format("{}", forward), fmt::format("less than {}", pass.forwards.size()));
  }
  static std::unexpected<Error> Unborn(const std::string& pointer, StorageId storage) {
    return MakeInputError(pointer, "this storage is never born, and belongs to no input or buffer",
                          fmt::format("{}", storage), "a storage of a \"+\" event, an input or a buffer");
  }

  const Trace& trace_;
  std::unordered_set<StorageId> storages_;
};

}  // namespace

Result<Trace> TraceFromTape(const JsonTape& tape) {
  Result<Trace> trace = ReadDocumentAs<Trace>(tape, kTraceSchema);
  if (!trace.has_value()) return trace;
  if (Status status = TraceCheck(*trace).Run(); !status) return std::unexpected(status.error());
  return trace;
}

std::string ToJson(const Trace& trace) {
  JsonWriter writer;
  writer.WriteDocument(kTraceSchema, trace);
  return writer.Take();
}

}  // namespace shardplan
