#include "policy.h"
namespace shardplan {
namespace {
class Fsdp1Policy : public Policy {
 public:
  Status SetUp() override { return MakeInputError("/policy", "fsdp1 is not planned yet"); }
  Status On(const HostEvent&) override { return {}; }
  std::string State() const override { return {}; }
};
}  // namespace
std::unique_ptr<Policy> MakeFsdp1Policy(const PolicyInput&, ProgramBuilder&) {
  return std::make_unique<Fsdp1Policy>();
}
}  // namespace shardplan
