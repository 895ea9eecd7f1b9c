// SPDX-License-Identifier: Apache-2.0
// Tables of the vocabularies: instructions, buffer roles, optimizers.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/optimizers.h"
#include "tests/schemas/json_schema/page_tables.h"

namespace shardplan {
namespace {

constexpr std::array<std::string_view, 7> kOptionalNames = {
    "unit", "parameter", "microbatch", "reduce_op", "divisor", "safe_after", "parts"};

std::string Operands(const InstructionDescription& is) {
  std::vector<std::string> fields;
  const auto add = [&](bool has, std::string_view field) {
    if (has) fields.push_back(fmt::format("`{}`", field));
  };
  add(is.segment, "segment");
  add(Has(is.src), "src");
  add(Has(is.dst), "dst");
  add(is.event, "event");
  add(is.communicator, "communicator");
  add(is.exchange, "exchange");
  add(is.kind == InstructionKind::kOrthogonalize, "matrix");
  for (std::size_t f = 0; f < kOptionalNames.size(); ++f) {
    add(Has(is.optional, static_cast<OptionalField>(f)), kOptionalNames[f]);
  }
  add(is.place != Place::kHost, "stream");
  return fmt::format("{}", fmt::join(fields, ", "));
}

std::string_view Words(Place place) {
  switch (place) {
    case Place::kHost:
      return "host";
    case Place::kStream:
      return "stream";
    case Place::kStreamOrHost:
      return "stream, or host";
  }
  return "";
}

// The words of a column, in the order of its enumerators.
template <typename Enum, std::size_t size>
std::string_view Word(Enum value, const std::array<std::string_view, size>& words) {
  const auto index = static_cast<std::size_t>(value);
  return index < size ? words[index] : "?";
}

constexpr std::array<std::string_view, 5> kLifetimeEffects = {"", "`dst` begins", "`src` ends",
                                                              "`dst` may be a view", "gradients end"};
constexpr std::array<std::string_view, 5> kOrderEffects = {"", "its stream records", "its stream waits",
                                                           "the host waits", "ranks meet"};
constexpr std::array<std::string_view, 7> kValueEffects = {
    "", "unshards", "reduces", "zeros", "the same numbers", "the model's", "the optimizer's"};
constexpr std::array<std::string_view, 6> kMovements = {"",
                                                        "a shard to its slot",
                                                        "slots to whole",
                                                        "whole to the smaller mesh's shard",
                                                        "whole to slots",
                                                        "as it lies"};

constexpr std::array<std::string_view, 7> kContents = {
    "parameters", "gradients", "optimizer", "updates", "activations", "what ranks compare", "module buffers"};
constexpr std::array<std::string_view, 4> kArrangements = {"", "shard", "slots", "whole"};
constexpr std::array<std::string_view, 10> kRoleDTypes = {"any",
                                                          "original",
                                                          "gathered",
                                                          "gathered, or original",
                                                          "as made",
                                                          "accumulated",
                                                          "reduced",
                                                          "reduced, or sharded gradient",
                                                          "sharded gradient, or reduced",
                                                          "sharded gradient"};
constexpr std::array<std::string_view, 3> kMemories = {"device", "host", "device or host"};
constexpr std::array<std::string_view, 8> kLifetimes = {
    "between instructions", "while unsharded",   "backward",          "until a later micro-batch reduces it",
    "between passes",       "an optimizer step", "from step to step", "as long as the model"};
constexpr std::array<std::string_view, 6> kReductions = {
    "", "no", "laid out for it", "over inner ranks", "over shards, not over replicas", "yes"};

constexpr std::array<std::string_view, 5> kStateShapes = {"one number", "the parameter's", "a matrix's rows",
                                                          "a matrix's columns",
                                                          "the parameter's, of no matrix"};
constexpr std::array<std::string_view, 3> kStateDTypes = {"float32", "the parameter's", "the gradient's"};
constexpr std::array<std::string_view, 3> kStatePlaces = {"the shard's", "host",
                                                          "host; the shard's if fused or capturable"};

std::string Code(std::string_view word) { return word.empty() ? "" : fmt::format("`{}`", word); }

std::string PassesText(const OptimizerPasses& passes) {
  if (passes.read == 0) return "";
  const std::string each =
      passes.kernels_by_tensor > 0 ? fmt::format(" + {} a tensor", passes.kernels_by_tensor) : "";
  return fmt::format("{} / {} / {}{}", passes.read, passes.written, passes.kernels, each);
}

}  // namespace

std::string WithInstructionTable(std::string_view page) {
  std::string table = "| kind | where | operands | what it does |\n|---|---|---|---|\n";
  for (const InstructionDescription& is : kInstructionSet) {
    table += fmt::format("| `{}` | {} | {} | {} |\n", is.name, Words(is.place), Operands(is), is.says);
  }
  return WithTable(page, "| kind | where |", table);
}

std::string WithEffectTable(std::string_view page) {
  std::string table =
      "| kind | lifetimes | order | values | moves | PyTorch's operator |\n|---|---|---|---|---|---|\n";
  for (const InstructionDescription& is : kInstructionSet) {
    table += fmt::format("| `{}` | {} | {} | {} | {} | {} |\n", is.name, Word(is.lifetime, kLifetimeEffects),
                         Word(is.order, kOrderEffects), Word(is.value, kValueEffects),
                         Word(is.movement, kMovements), Code(is.op));
  }
  return WithTable(page, "| kind | lifetimes |", table);
}

std::string WithRoleTable(std::string_view page) {
  std::string table =
      "| role | holds | arrangement | dtype | memory | lifetime | reduced | in PyTorch "
      "|\n|---|---|---|---|---|---|---|---|\n";
  for (const BufferRoleDescription& is : kBufferRoleTable) {
    table += fmt::format("| `{}` | {} | {} | {} | {} | {} | {} | {} |\n", is.name, Word(is.holds, kContents),
                         Word(is.arrangement, kArrangements), Word(is.dtype, kRoleDTypes),
                         Word(is.memory, kMemories), Word(is.lifetime, kLifetimes),
                         Word(is.reduction, kReductions), is.pytorch);
  }
  return WithTable(page, "| role | holds |", table);
}

std::string WithOptimizerTable(std::string_view page) {
  std::string table =
      "| kind | class | by default | arguments | passes, fused | passes, foreach or a loop | FLOPs an "
      "element |\n"
      "|---|---|---|---|---|---|---|\n";
  for (const OptimizerDescription& is : kOptimizers) {
    if (is.kind == OptimizerKind::kNone) continue;
    std::vector<std::string> arguments;
    for (const OptimizerArgument& argument : optimizers::kArguments) {
      if (Has(argument.takes, is.kind)) arguments.push_back(Code(argument.name));
    }
    table += fmt::format("| `{}` | {} | {} | {} | {} | {} | {} |\n", is.name, is.pytorch,
                         optimizers::kImplementations[static_cast<std::size_t>(is.by_default)].flag,
                         fmt::join(arguments, ", "), is.has_fused ? PassesText(is.fused) : "none",
                         PassesText(is.unfused), is.flops_per_element);
  }
  return WithTable(page, "| kind | class |", table);
}

std::string WithStateTable(std::string_view page) {
  std::string table = "| optimizer | state | shape | dtype | memory | when |\n|---|---|---|---|---|---|\n";
  for (const OptimizerStateDescription& state : optimizers::kStates) {
    std::string when;
    for (const OptimizerArgument& argument : optimizers::kArguments) {
      if (argument.argument == state.when) when = Code(argument.name);
    }
    table += fmt::format("| `{}` | `{}` | {} | {} | {} | {} |\n", DescriptionOf(state.kind).name, state.name,
                         Word(state.shape, kStateShapes), Word(state.dtype, kStateDTypes),
                         Word(state.place, kStatePlaces), when.empty() ? "always" : when);
  }
  return WithTable(page, "| optimizer | state |", table);
}

}  // namespace shardplan
