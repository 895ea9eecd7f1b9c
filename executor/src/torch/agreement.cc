// SPDX-License-Identifier: Apache-2.0
#include "torch/agreement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "torch/bounded_store.h"

namespace shardplan::executor {
namespace {

using AgreementClock = std::chrono::steady_clock;

constexpr char kFieldEnd = '\x1f';
constexpr std::chrono::milliseconds kPollInterval{5};
// For the first rank's word after its own time is up, and for the others to have read a refusal.
constexpr std::chrono::milliseconds kGrace{5000};

std::string StatementKey(std::int64_t place) { return fmt::format("statement/{}", place); }

std::vector<std::uint8_t> Encode(const Statement& statement) {
  std::string text = statement.failure + kFieldEnd;
  for (const Fact& fact : statement.facts) text += fact.name + kFieldEnd + fact.value + kFieldEnd;
  return {text.begin(), text.end()};
}

Statement Decode(const std::vector<std::uint8_t>& bytes) {
  std::vector<std::string> fields(1);
  for (const std::uint8_t byte : bytes) {
    if (byte == kFieldEnd) {
      fields.emplace_back();
    } else {
      fields.back() += static_cast<char>(byte);
    }
  }
  Statement statement{.facts = {}, .failure = fields.front()};
  for (std::size_t i = 1; i + 1 < fields.size(); i += 2)
    statement.facts.push_back({fields[i], fields[i + 1]});
  return statement;
}

// The means by which the ranks meet.
struct Meeting {
  c10d::Store& store;
  const Peers* peers;  // null: nobody knows who is alive
};

// nullopt: it does not come, because time is up or somebody has died.
std::optional<std::vector<std::uint8_t>> WaitFor(const Meeting& meeting, const std::string& key,
                                                 AgreementClock::time_point deadline) {
  while (!meeting.store.check({key})) {
    if (AgreementClock::now() >= deadline) return std::nullopt;
    if (meeting.peers != nullptr && meeting.peers->Dead()) return std::nullopt;
    std::this_thread::sleep_for(kPollInterval);
  }
  return meeting.store.get(key);
}

// Why nothing is heard of those ranks.
std::string Silence(const Meeting& meeting, const std::vector<std::int64_t>& ranks) {
  if (meeting.peers != nullptr) {
    const std::string culprit = AwaitCulprit(meeting.peers, kEndPatience);
    if (!culprit.empty()) return culprit;
  }
  return fmt::format("{}: nothing is heard of {} within the time-out", DidNotArrive(ranks),
                     ranks.size() == 1 ? "it" : "them");
}

// How a value reads in a message: digests are told apart by their beginning.
std::string Shortened(const std::string& value) {
  constexpr std::size_t kShown = 20;
  return value.size() > 2 * kShown ? value.substr(0, kShown) + "..." : value;
}

// "" when all say the same.
std::string Differences(const std::vector<Statement>& statements, const std::vector<std::int64_t>& ranks) {
  std::vector<std::string> sentences;
  for (std::size_t f = 0; f < statements.front().facts.size(); ++f) {
    std::map<std::string, std::vector<std::int64_t>> by_value;
    for (std::size_t place = 0; place < statements.size(); ++place) {
      const std::vector<Fact>& facts = statements[place].facts;
      by_value[f < facts.size() ? facts[f].value : "nothing"].push_back(ranks[place]);
    }
    if (by_value.size() == 1) continue;
    std::vector<std::pair<std::string, std::vector<std::int64_t>>> groups(by_value.begin(), by_value.end());
    std::ranges::stable_sort(groups, {}, [](const auto& group) { return group.second.front(); });
    std::vector<std::string> parts;
    for (const auto& [value, group] : groups)
      parts.push_back(fmt::format("{} on {}", Shortened(value), RanksText(group)));
    sentences.push_back(
        fmt::format("{} differs: {}", statements.front().facts[f].name, fmt::join(parts, ", ")));
  }
  if (sentences.empty()) return {};
  return fmt::format("the ranks are not about to do the same: {}", fmt::join(sentences, "; "));
}

// The first rank's message to all, with the letter of the exit code in front: "" when all is well.
std::string Collect(const Meeting& meeting, const std::vector<std::int64_t>& ranks, const Statement& own,
                    AgreementClock::time_point deadline) {
  std::vector<Statement> statements = {own};
  std::vector<std::int64_t> missing;
  std::string failures;
  if (!own.failure.empty()) return fmt::format("N{}: {}", RanksText({ranks[0]}), own.failure);
  for (std::size_t place = 1; place < ranks.size(); ++place) {
    const auto bytes = WaitFor(meeting, StatementKey(static_cast<std::int64_t>(place)), deadline);
    if (!bytes) {
      missing.push_back(ranks[place]);
      statements.push_back(own);
      continue;
    }
    statements.push_back(Decode(*bytes));
    if (!statements.back().failure.empty()) {
      failures += fmt::format("{}{}: {}", failures.empty() ? "" : "; ", RanksText({ranks[place]}),
                              statements.back().failure);
      // The others will not come to a run that has failed; those that are there have said so already.
      deadline = std::min(deadline, AgreementClock::now() + kGrace);
    }
  }
  if (!failures.empty()) return "N" + failures;
  const std::string differences = Differences(statements, ranks);
  if (!differences.empty()) return "N" + differences;
  if (missing.empty()) return {};
  return "E" + Silence(meeting, missing);
}

Status AsStatus(const std::string& verdict) {
  if (verdict.empty()) return {};
  return MakeError(verdict[0] == 'N' ? ErrorCode::kNegative : ErrorCode::kEnvironment, verdict.substr(1));
}

Status Lead(const Meeting& meeting, const std::vector<std::int64_t>& ranks, const Statement& statement,
            std::chrono::milliseconds timeout) {
  const std::string verdict = Collect(meeting, ranks, statement, AgreementClock::now() + timeout);
  c10d::Store& store = meeting.store;
  store.set("verdict", std::vector<std::uint8_t>(verdict.begin(), verdict.end()));
  if (verdict.empty()) return {};
  // This process may serve the store, and ends with the refusal: the others have to read it first. A dead one
  // will not, and the others know of it.
  const bool dead = meeting.peers != nullptr && meeting.peers->Dead();
  const auto deadline = AgreementClock::now() + (dead ? kEndPatience : kGrace);
  const auto others = static_cast<std::int64_t>(ranks.size()) - 1;
  while (store.add("read", 0) < others && AgreementClock::now() < deadline)
    std::this_thread::sleep_for(kPollInterval);
  return AsStatus(verdict);
}

Status Follow(const Meeting& meeting, std::int64_t place, const std::vector<std::int64_t>& ranks,
              const Statement& statement, std::chrono::milliseconds timeout) {
  c10d::Store& store = meeting.store;
  store.set(StatementKey(place), Encode(statement));
  if (!statement.failure.empty()) {
    store.add("read", 1);
    return MakeError(ErrorCode::kNegative, statement.failure);
  }
  auto verdict = WaitFor(meeting, "verdict", AgreementClock::now() + timeout);
  // The first rank's time may be up later than this one's.
  if (!verdict && AwaitCulprit(meeting.peers, kEndPatience).empty())
    verdict = WaitFor(meeting, "verdict", AgreementClock::now() + kGrace);
  if (!verdict) return MakeError(ErrorCode::kEnvironment, Silence(meeting, {ranks.front()}));
  store.add("read", 1);
  return AsStatus({verdict->begin(), verdict->end()});
}

}  // namespace

std::string RanksText(const std::vector<std::int64_t>& ranks) {
  std::vector<std::string> runs;
  for (std::size_t first = 0, next = 0; first < ranks.size(); first = next) {
    while (next < ranks.size() && ranks[next] - ranks[first] == static_cast<std::int64_t>(next - first))
      ++next;
    if (next - first > 2) {
      runs.push_back(fmt::format("{} to {}", ranks[first], ranks[next - 1]));
    } else {
      for (std::size_t i = first; i < next; ++i) runs.push_back(fmt::format("{}", ranks[i]));
    }
  }
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (i > 0) text += i + 1 == runs.size() ? " and " : ", ";
    text += runs[i];
  }
  return text;
}

Status Agree(const c10::intrusive_ptr<c10d::Store>& store, std::int64_t place,
             const std::vector<std::int64_t>& ranks, const Statement& statement,
             std::chrono::milliseconds timeout, const Peers* peers) {
  if (ranks.size() < 2) {
    return statement.failure.empty() ? Status() : MakeError(ErrorCode::kNegative, statement.failure);
  }
  try {
    const c10::intrusive_ptr<c10d::Store> bounded = MakeBoundedStore(store, timeout);
    const Meeting meeting = {*bounded, peers};
    return place == 0 ? Lead(meeting, ranks, statement, timeout)
                      : Follow(meeting, place, ranks, statement, timeout);
  } catch (const std::exception& exception) {
    std::string who = AwaitCulprit(peers, kEndPatience);
    if (who.empty() && peers != nullptr) who = peers->SilentStore().value_or("");
    const std::string what = exception.what();
    return MakeError(
        ErrorCode::kEnvironment,
        fmt::format("{}{}whether the other ranks are about to do the same is unknown, because the store "
                    "is gone or does not answer: {}",
                    who, who.empty() ? "" : "; ", what.substr(0, what.find('\n'))));
  }
}

}  // namespace shardplan::executor
