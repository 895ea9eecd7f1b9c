// SPDX-License-Identifier: Apache-2.0
#include "torch/arrivals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <sstream>
#include <thread>

#include "torch/bounded_store.h"

namespace shardplan::executor {
namespace {

using ArrivalsClock = std::chrono::steady_clock;

// A store that says nothing for this long, after a failure, says nothing.
constexpr std::chrono::milliseconds kStorePatience{1000};
constexpr std::chrono::milliseconds kLook{20};

std::string IssuedKey(std::int64_t rank) { return fmt::format("shardplan/issued/{}", rank); }
std::string CauseKey(std::int64_t rank) { return fmt::format("shardplan/cause/{}", rank); }

// The count of one communicator in "3 0 12 ...".
std::int64_t IssuedOn(CommunicatorId communicator, const std::string& text) {
  std::istringstream stream(text);
  std::int64_t count = 0;
  for (CommunicatorId i = 0; i <= communicator; ++i) stream >> count;
  return count;
}

}  // namespace

std::string DescribeCollective(const Plan& plan, const CollectiveSpec& spec, std::int64_t sequence) {
  return fmt::format("{} {} on communicator {}, into {}", Name(spec.kind), sequence,
                     plan.communicators[spec.communicator].name, plan.buffers[spec.dst].name);
}

std::string DescribeExchange(const Plan& plan, CommunicatorId communicator, std::int64_t sequence) {
  return fmt::format("exchange {} on communicator {}", sequence, plan.communicators[communicator].name);
}

c10d::Store& Arrivals::store() {
  if (!bounded_) bounded_ = MakeBoundedStore(others_.store, kStorePatience);
  return *bounded_;
}

void Arrivals::Report(std::int64_t rank, const std::vector<std::int64_t>& issued) {
  if (!others_.store || reported_) return;
  reported_ = true;
  try {
    store().set(IssuedKey(rank), fmt::format("{}", fmt::join(issued, " ")));
  } catch (const std::exception&) {
    return;  // whoever serves it is gone, or stopped: then it says nothing when it is asked, either
  }
}

std::vector<std::int64_t> Arrivals::Named(const std::vector<std::int64_t>& ranks) const {
  std::vector<std::int64_t> named = ranks;
  for (std::int64_t& rank : named) {
    if (!others_.names.empty()) rank = others_.names[rank];
  }
  std::ranges::sort(named);
  return named;
}

Arrivals::Reports Arrivals::Ask(const std::vector<std::int64_t>& group, std::int64_t rank,
                                CommunicatorId communicator, std::int64_t sequence) {
  Reports reports;
  for (const std::int64_t other : group) {
    if (other == rank) continue;
    if (!store().check({IssuedKey(other)})) {
      reports.silent.push_back(other);
    } else if (IssuedOn(communicator, store().get_to_str(IssuedKey(other))) <= sequence) {
      reports.behind.push_back(other);
      if (reports.cause.empty() && store().check({CauseKey(other)}))
        reports.cause = store().get_to_str(CauseKey(other));
    }
  }
  return reports;
}

std::string Arrivals::Search(const std::vector<std::int64_t>& group, std::int64_t rank,
                             CommunicatorId communicator, std::int64_t sequence) {
  const auto start = ArrivalsClock::now();
  bool answers = true;
  Reports reports;
  while (true) {
    const auto waited = ArrivalsClock::now() - start;
    if (std::string seen = Culprit(others_.peers.get(), waited); !seen.empty()) return seen;
    try {
      if (answers) reports = Ask(group, rank, communicator, sequence);
    } catch (const std::exception&) {
      answers = false;
    }
    if (!answers && waited >= kEndPatience) {
      const std::optional<std::string> server = others_.peers ? others_.peers->SilentStore() : std::nullopt;
      return server.value_or("which ranks did not arrive is unknown, because the store is gone");
    }
    if (answers && !reports.cause.empty()) return reports.cause;
    if (answers && reports.silent.empty() && reports.behind.empty()) return {};
    // Ranks that failed, too, have the same patience with whoever they wait for before they say who it is.
    if (waited >= kPatience && !reports.silent.empty()) return DidNotArrive(Named(reports.silent));
    if (waited >= kPatience + kStorePatience) return DidNotArrive(Named(reports.behind));
    std::this_thread::sleep_for(kLook);
  }
}

std::string Arrivals::Missing(const std::vector<std::int64_t>& group, std::int64_t rank,
                              CommunicatorId communicator, std::int64_t sequence) {
  if (!others_.store) return {};
  if (others_.peers) others_.peers->Fail();
  std::string cause = Search(group, rank, communicator, sequence);
  try {
    if (!cause.empty()) store().set(CauseKey(rank), cause);
  } catch (const std::exception&) {
    return cause;
  }
  return cause;
}

}  // namespace shardplan::executor
