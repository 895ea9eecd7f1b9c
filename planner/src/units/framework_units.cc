// SPDX-License-Identifier: Apache-2.0
// The units that frameworks make. Each function follows the source that it names, in its order of calls.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "shardplan/planner/planner.h"

namespace shardplan {
namespace {

constexpr std::array<std::string_view, 3> kFrameworks = {"accelerate", "torchtitan", "peft"};
// peft.tuners: what fsdp_auto_wrap_policy wraps besides a model's layers.
constexpr std::array<std::string_view, 4> kPromptClasses = {"CartridgeEncoder", "PrefixEncoder",
                                                            "PromptEncoder", "PromptEmbedding"};

UnitRule UnitOf(const Module& module) { return {.modules = {module.fqn}}; }

class Units {
 public:
  Units(const Trace& trace, const Strategy& strategy) : trace_(trace), strategy_(strategy) {
    for (std::size_t m = 0; m < trace.modules.size(); ++m) {
      const Module& module = trace.modules[m];
      by_fqn_.emplace(module.fqn, &module);
      if (module.same_module_as.empty()) first_.push_back(&module);
    }
  }

  // accelerate's FullyShardedDataParallelPlugin with TRANSFORMER_BASED_WRAP, which is its default of a job on
  // transformers' models. FSDP2: utils/fsdp_utils.py, fsdp2_prepare_model. FSDP1: the classes in
  // _no_split_modules.
  // `asks`: the framework that is told which modules these are.
  Result<std::vector<UnitRule>> Accelerate(std::string_view asks, bool layers) const {
    if (Status told = CheckParts(asks); !told) return std::unexpected(told.error());
    std::vector<UnitRule> units;
    std::set<std::string> wrapped;
    if (layers) AddLayers("", units, wrapped);
    if (strategy_.policy == "fsdp1") return WithRoot(std::move(units));
    const Module* input = Part(ModulePart::kInputEmbeddings);
    const Module* output = Part(ModulePart::kOutputEmbeddings);
    const bool tied =
        input != nullptr && output != nullptr && Weight(*input) >= 0 && Weight(*input) == Weight(*output);
    if (!tied && input != nullptr && wrapped.insert(input->fqn).second) units.push_back(UnitOf(*input));
    UnitRule tail{.group = true, .reshard_after_forward = false};
    for (const Module* module : {FinalNorm(), tied ? input : nullptr, output}) {
      if (module != nullptr && wrapped.insert(module->fqn).second) tail.modules.push_back(module->fqn);
    }
    tail.group = tail.modules.size() > 1;
    if (!tail.modules.empty()) units.push_back(std::move(tail));
    if (Status nested = CheckNesting(asks, units); !nested) return std::unexpected(std::move(nested.error()));
    return WithRoot(std::move(units));
  }

  // torchtitan/distributed/fsdp.py, apply_fsdp_to_decoder; of transformers' models
  // experiments/transformers_modeling_backend, whose blocks come before the tail.
  Result<std::vector<UnitRule>> Torchtitan() const {
    const bool own = Find("tok_embeddings") != nullptr;
    const std::string base = own ? "" : "model.";
    const Module* embeddings = Find(own ? "tok_embeddings" : "model.embed_tokens");
    const Module* layers = Find(base + "layers");
    const Module* norm = Find(base + "norm");
    if (norm == nullptr && !own) norm = Find("model.final_layernorm");
    const Module* head = Find("lm_head");
    if (embeddings == nullptr || layers == nullptr) {
      return std::unexpected(
          Error{.code = ErrorCode::kBadInput,
                .message = "torchtitan wraps decoders alone",
                .pointer = "/modules",
                .found = trace_.modules.front().class_name,
                .expected = "tok_embeddings and layers, or model.embed_tokens and model.layers"});
    }
    std::vector<UnitRule> units;
    if (const Module* vision = Find("vision_encoder"); own && vision != nullptr)
      units.push_back(UnitOf(*vision));
    UnitRule tail{.group = true, .reshard_after_forward = false};
    const bool tied = head != nullptr && Weight(*embeddings) >= 0 && Weight(*embeddings) == Weight(*head);
    if (tied) tail.modules.push_back(embeddings->fqn);
    const bool both = norm != nullptr && head != nullptr;
    for (const Module* module : {norm, head}) {
      if (module != nullptr && (tied || both)) tail.modules.push_back(module->fqn);
    }
    if (!tied) units.push_back(UnitOf(*embeddings));
    const auto add_tail = [&] {
      if (!tail.modules.empty()) units.push_back(std::move(tail));
    };
    if (own || tied) add_tail();
    for (const std::string& child : layers->children) {
      if (const Module* block = Find(layers->fqn + "." + child)) units.push_back(UnitOf(*block));
    }
    if (!own && !tied) add_tail();
    return WithRoot(std::move(units));
  }

  // peft/utils/other.py, fsdp_auto_wrap_policy: an FSDP1 policy of the layers, prompt encoders and leaves
  // whose weight is trained. accelerate takes no policy of that kind under FSDP2: it wraps no layers then.
  Result<std::vector<UnitRule>> Peft() const {
    if (strategy_.policy != "fsdp1") return Accelerate("peft", false);
    if (Status told = CheckParts("peft"); !told) return std::unexpected(told.error());
    std::vector<UnitRule> units;
    for (const Module* module : first_) {
      if (module == &trace_.modules.front()) continue;
      const bool prompt = std::ranges::find(kPromptClasses, module->class_name) != kPromptClasses.end();
      const ParameterId weight = Weight(*module);
      const bool trained = module->children.empty() && weight >= 0 && trace_.parameters[weight].requires_grad;
      if (Is(*module, ModulePart::kLayer) || prompt || trained) units.push_back(UnitOf(*module));
    }
    return WithRoot(std::move(units));
  }

 private:
  static bool Is(const Module& module, ModulePart part) {
    return std::ranges::find(module.parts, part) != module.parts.end();
  }

  const Module* Find(const std::string& fqn) const {
    const auto found = by_fqn_.find(fqn);
    return found == by_fqn_.end() ? nullptr : found->second;
  }

  const Module* Part(ModulePart part) const {
    const auto found = std::ranges::find_if(first_, [&](const Module* module) { return Is(*module, part); });
    return found == first_.end() ? nullptr : *found;
  }

  // The parameter called weight; -1: none.
  static ParameterId Weight(const Module& module) {
    const auto found = std::ranges::find(module.parameters, "weight", &NamedParameter::name);
    return found == module.parameters.end() ? -1 : found->parameter;
  }

  Status CheckParts(std::string_view framework) const {
    if (std::ranges::any_of(first_, [](const Module* module) { return !module->parts.empty(); })) return {};
    return std::unexpected(Error{
        .code = ErrorCode::kBadInput,
        .message = fmt::format("{} asks the model which modules are its layers, and the trace does not say",
                               framework),
        .pointer = "/modules",
        .found = trace_.modules.front().class_name,
        .expected = "a trace of a transformers model by this release; of another model --unit class:NAME"});
  }

  // A module inside of one that is sharded cannot be sharded behind it: PyTorch takes the calls, and its
  // first forward or backward fails.
  Status CheckNesting(std::string_view framework, const std::vector<UnitRule>& units) const {
    std::vector<std::string> before;
    for (const UnitRule& unit : units) {
      for (const std::string& fqn : unit.modules) {
        for (const std::string& outer : before) {
          if (!fqn.starts_with(outer + ".")) continue;
          return std::unexpected(
              Error{.code = ErrorCode::kBadInput,
                    .message = fmt::format("PyTorch fails with the units that {} makes of this model: {} is "
                                           "sharded behind {}, which it is inside of",
                                           framework, fqn, outer),
                    .pointer = "/modules",
                    .found = trace_.modules.front().class_name,
                    .expected = "units of your own (--unit)"});
        }
        before.push_back(fqn);
      }
    }
    return {};
  }

  // From the bottom up, in order of registration.
  void AddLayers(const std::string& fqn, std::vector<UnitRule>& units, std::set<std::string>& wrapped) const {
    const Module* module = Find(fqn);
    if (module == nullptr || !module->same_module_as.empty()) return;
    for (const std::string& child : module->children)
      AddLayers(fqn.empty() ? child : fqn + "." + child, units, wrapped);
    if (fqn.empty() || !Is(*module, ModulePart::kLayer)) return;
    wrapped.insert(fqn);
    units.push_back(UnitOf(*module));
  }

  // The last child of the base model whose class is called a norm.
  const Module* FinalNorm() const {
    const Module* base = Part(ModulePart::kBaseModel);
    if (base == nullptr) return nullptr;
    const Module* norm = nullptr;
    for (const std::string& child : base->children) {
      const Module* module = Find(base->fqn.empty() ? child : base->fqn + "." + child);
      if (module != nullptr && module->class_name.find("Norm") != std::string::npos) norm = module;
    }
    if (norm != nullptr && !norm->same_module_as.empty()) norm = Find(norm->same_module_as);
    return norm;
  }

  std::vector<UnitRule> WithRoot(std::vector<UnitRule> units) const {
    units.push_back({.modules = {""}});
    return units;
  }

  const Trace& trace_;
  const Strategy& strategy_;
  std::map<std::string, const Module*> by_fqn_;
  std::vector<const Module*> first_;  // each once, in order
};

}  // namespace

std::span<const std::string_view> FrameworksWithUnits() { return kFrameworks; }

Result<std::vector<UnitRule>> UnitsOfFramework(std::string_view framework, const Trace& trace,
                                               const Strategy& strategy) {
  const Units units(trace, strategy);
  if (framework == "accelerate") return units.Accelerate("accelerate", true);
  if (framework == "peft") return units.Peft();
  if (framework == "torchtitan") {
    if (strategy.policy == "fsdp1")
      return std::unexpected(Error{.code = ErrorCode::kUsage,
                                   .message = "torchtitan has FSDP2 alone",
                                   .found = "--policy fsdp1",
                                   .expected = "fsdp2"});
    return units.Torchtitan();
  }
  return std::unexpected(Error{.code = ErrorCode::kUsage,
                               .message = "no framework of this name makes units",
                               .found = std::string(framework),
                               .expected = fmt::format("one of {}", fmt::join(kFrameworks, ", "))});
}

}  // namespace shardplan
