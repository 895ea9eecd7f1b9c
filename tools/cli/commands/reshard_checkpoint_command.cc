// SPDX-License-Identifier: Apache-2.0
// `reshard-checkpoint`: a checkpoint's files in another layout, format or number of ranks.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "commands/commands.h"
#include "flags/file_flag.h"
#include "flags/flag_group.h"
#include "flags/mesh_flag.h"
#include "shardplan/checkpoints/checkpoint.h"
#include "shardplan/checkpoints/reshard.h"
#include "state_layouts.h"
#include "support.h"
#include "terminal.h"

namespace shardplan::cli {
namespace {

struct RewriteArguments {
  std::string source, target, format, layout, layout_file, select, strip;
  std::optional<std::int64_t> world_size;
  std::vector<std::string> mesh, units;
  std::uint64_t budget = kUsualReshardBudget;
  bool lenient = false, tensors_only = false, verify = false, quiet = false;
};

// The format that a name with that ending stands for.
std::optional<CheckpointFormat> FormatByName(std::string_view target) {
  if (target.ends_with(".safetensors")) return CheckpointFormat::kSafetensors;
  if (target.ends_with(".pt") || target.ends_with(".pth")) return CheckpointFormat::kTorchSave;
  return std::nullopt;
}

constexpr std::string_view FormatName(CheckpointFormat format) {
  switch (format) {
    case CheckpointFormat::kSafetensors:
      return "safetensors";
    case CheckpointFormat::kTorchSave:
      return "torch_save";
    default:
      return "distributed";
  }
}

// The names that begin with a prefix, and without another.
void Select(const RewriteArguments& options, Checkpoint& checkpoint) {
  const auto other = [&](const auto& named) { return !named.name.starts_with(options.select); };
  std::erase_if(checkpoint.tensors, other);
  std::erase_if(checkpoint.objects, other);
  if (options.strip.empty()) return;
  std::map<std::string, std::vector<CheckpointKey>> keys;
  const auto strip = [&](auto& named) {
    const auto found = checkpoint.keys.find(named.name);
    std::vector<CheckpointKey> of =
        found == checkpoint.keys.end() ? std::vector<CheckpointKey>{} : found->second;
    if (named.name.starts_with(options.strip)) {
      named.name.erase(0, options.strip.size());
      // Keys that lie wholly within the prefix go.
      std::size_t gone = 0;
      std::size_t count = 0;
      while (count < of.size() && gone + of[count].text.size() + 1 <= options.strip.size())
        gone += of[count++].text.size() + 1;
      of.erase(of.begin(),
               gone == options.strip.size() ? of.begin() + static_cast<std::ptrdiff_t>(count) : of.end());
    }
    if (!of.empty()) keys.emplace(named.name, std::move(of));
  };
  for (CheckpointTensor& tensor : checkpoint.tensors) strip(tensor);
  for (CheckpointObject& object : checkpoint.objects) strip(object);
  checkpoint.keys = std::move(keys);
}

// --world-size, --mesh: all ranks shard unless dimensions are given.
Result<std::vector<StrategyMeshDim>> MeshOf(const RewriteArguments& options) {
  Result<std::vector<StrategyMeshDim>> mesh = ParseMesh(options.mesh);
  if (!mesh) return mesh;
  if (mesh->empty()) mesh->push_back({"shard", options.world_size.value_or(1)});
  std::int64_t ranks = 1;
  for (const StrategyMeshDim& dim : *mesh) {
    if (dim.name != "shard" && dim.name != "replicate")
      return BadFlag("--mesh", dim.name, "dimensions shard and replicate (others: --target-layout)");
    if (dim.size > kMostLayoutRanks / ranks)
      return BadFlag("--mesh", fmt::format("{}", dim.size),
                     fmt::format("at most {} ranks", kMostLayoutRanks));
    ranks *= dim.size;
  }
  if (options.world_size && *options.world_size != ranks)
    return BadFlag("--world-size", fmt::format("{}", *options.world_size),
                   fmt::format("{}, the ranks of the mesh", ranks));
  return mesh;
}

Result<StateLayout> MakeLayout(const RewriteArguments& options, const Checkpoint& checkpoint,
                               CheckpointFormat format) {
  if (!options.layout_file.empty()) {
    const Result<StateLayout> given = ReadLayout(options.layout_file);
    if (!given) return given;
    Result<StateLayout> layout = LayoutForCheckpoint(checkpoint, *given, options.lenient);
    if (!layout) layout.error().file = options.layout_file;
    return layout;
  }
  Result<std::vector<StrategyMeshDim>> mesh = MeshOf(options);
  if (!mesh) return std::unexpected(mesh.error());
  CheckpointLayoutOptions how{.mesh = std::move(*mesh), .units = options.units};
  const bool distributed = format == CheckpointFormat::kDistributed;
  if (options.layout == "whole" || (options.layout.empty() && !distributed)) {
    how.layout = CheckpointLayout::kWhole;
  } else if (!distributed) {
    return BadFlag("--layout", options.layout,
                   fmt::format("whole: {} files hold whole tensors", FormatName(format)));
  } else if (options.layout == "flat") {
    how.layout = CheckpointLayout::kFlat;
  }
  Result<StateLayout> layout = LayoutOfCheckpoint(checkpoint, how);
  if (!layout) layout.error().file = options.source;
  return layout;
}

Status RunRewrite(const RewriteArguments& options) {
  Result<Checkpoint> checkpoint = ReadCheckpoint(options.source);
  if (!checkpoint) return std::unexpected(checkpoint.error());
  Select(options, *checkpoint);
  CheckpointRewrite how{.format = FormatByName(options.target).value_or(checkpoint->format),
                        .tensors_only = options.tensors_only,
                        .verify = options.verify,
                        .budget_bytes = static_cast<std::int64_t>(options.budget)};
  for (const CheckpointFormat format :
       {CheckpointFormat::kDistributed, CheckpointFormat::kSafetensors, CheckpointFormat::kTorchSave}) {
    if (options.format == FormatName(format)) how.format = format;
  }
  Result<StateLayout> layout = MakeLayout(options, *checkpoint, how.format);
  if (!layout) return std::unexpected(layout.error());
  how.layout = std::move(*layout);
  auto bar = std::make_shared<ProgressBar>(options.quiet, "reshard-checkpoint", "MiB");
  how.progress = [bar](std::int64_t done, std::int64_t total) { bar->Update(done >> 20, total >> 20); };
  const Result<CheckpointRewritten> done = RewriteCheckpoint(*checkpoint, options.target, how);
  how.progress = nullptr;
  bar.reset();
  if (!done) return std::unexpected(done.error());
  std::string text = fmt::format("{}: {}, {} tensors, {} other values, {} bytes in {} file{}\n",
                                 options.target, FormatName(how.format), checkpoint->tensors.size(),
                                 how.tensors_only ? 0 : checkpoint->objects.size(), done->bytes, done->files,
                                 done->files == 1 ? "" : "s");
  if (done->was_there) {
    text += "it was there already\n";
  } else if (done->kept_bytes > 0) {
    text += fmt::format("{} bytes were there from a run that was ended\n", done->kept_bytes);
  }
  return PrintText(text);
}

}  // namespace

void AddReshardCheckpointCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "reshard-checkpoint", "Rewrite a checkpoint's files for another number of ranks, layout or format");
  command->footer(
      "Examples: shardplan reshard-checkpoint step_1000 step_1000_6 --world-size 6\n"
      "          shardplan reshard-checkpoint step_1000 hsdp --mesh replicate=2 shard=4\n"
      "          shardplan reshard-checkpoint step_1000 hf --format safetensors --select model. --strip "
      "model.\n"
      "A run that is ended goes on when it is called again. docs/guide/checkpoints.md has the formats.");
  auto options = std::make_shared<RewriteArguments>();
  command
      ->add_option(
          "SOURCE", options->source,
          "A folder of torch.distributed.checkpoint or safetensors, or a file of torch.save or safetensors")
      ->required();
  command->add_option("TARGET", options->target, "The new checkpoint: whole or absent")->required();
  command->add_option("--world-size", options->world_size, "Ranks; files of safetensors")
      ->check(CLI::Range(std::int64_t{1}, kMostLayoutRanks));
  command->add_option(
      "--mesh", options->mesh,
      "Mesh dimensions, outermost first: --mesh replicate=2 shard=4 (default: all ranks shard)");
  command
      ->add_option("--layout", options->layout,
                   "per_parameter (rows, as FSDP2; the default), flat (as FSDP1's flat parameters) or whole")
      ->check(CLI::IsMember({"per_parameter", "flat", "whole"}));
  command->add_option("--unit", options->units,
                      "--layout flat: modules whose parameters lie together (layers.*)");
  AddFile(*command, "--target-layout", options->layout_file,
          "The layout, of a document or of a plan, in place of --mesh and --layout");
  command
      ->add_option("--format", options->format,
                   "distributed, safetensors or torch_save (default: by TARGET's name, else as SOURCE)")
      ->check(CLI::IsMember({"distributed", "safetensors", "torch_save"}));
  command->add_option("--select", options->select, "Only what has names that begin so (model.)");
  command->add_option("--strip", options->strip, "Names lose this begin");
  command->add_option("--budget", options->budget, "Memory for tensors' bytes (\"256MiB\", the default)")
      ->transform(CLI::AsSizeValue(false));
  command->add_flag("--tensors-only", options->tensors_only, "Leave out what is no tensor");
  command->add_flag("--lenient", options->lenient, "What --target-layout lacks is whole on all ranks");
  command->add_flag("--verify", options->verify, "Read all that was written, and compare its checksums");
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  command->callback([options, &invocation] {
    const Status status = RunRewrite(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli
