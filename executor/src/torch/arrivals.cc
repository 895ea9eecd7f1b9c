#include "torch/arrivals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <exception>
#include <sstream>
#include <thread>

namespace shardplan::executor {
namespace {

std::string Key(std::int64_t rank) { return fmt::format("shardplan/issued/{}", rank); }

// The count of one communicator in "3 0 12 ...".
std::int64_t CountOf(const std::vector<std::uint8_t>& text, CommunicatorId communicator) {
  std::istringstream stream(std::string(text.begin(), text.end()));
  std::int64_t count = 0;
  for (CommunicatorId i = 0; i <= communicator; ++i) stream >> count;
  return count;
}

}  // namespace

std::string DescribeCollective(const Plan& plan, const CollectiveSpec& spec, std::int64_t sequence) {
  const char* kind = spec.kind == CollectiveKind::kAllGather       ? "all_gather"
                     : spec.kind == CollectiveKind::kReduceScatter ? "reduce_scatter"
                                                                   : "all_reduce";
  return fmt::format("{} {} on communicator {}, into {}", kind, sequence,
                     plan.communicators[spec.communicator].name, plan.buffers[spec.dst].name);
}

void Arrivals::Report(std::int64_t rank, const std::vector<std::int64_t>& issued) {
  if (!store_ || reported_) return;
  reported_ = true;
  const std::string text = fmt::format("{}", fmt::join(issued, " "));
  try {
    store_->set(Key(rank), std::vector<std::uint8_t>(text.begin(), text.end()));
  } catch (const std::exception&) {
    store_ = nullptr;  // whoever held it is gone
  }
}

std::string Arrivals::Missing(const std::vector<std::int64_t>& group, std::int64_t rank,
                              CommunicatorId communicator, std::int64_t sequence,
                              std::chrono::milliseconds patience) {
  if (!store_) return {};
  const auto deadline = std::chrono::steady_clock::now() + patience;
  std::vector<std::int64_t> missing;
  try {
    while (true) {
      missing.clear();
      bool silent = false;  // somebody has not said anything yet
      for (const std::int64_t other : group) {
        if (other == rank) continue;
        if (!store_->check({Key(other)})) {
          silent = true;
          missing.push_back(other);
        } else if (CountOf(store_->get(Key(other)), communicator) <= sequence) {
          missing.push_back(other);
        }
      }
      if (!silent || std::chrono::steady_clock::now() >= deadline) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  } catch (const std::exception&) {
    return "which ranks did not arrive is unknown, because the store is gone";
  }
  if (missing.empty()) return {};
  return fmt::format("{} {} did not arrive", missing.size() == 1 ? "rank" : "ranks",
                     fmt::join(missing, ", "));
}

}  // namespace shardplan::executor
