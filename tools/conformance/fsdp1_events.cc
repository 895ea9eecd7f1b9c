#include "events.h"
namespace shardplan::conformance {
std::vector<LogEvent> Fsdp1Events(const Recording&, const Plan&) { return {}; }
}  // namespace shardplan::conformance
