// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <thread>
#include <utility>

#include "shardplan/executor/peers.h"
#include "torch/agreement.h"
#include "torch/bounded_store.h"

namespace shardplan::executor {
namespace {

using ConsensusClock = std::chrono::steady_clock;

constexpr char kFieldSeparator = '\x1f';  // of a field
constexpr std::chrono::milliseconds kMeetLook{2};
constexpr std::chrono::milliseconds kTellPatience{3000};
// For all to have read a verdict that ends their processes, and the first rank's store.
constexpr std::chrono::milliseconds kReadPatience{3000};
constexpr std::chrono::seconds kDeviationStoreLimit{10};

std::vector<std::uint8_t> StoredText(const std::string& text) { return {text.begin(), text.end()}; }

std::string EncodeWhereabouts(const Whereabouts& here) {
  return fmt::format("{}{}{}{}{}{}", here.leaves ? 1 : 0, here.may_go_on ? 1 : 0, kFieldSeparator, here.place,
                     kFieldSeparator, here.text);
}

Whereabouts DecodeWhereabouts(const std::string& text) {
  Whereabouts there{.leaves = text.starts_with('1'), .may_go_on = text.substr(1, 1) == "1"};
  const std::size_t place = text.find(kFieldSeparator) + 1;
  const std::size_t end = text.find(kFieldSeparator, place);
  there.place = text.substr(place, end - place);
  there.text = text.substr(end + 1);
  return there;
}

// "": together; "+": as planned; else what is wrong.
std::string VerdictOf(const std::vector<Whereabouts>& all, const std::string& in_words) {
  const auto leaves = std::ranges::find_if(all, &Whereabouts::leaves);
  const auto is_elsewhere = [&](const Whereabouts& one) { return one.leaves && one.place != leaves->place; };
  const bool one_place = leaves != all.end() && std::ranges::none_of(all, is_elsewhere);
  if (one_place && std::ranges::all_of(all, &Whereabouts::leaves)) return {};
  const auto goes_on = [](const Whereabouts& one) { return !one.leaves || one.may_go_on; };
  if (one_place && std::ranges::all_of(all, goes_on)) return "+";
  return "the ranks go different ways: " + in_words;
}

Result<DeviationVerdict> AsDeviationVerdict(const std::string& verdict) {
  if (verdict.empty()) return DeviationVerdict::kTogether;
  if (verdict == "+") return DeviationVerdict::kGoOn;
  return MakeError(ErrorCode::kNegative, verdict);
}

}  // namespace

DeviationConsensus::DeviationConsensus(c10::intrusive_ptr<c10d::Store> store, std::int64_t place,
                                       std::vector<std::int64_t> names, std::chrono::milliseconds timeout,
                                       std::shared_ptr<Peers> peers,
                                       std::function<void(const std::string&)> speak)
    : given_(std::move(store)),
      place_(place),
      names_(std::move(names)),
      timeout_(timeout),
      peers_(std::move(peers)),
      speak_(std::move(speak)) {}

// A connection of its own: another call on the same one may wait for long.
c10d::Store& DeviationConsensus::store() {
  const std::lock_guard lock(mutex_);
  if (!store_)
    store_ = MakeBoundedStore(MakeBoundedStore(given_, kDeviationStoreLimit)->clone(), kDeviationStoreLimit);
  return *store_;
}

std::string DeviationConsensus::Key(const std::string& what) const {
  return fmt::format("deviation/{}/{}", meetings_, what);
}

void DeviationConsensus::Leave(const std::vector<std::int64_t>& issued, const std::string& text, bool meets) {
  const std::string said =
      fmt::format("{} {} {}{}{}", place_, meets ? 1 : 0, fmt::join(issued, " "), kFieldSeparator, text);
  try {
    (void)store().compareSet(Key("left"), {}, StoredText(said));  // the first one counts
  } catch (const std::exception&) {
    return;  // nobody can hear it
  }
}

std::optional<std::string> DeviationConsensus::WhyInVain(std::int32_t communicator, std::int64_t sequence,
                                                         const std::string& text) {
  const std::lock_guard meeting(meeting_);
  std::optional<std::string> why = Look(communicator, sequence, text);
  if (why && speak_) speak_(*why);
  return why;
}

std::optional<std::string> DeviationConsensus::Look(std::int32_t communicator, std::int64_t sequence,
                                                    const std::string& text) {
  std::string said;
  try {
    if (!store().check({Key("left")})) return std::nullopt;
    said = store().get_to_str(Key("left"));
  } catch (const std::exception&) {
    return std::nullopt;
  }
  std::istringstream words(said.substr(0, said.find(kFieldSeparator)));
  std::int64_t place = -1, issued = 0;
  int meets = 0;
  words >> place >> meets;
  for (std::int32_t c = 0; c <= communicator; ++c) words >> issued;
  // One that has issued the collective comes to it, whatever it did then.
  if (place == place_ || issued > sequence) return std::nullopt;
  const std::string there = said.substr(said.find(kFieldSeparator) + 1);
  if (meets == 0) {
    return fmt::format("the ranks go different ways: rank {}: {}; {}: {}", names_[place], there,
                       RanksText({names_[place_]}), text);
  }
  const Result<DeviationVerdict> agreed =
      MeetOthers({.leaves = false, .may_go_on = false, .place = {}, .text = text});
  if (agreed) return std::nullopt;
  return agreed.error().message;
}

std::optional<std::string> DeviationConsensus::WaitFor(const std::string& key,
                                                       std::chrono::milliseconds patience) {
  const auto deadline = ConsensusClock::now() + patience;
  for (auto look = kMeetLook; !store().check({key}); look = std::min(2 * look, 16 * kMeetLook)) {
    if (ConsensusClock::now() >= deadline || (peers_ && peers_->Dead())) return std::nullopt;
    std::this_thread::sleep_for(look);
  }
  return store().get_to_str(key);
}

Error DeviationConsensus::DidNotCome(const std::vector<std::int64_t>& places) const {
  std::vector<std::int64_t> ranks;
  for (const std::int64_t place : places) ranks.push_back(names_[place]);
  const std::string culprit = AwaitCulprit(peers_.get(), kEndPatience);
  return MakeError(ErrorCode::kEnvironment,
                   culprit.empty()
                       ? fmt::format("{}, where another one has left the plan", DidNotArrive(ranks))
                       : culprit)
      .error();
}

Result<DeviationVerdict> DeviationConsensus::Lead(const Whereabouts& here) {
  std::vector<Whereabouts> all = {here};
  std::vector<std::string> texts = {here.text};
  for (std::int64_t place = 1; place < std::ssize(names_); ++place) {
    const std::optional<std::string> said = WaitFor(Key(fmt::format("at/{}", place)), timeout_);
    if (!said) return std::unexpected(DidNotCome({place}));
    all.push_back(DecodeWhereabouts(*said));
    texts.push_back(all.back().text);
  }
  const std::string verdict = VerdictOf(all, InWords(texts));
  store().set(Key("verdict"), StoredText(verdict));
  Result<DeviationVerdict> agreed = AsDeviationVerdict(verdict);
  const auto deadline = ConsensusClock::now() + kReadPatience;
  while (!agreed && store().add(Key("read"), 0) + 1 < std::ssize(names_) &&
         ConsensusClock::now() < deadline) {
    std::this_thread::sleep_for(kMeetLook);
  }
  return agreed;
}

Result<DeviationVerdict> DeviationConsensus::Follow(const Whereabouts& here) {
  store().set(Key(fmt::format("at/{}", place_)), StoredText(EncodeWhereabouts(here)));
  const std::optional<std::string> verdict = WaitFor(Key("verdict"), timeout_ + kReadPatience);
  if (!verdict) return std::unexpected(DidNotCome({0}));
  Result<DeviationVerdict> agreed = AsDeviationVerdict(*verdict);
  if (!agreed) (void)store().add(Key("read"), 1);
  return agreed;
}

Result<DeviationVerdict> DeviationConsensus::Meet(const Whereabouts& here) {
  const std::lock_guard meeting(meeting_);
  return MeetOthers(here);
}

Result<DeviationVerdict> DeviationConsensus::MeetOthers(const Whereabouts& here) {
  if (names_.size() < 2) return DeviationVerdict::kTogether;
  try {
    Result<DeviationVerdict> agreed = place_ == 0 ? Lead(here) : Follow(here);
    if (agreed) ++meetings_;
    return agreed;
  } catch (const std::exception& exception) {
    const std::string who = AwaitCulprit(peers_.get(), kEndPatience);
    const std::string what = exception.what();
    return MakeError(ErrorCode::kEnvironment,
                     fmt::format("{}where the other ranks are is unknown, because the store is gone or does "
                                 "not answer: {}",
                                 who.empty() ? "" : who + "; ", what.substr(0, what.find('\n'))));
  }
}

std::vector<std::string> DeviationConsensus::Tell(const std::string& text) {
  std::vector<std::string> texts(names_.size());
  texts[static_cast<std::size_t>(place_)] = text;
  const std::int64_t number = told_++;
  const auto key = [&](std::size_t place) { return fmt::format("told/{}/{}", number, place); };
  try {
    store().set(key(static_cast<std::size_t>(place_)), StoredText(text));
    const auto deadline = ConsensusClock::now() + kTellPatience;
    for (std::size_t place = 0; place < texts.size(); ++place) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - ConsensusClock::now());
      if (static_cast<std::int64_t>(place) == place_) continue;
      texts[place] = WaitFor(key(place), std::max(left, kMeetLook)).value_or("");
    }
  } catch (const std::exception&) {
    return texts;  // as far as is known
  }
  return texts;
}

std::string DeviationConsensus::InWords(const std::vector<std::string>& texts) const {
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> groups;  // by text
  for (std::size_t place = 0; place < texts.size(); ++place) {
    const auto known = std::ranges::find(groups, texts[place], [](const auto& group) { return group.first; });
    auto& group =
        known == groups.end() ? groups.emplace_back(texts[place], std::vector<std::int64_t>()) : *known;
    group.second.push_back(names_[place]);
  }
  std::vector<std::string> parts;
  for (auto& [text, ranks] : groups) {
    std::ranges::sort(ranks);
    parts.push_back(fmt::format("{}: {}", RanksText(ranks), text.empty() ? "not known" : text));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace shardplan::executor
