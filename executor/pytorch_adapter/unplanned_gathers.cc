#include "unplanned_gathers.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "python_error.h"

namespace shardplan::python {

UnplannedGathers::UnplannedGathers(const Plan& plan, executor::TorchDevice& device, executor::Model& model,
                                   std::vector<UnitState>& units, Extensions& extensions,
                                   std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups,
                                   const std::vector<std::vector<at::Tensor>>& shards)
    : device_(device),
      model_(model),
      units_(units),
      extensions_(extensions),
      evaluation_(plan, device, std::move(groups), shards) {}

void UnplannedGathers::Unshard(UnitId unit, bool full_precision) {
  if (units_[unit].unsharded) return;
  const ReleaseGil no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Result<Evaluation::Extended> extended = Evaluation::Extended();
  if (extensions_.Has(unit)) {
    OrThrow(device_.RunOn(0, [&] {
      const InsideUserCode guards;
      extended = extensions_.Inputs(unit);
    }));
    if (!extended) Throw(extended.error());
  }
  OrThrow(model_.ShardedParametersRead(unit));
  OrThrow(evaluation_.Unshard(unit, full_precision, *extended));
  OrThrow(model_.BindUnsharded(unit, -1));
  units_[unit].unplanned = true;
}

void UnplannedGathers::Reshard(UnitId unit) {
  if (!units_[unit].unplanned) return;
  const ReleaseGil no_gil;
  units_[unit].unplanned = false;
  OrThrow(model_.BindSharded(unit, -1));
  OrThrow(evaluation_.Reshard(unit));
}

void UnplannedGathers::ReshardAll() {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) Reshard(static_cast<UnitId>(unit));
}

}  // namespace shardplan::python
