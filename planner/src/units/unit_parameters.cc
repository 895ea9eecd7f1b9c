// SPDX-License-Identifier: Apache-2.0
#include "units/unit_parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/precision.h"
#include "units/layout.h"

namespace shardplan {

bool MatchesAny(const std::vector<std::string>& patterns, const std::string& fqn,
                const std::vector<std::string>& shared_with) {
  return std::ranges::any_of(patterns, [&](const std::string& pattern) {
    return Matches(pattern, fqn) ||
           std::ranges::any_of(shared_with, [&](const std::string& name) { return Matches(pattern, name); });
  });
}

namespace {

template <typename Rule>
const Rule* FirstMatch(const std::vector<Rule>& rules, const UnitParameter& parameter) {
  const auto found = std::ranges::find_if(rules, [&](const Rule& rule) {
    return MatchesAny(rule.parameters, parameter.fqn, parameter.shared_with);
  });
  return found == rules.end() ? nullptr : &*found;
}

class ParameterKnobs {
 public:
  ParameterKnobs(const Strategy& strategy, const Mesh& mesh, std::string_view pointer, UnitChoice& choice)
      : strategy_(strategy), mesh_(mesh), pointer_(pointer), choice_(choice), unit_(choice.unit) {}

  Status Run() {
    for (UnitParameter& parameter : unit_.parameters) {
      if (parameter.shape.empty()) {
        return Bad("a scalar parameter cannot be sharded; make its shape [1]", parameter.fqn);
      }
      if (Status s = SetShardDim(parameter); !s) return s;
      SetMuon(parameter);
      if (Status s = CheckPlacements(parameter); !s) return s;
    }
    if (Status s = SetDTypes(); !s) return s;
    for (UnitParameter& parameter : unit_.parameters) {
      if (Status s = SetExtension(parameter); !s) return s;
    }
    return CheckPostForward();
  }

 private:
  Status Bad(std::string message, std::string found, std::string expected = {}) const {
    return MakeInputError(pointer_, std::move(message), std::move(found), std::move(expected));
  }

  void SetMuon(UnitParameter& parameter) const {
    parameter.muon =
        parameter.requires_grad && MuonSteps(strategy_.optimizer, parameter.fqn, parameter.shared_with);
  }

  Status SetShardDim(UnitParameter& parameter) const {
    const ShardDimRule* rule = FirstMatch(strategy_.fsdp2.shard_dims, parameter);
    if (rule == nullptr) return {};
    const auto dims = static_cast<std::int32_t>(parameter.shape.size());
    parameter.shard_dim = rule->dim < 0 ? rule->dim + dims : rule->dim;
    if (parameter.shard_dim < 0 || parameter.shard_dim >= dims) {
      return Bad(fmt::format("{} does not have the dimension to shard", parameter.fqn),
                 fmt::format("{}", rule->dim), fmt::format("a dimension of {}", dims));
    }
    const std::int64_t rows = parameter.shape[parameter.shard_dim];
    if (parameter.shard_dim == 0 || rows % choice_.shard_size == 0) return {};
    return Bad(
        fmt::format("{} is sharded on dimension {}, which has to divide evenly (only dimension 0 may be "
                    "uneven)",
                    parameter.fqn, parameter.shard_dim),
        fmt::format("{} rows", rows), fmt::format("a multiple of {} ranks", choice_.shard_size));
  }

  // A DTensor of tensor or expert parallelism: FSDP shards what the rank has of it.
  Status CheckPlacements(const UnitParameter& parameter) const {
    for (const ParameterPlacement& placement : parameter.placements) {
      if (placement.size == 1) continue;  // one rank: no mesh needs to have it
      const std::vector<std::string> over = mesh_.Over(placement.mesh_dim);
      const auto own = [&](const std::vector<std::string>& dims) {
        return std::ranges::find_first_of(dims, over) != dims.end();
      };
      if ((placement.dim >= 0 || over.size() > 1) &&
          (own(choice_.data_parallel.shard) || own(choice_.data_parallel.replicate))) {
        return Bad(fmt::format("{} is cut along a mesh dimension that FSDP itself works on", parameter.fqn),
                   placement.mesh_dim, "replicated there");
      }
      const std::int64_t size = RanksOf(mesh_.Flatten(over));
      if (over.empty() || size != placement.size) {
        return MakeInputError(
            "/mesh", fmt::format("{} is placed over a dimension that the mesh does not have", parameter.fqn),
            over.empty() ? "none" : fmt::format("{} of size {}", placement.mesh_dim, size),
            fmt::format("{} of size {}", placement.mesh_dim, placement.size));
      }
    }
    return {};
  }

  // Before grad_dtypes_are_kept the sharded parameter has none of its own. Without a reduce dtype gradients
  // wait in their own grad_dtype, and are reduced in what these promote to. One whose grad_dtype is None
  // stays as autograd makes it until then, and as it was reduced after.
  Status SetGradDTypes(const PyTorchRules& rules) const {
    const MixedPrecision& mixed = choice_.mixed_precision;
    for (UnitParameter& parameter : unit_.parameters) {
      if (!parameter.requires_grad || !rules.grad_dtypes_are_kept) parameter.grad_dtype.reset();
      if (parameter.grad_dtype == parameter.dtype) parameter.grad_dtype.reset();
    }
    const auto is_any = [&](std::size_t p) {
      return rules.grad_dtypes_are_kept && unit_.parameters[p].requires_grad && choice_.any_grad_dtype[p];
    };
    const auto made = [&](std::size_t p) {
      return choice_.made_grad_dtypes[p].value_or(ComputeDType(unit_, unit_.parameters[p]));
    };
    const auto waits_in = [&](std::size_t p) {
      return is_any(p) ? made(p) : ShardedGradDType(unit_.parameters[p]);
    };
    std::optional<DType> promoted;
    for (std::size_t p = 0; p < unit_.parameters.size(); ++p) {
      if (!unit_.parameters[p].requires_grad) continue;
      const bool stays_as_made = is_any(p) && !mixed.reduce_dtype;
      if (stays_as_made && !choice_.operators_are_known) {
        return Bad(
            "the grad_dtype of a parameter is None: its gradients stay as autograd makes them, which the "
            "order of modules does not say",
            unit_.parameters[p].fqn,
            "a reduce_dtype, a grad_dtype, or a trace with operators (shardplan trace)");
      }
      if (stays_as_made && mixed.param_dtype.value_or(choice_.recorded_dtype) != choice_.recorded_dtype) {
        return Bad(
            "the grad_dtype of a parameter is None: its gradients stay as autograd makes them, which a trace "
            "that was recorded in another dtype does not say",
            fmt::format("{}, recorded in {}, planned in {}", unit_.parameters[p].fqn,
                        Name(choice_.recorded_dtype), Name(*mixed.param_dtype)),
            "a reduce_dtype, a grad_dtype, or a trace of this dtype (shardplan trace --dtype)");
      }
      promoted = promoted ? PromoteTypes(*promoted, waits_in(p)) : waits_in(p);
    }
    unit_.reduce_dtype =
        AskedReduceDType(mixed, promoted.value_or(unit_.orig_dtype), unit_.param_dtype, rules);
    for (std::size_t p = 0; p < unit_.parameters.size(); ++p) {
      UnitParameter& parameter = unit_.parameters[p];
      if (!parameter.requires_grad) continue;
      const bool any = is_any(p);
      if (!mixed.reduce_dtype && rules.gradients_keep_their_dtype) {
        const DType waits = waits_in(p);
        if (waits != unit_.reduce_dtype) parameter.accumulated_grad_dtype = waits;
      }
      if (any && unit_.reduce_dtype != parameter.dtype) parameter.grad_dtype = unit_.reduce_dtype;
      SetMadeGradDType(rules, made(p), any && !mixed.reduce_dtype, parameter);
    }
    return {};
  }

  // `made`: by autograd, unconverted. See [Note: dtypes of a gradient].
  void SetMadeGradDType(const PyTorchRules& rules, DType made, bool any, UnitParameter& parameter) const {
    if (!rules.gradients_stay_as_made) return;
    const DType computed = ComputeDType(unit_, parameter);
    const bool stays = any || KeepsWiderGrads(unit_, parameter);
    const DType accumulated = AccumulatedGradDType(unit_, parameter);
    const bool widens =
        MayReduceOutsideDataParallel(parameter) && SizeBytes(accumulated) > SizeBytes(computed);
    const DType left = stays ? made : widens ? accumulated : computed;
    if (left != computed) parameter.made_grad_dtype = left;
  }

  // Gradients of all trainable parameters are reduced in one buffer, so these have one original dtype; frozen
  // ones may have others (_init_mp_dtypes).
  Status SetDTypes() const {
    const MixedPrecision& mixed = choice_.mixed_precision;
    const UnitParameter* trainable = nullptr;
    for (const UnitParameter& parameter : unit_.parameters) {
      if (!parameter.requires_grad) continue;
      if (trainable == nullptr) trainable = &parameter;
      if (parameter.dtype == trainable->dtype) continue;
      return Bad("the trainable parameters of a unit need one original dtype",
                 fmt::format("{} is {}", parameter.fqn, Name(parameter.dtype)),
                 fmt::format("{}, as {}", Name(trainable->dtype), trainable->fqn));
    }
    if (trainable == nullptr && !unit_.parameters.empty()) trainable = &unit_.parameters.front();
    if (trainable != nullptr) unit_.orig_dtype = trainable->dtype;
    unit_.param_dtype = mixed.param_dtype.value_or(unit_.orig_dtype);
    const PyTorchRules rules = RulesOf(strategy_);
    for (UnitParameter& parameter : unit_.parameters) {
      const DType dtype = AskedParamDType(mixed, parameter, rules);
      if (dtype != unit_.param_dtype) parameter.param_dtype = dtype;
    }
    return SetGradDTypes(rules);
  }

  static ExtensionBuffer Resolve(const ExtensionTensor& tensor, std::int64_t numel) {
    return {tensor.dtype, tensor.numel.value_or((numel + tensor.per_elements - 1) / tensor.per_elements)};
  }

  Status SetExtension(UnitParameter& parameter) const {
    const ExtensionRule* rule = FirstMatch(strategy_.fsdp2.extensions, parameter);
    if (rule == nullptr) return {};
    if (rule->gathered.empty()) return Bad("an extension gathers something", parameter.fqn, "a tensor");
    if (choice_.shard_size == 1 && rule->gathered.size() > 1) {
      return Bad("on one rank FSDP takes the first tensor of an extension only; this one has several",
                 parameter.fqn, "one tensor, or more ranks");
    }
    for (const ExtensionTensor& tensor : rule->gathered) {
      parameter.gathered.push_back(Resolve(tensor, PaddedPieceNumel(parameter, choice_.shard_size)));
    }
    for (const ExtensionTensor& tensor : rule->unsharded) {
      parameter.unsharded.push_back(Resolve(tensor, Numel(parameter)));
    }
    return {};
  }

  // Refuses uses of an integer reshard_after_forward that PyTorch does not have.
  Status CheckPostForward() const {
    const std::int64_t size = choice_.post_forward_size;
    if (size == 0 || size == choice_.shard_size) return {};
    for (const UnitParameter& parameter : unit_.parameters) {
      const std::string_view why = !parameter.placements.empty() ? "tensor or expert parallelism"
                                   : !parameter.gathered.empty() ? "an all-gather extension"
                                   : parameter.shard_dim != 0    ? "a shard dimension other than 0"
                                                                 : "";
      if (why.empty()) continue;
      return Bad(fmt::format("PyTorch cannot reshard to a smaller mesh with {}", why), parameter.fqn,
                 "reshard_after_forward true or false");
    }
    return {};
  }

  const Strategy& strategy_;
  const Mesh& mesh_;
  std::string pointer_;
  UnitChoice& choice_;
  Unit& unit_;
};

template <typename Rule>
Status CheckRules(const Trace& trace, const std::vector<Rule>& rules, std::string_view pointer) {
  for (std::size_t r = 0; r < rules.size(); ++r) {
    for (std::size_t p = 0; p < rules[r].parameters.size(); ++p) {
      const bool matches = std::ranges::any_of(trace.parameters, [&](const Parameter& parameter) {
        return MatchesAny({rules[r].parameters[p]}, parameter.fqn, parameter.shared_with);
      });
      if (matches) continue;
      return MakeInputError(fmt::format("{}/{}/parameters/{}", pointer, r, p), "no parameter has this name",
                            rules[r].parameters[p], "an FQN or a pattern over FQNs");
    }
  }
  return {};
}

}  // namespace

Status SetParameterKnobs(const Strategy& strategy, const Mesh& mesh, std::string_view pointer,
                         UnitChoice& choice) {
  return ParameterKnobs(strategy, mesh, pointer, choice).Run();
}

Status CheckParameterRules(const Trace& trace, const Strategy& strategy) {
  if (Status s = CheckRules(trace, strategy.fsdp2.shard_dims, "/fsdp2/shard_dims"); !s) return s;
  for (std::size_t u = 0; u < strategy.units.size(); ++u) {
    const std::string pointer = fmt::format("/units/{}/parameter_meshes", u);
    if (Status s = CheckRules(trace, strategy.units[u].parameter_meshes, pointer); !s) return s;
  }
  return CheckRules(trace, strategy.fsdp2.extensions, "/fsdp2/extensions");
}

}  // namespace shardplan
