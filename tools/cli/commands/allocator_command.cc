// SPDX-License-Identifier: Apache-2.0
// `allocator-replay`: a recorded log of the CUDA caching allocator against the model.
#include <fmt/format.h>

#include <optional>

#include "commands/commands.h"
#include "flags/file_flag.h"
#include "shardplan/schemas/error.h"
#include "shardplan/simulator/allocator_replay.h"
#include "support.h"

namespace shardplan::cli {
namespace {

struct AllocatorArguments {
  std::string log;
  std::string report;
  // Over the settings of the log; text as in PYTORCH_ALLOC_CONF.
  std::vector<std::string> alloc_conf;
  std::optional<bool> expandable_segments;
  std::optional<std::string> max_split_size_mb, max_non_split_rounding_mb, large_segment_size_mb;
  std::optional<std::string> garbage_collection_threshold, roundup_power2_divisions, memory_fraction;
  std::optional<std::int64_t> device_bytes;
  std::optional<std::string> pytorch;
};

Status ApplyOptions(const AllocatorArguments& options, AllocatorLog& log) {
  if (options.device_bytes) log.device_bytes = Bytes{*options.device_bytes};
  if (options.pytorch) {
    if (Status set = SetRelease(*options.pytorch, log.settings); !set) return set;
  }
  std::vector<std::string> settings = options.alloc_conf;
  auto add = [&](const char* key, const std::optional<std::string>& value) {
    if (value) settings.push_back(fmt::format("{}:{}", key, *value));
  };
  if (options.expandable_segments) {
    settings.push_back(*options.expandable_segments ? "expandable_segments:True"
                                                    : "expandable_segments:False");
  }
  add("large_segment_size_mb", options.large_segment_size_mb);
  add("max_split_size_mb", options.max_split_size_mb);
  add("max_non_split_rounding_mb", options.max_non_split_rounding_mb);
  add("garbage_collection_threshold", options.garbage_collection_threshold);
  add("roundup_power2_divisions", options.roundup_power2_divisions);
  add("per_process_memory_fraction", options.memory_fraction);
  for (const std::string& text : settings) {
    if (Status applied = ParseAllocatorSettings(text, log.device_bytes, log.settings); !applied)
      return applied;
  }
  return {};
}

Result<bool> RunAllocatorReplay(const AllocatorArguments& options) {
  const std::vector<OutputFile> outputs = {{"--json", options.report}};
  if (Status checked = CheckOutputs({options.log}, outputs, !HasStandardOutput(outputs)); !checked)
    return std::unexpected(checked.error());
  Result<AllocatorLog> log = ReadAllocatorLog(options.log);
  if (!log) return std::unexpected(log.error());
  if (Status applied = ApplyOptions(options, *log); !applied) return std::unexpected(applied.error());
  Result<AllocatorReplay> replay = ReplayAllocatorLog(*log);
  if (!replay) {
    replay.error().file = options.log;
    return std::unexpected(replay.error());
  }
  if (options.report != "-") {
    if (Status written = PrintText(ReplayText(*log, *replay)); !written)
      return std::unexpected(written.error());
  }
  if (!options.report.empty()) {
    if (Status written = WriteOutput(options.report, ReplayJson(*log, *replay)); !written) {
      return std::unexpected(written.error());
    }
  }
  return !replay->departure;
}

}  // namespace

void AddAllocatorReplayCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "allocator-replay",
      "Replay a recorded log of the CUDA caching allocator through the model; say where it first departs");
  command->footer(
      "Examples: shardplan allocator-replay cuda_allocator_trace.json\n"
      "          shardplan allocator-replay log.json --max-split-size-mb 128 --json -\n"
      "Exit code: 0 when every action is reproduced, 1 when one is not.");
  auto options = std::make_shared<AllocatorArguments>();
  command->add_option("FILE", options->log, "The log (docs/internals/allocator.md)")->required();
  AddFile(*command, "--json", options->report,
          "Write the result as JSON (-: to standard output, instead of text)");
  const std::string group = "Allocator settings (over those of the log)";
  auto add = [&](const std::string& name, auto& value, const std::string& help) {
    command->add_option(name, value, help)->group(group);
  };
  add("--alloc-conf", options->alloc_conf, "As PYTORCH_ALLOC_CONF: expandable_segments:True,...");
  add("--expandable-segments", options->expandable_segments, "true or false");
  add("--max-split-size-mb", options->max_split_size_mb, "Blocks of this size and larger are not split");
  add("--max-non-split-rounding-mb", options->max_non_split_rounding_mb,
      "How much too large an unsplit block may be");
  add("--large-segment-size-mb", options->large_segment_size_mb, "Segment of requests from 1 to 10 MiB");
  add("--garbage-collection-threshold", options->garbage_collection_threshold,
      "Collect cached segments above this part of the allowed memory");
  add("--roundup-power2-divisions", options->roundup_power2_divisions, "A power of 2, or [256:1,512:2,>:8]");
  add("--memory-fraction", options->memory_fraction,
      "As set_per_process_memory_fraction; needs the device's size");
  add("--pytorch", options->pytorch,
      "Release whose allocator wrote the log, where it does not say: 2.11 or 2.15");
  add("--device-bytes", options->device_bytes, "Memory of the device, where the log does not say");
  command->callback([options, &invocation] {
    const Result<bool> reproduced = RunAllocatorReplay(*options);
    if (!reproduced) {
      invocation.exit_code = Fail(reproduced.error());
    } else if (!*reproduced) {
      invocation.exit_code = ExitCode(ErrorCode::kNegative);
    }
  });
}

}  // namespace shardplan::cli
