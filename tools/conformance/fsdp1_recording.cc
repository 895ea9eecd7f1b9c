#include "recording.h"
namespace shardplan::conformance {
Result<Recording> ConvertFsdp1(const std::string&) { return MakeInputError("", "not yet"); }
}  // namespace shardplan::conformance
