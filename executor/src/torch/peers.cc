// SPDX-License-Identifier: Apache-2.0
#include "shardplan/executor/peers.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "torch/agreement.h"
#include "torch/bounded_store.h"
#include "torch/local_process.h"

namespace shardplan::executor {
namespace {

constexpr std::chrono::seconds kAskLimit{1};        // for a question of who has died
constexpr std::chrono::minutes kAnnounceLimit{10};  // in the background
constexpr std::chrono::milliseconds kAskAgain{100};
constexpr std::chrono::milliseconds kLookAround{20};
constexpr int kLookMs = 100;  // how often it is looked for ranks that are new

constexpr const char* kFirstDeath = "shardplan/first_death";
constexpr const char* kAnnounced = "shardplan/peers";

std::string CountOf(const std::string& host) { return fmt::format("{}/{}", kAnnounced, host); }
std::string PlaceOf(const std::string& host, std::int64_t number) {
  return fmt::format("{}/{}/{}", kAnnounced, host, number);
}

std::string LeftKey(std::int64_t rank) { return fmt::format("shardplan/left/{}", rank); }

std::vector<std::uint8_t> BytesOf(const std::string& text) { return {text.begin(), text.end()}; }
std::string TextOf(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// A death as it is published: "7 was killed by signal 9". Returns the death that all hold for the first one
// afterwards.
std::string Publish(c10d::Store& store, const std::string& death) {
  return TextOf(store.compareSet(kFirstDeath, {}, BytesOf(death)));
}

std::string DeathAsAbsence(const std::string& death) {
  const std::size_t blank = death.find(' ');
  return fmt::format("rank {} did not arrive: it{}", death.substr(0, blank),
                     blank == std::string::npos ? " has died" : death.substr(blank));
}

}  // namespace

std::string DidNotArrive(const std::vector<std::int64_t>& ranks) {
  return RanksText(ranks) + " did not arrive";
}

std::string Culprit(const Peers* peers, std::chrono::steady_clock::duration waited) {
  if (peers == nullptr) return {};
  std::optional<std::string> seen = peers->Dead();
  if (!seen && waited >= kEndPatience) seen = peers->Ended();
  if (!seen && waited >= kEndPatience) seen = peers->Stopped();
  return seen.value_or("");
}

std::string AwaitCulprit(const Peers* peers, std::chrono::milliseconds patience) {
  const auto start = std::chrono::steady_clock::now();
  while (peers != nullptr) {
    const auto waited = std::chrono::steady_clock::now() - start;
    std::string seen = Culprit(peers, waited);
    if (!seen.empty() || waited >= patience) return seen;
    std::this_thread::sleep_for(kLookAround);
  }
  return {};
}

void PublishDeath(c10d::Store& store, std::int64_t rank, const std::string& how) {
  try {
    (void)Publish(store, fmt::format("{} {}", rank, how));
  } catch (const std::exception&) {
    return;  // the store's process is gone, too
  }
}

// A thread that watches, and what it has seen.
class Peers::Watcher {
 public:
  explicit Watcher(PeersOptions options);
  ~Watcher();

  void Tell(const std::string& word);
  std::optional<std::string> Dead();
  bool StoreAnswers();

  std::vector<std::int64_t> Ended();
  std::vector<std::int64_t> Stopped();
  const PeersOptions& options() const { return options_; }

 private:
  struct Peer {
    LocalProcess process;
    bool ended = false;
  };

  void Watch();
  void Announce();
  void FindNew();
  void WatchOnce();
  void Hear(const std::string& message);
  void SeeEnd(std::int64_t rank);
  Peer* Find(std::int64_t rank);
  void Remember(const std::string& death);

  const PeersOptions options_;
  const pid_t pid_ = getpid();
  const std::string host_ = LocalHost();
  const std::optional<Mailbox> mailbox_ = Mailbox::Open();
  std::atomic<bool> stopping_ = false;
  // The thread's.
  c10::intrusive_ptr<c10d::Store> store_;
  std::int64_t known_ = 0;  // ranks of this machine
  std::atomic<bool> everybody_is_known_ = false;

  std::mutex mutex_;  // of what follows
  std::vector<Peer> peers_;
  std::set<std::int64_t> left_;            // ranks that said that they leave in good order
  std::set<std::int64_t> failed_;          // ranks that said that they fail because of others
  std::string first_death_;                // as it is published; "": none is known of
  c10::intrusive_ptr<c10d::Store> asked_;  // null: it cannot be
  std::chrono::steady_clock::time_point ask_again_;
  std::thread thread_;
};

Peers::Watcher::Watcher(PeersOptions options) : options_(std::move(options)) {
  thread_ = std::thread([this] { Watch(); });
}

Peers::Watcher::~Watcher() {
  if (getpid() != pid_) {  // a fork has no such thread
    thread_.detach();
    return;
  }
  stopping_ = true;
  if (mailbox_) mailbox_->Send(mailbox_->address(), "stop");
  thread_.join();
}

Peers::Watcher::Peer* Peers::Watcher::Find(std::int64_t rank) {
  const auto found = std::ranges::find_if(peers_, [&](const Peer& p) { return p.process.rank == rank; });
  return found == peers_.end() ? nullptr : &*found;
}

void Peers::Watcher::Remember(const std::string& death) {
  const std::lock_guard lock(mutex_);
  if (first_death_.empty()) first_death_ = death;
}

void Peers::Watcher::Announce() {
  const GiveUp when_stopping = [this] {
    return stopping_ ? std::optional<std::string>("it is not asked any longer") : std::nullopt;
  };
  // A connection of its own: another call on the same one may wait for long.
  store_ = MakeBoundedStore(options_.store, kAnnounceLimit, when_stopping)->clone();
  const LocalProcess own = {
      .rank = options_.rank, .pid = pid_, .address = mailbox_ ? mailbox_->address() : "-", .end = {}};
  store_->set(PlaceOf(host_, store_->add(CountOf(host_), 1)), own.ToText());
  (void)store_->add(kAnnounced, 1);
  const std::lock_guard lock(mutex_);
  asked_ = MakeBoundedStore(store_, kAskLimit, when_stopping);
}

void Peers::Watcher::FindNew() {
  const bool all = store_->add(kAnnounced, 0) >= options_.ranks;
  const std::int64_t count = store_->add(CountOf(host_), 0);
  std::map<std::int64_t, LocalProcess> found;  // by rank; one that came again counts as it came last
  for (; known_ < count && store_->check({PlaceOf(host_, known_ + 1)}); ++known_) {
    LocalProcess process = LocalProcess::Parse(store_->get_to_str(PlaceOf(host_, known_ + 1)));
    if (process.rank >= 0 && process.rank != options_.rank) found[process.rank] = std::move(process);
  }
  everybody_is_known_ = all && known_ == count;
  for (auto& [rank, process] : found) {
    const bool alive = process.Open();
    {
      const std::lock_guard lock(mutex_);
      if (std::erase_if(peers_, [rank = rank](const Peer& peer) { return peer.process.rank == rank; }) > 0) {
        left_.erase(rank);
        failed_.erase(rank);
      }
      peers_.push_back({.process = std::move(process)});
    }
    if (!alive) SeeEnd(rank);
  }
}

void Peers::Watcher::Hear(const std::string& message) {
  std::istringstream words(message);
  std::string what;
  std::int64_t rank = -1;
  words >> what >> rank;
  const std::lock_guard lock(mutex_);
  if (what == "left") left_.insert(rank);
  if (what == "failed") failed_.insert(rank);
}

void Peers::Watcher::SeeEnd(std::int64_t rank) {
  c10::intrusive_ptr<c10d::Store> store;
  {
    const std::lock_guard lock(mutex_);
    Find(rank)->ended = true;
    if (left_.contains(rank) || failed_.contains(rank) || !first_death_.empty()) return;
    store = asked_;
  }
  std::string death = fmt::format("{} has died", rank);
  try {
    // It may have left before this rank was known to it.
    if (store && store->check({LeftKey(rank)})) return Hear(store->get_to_str(LeftKey(rank)));
    // Others may know of one that died before it.
    if (store) death = Publish(*store, death);
  } catch (const std::exception&) {
    store = nullptr;  // it is gone, too
  }
  Remember(death);
  if (options_.speak && !stopping_) options_.speak("rank " + death);
}

void Peers::Watcher::WatchOnce() {
  std::vector<pollfd> polled;
  std::vector<std::int64_t> ranks;
  {
    const std::lock_guard lock(mutex_);
    for (const Peer& peer : peers_) {
      if (peer.ended || peer.process.end.number() < 0) continue;
      polled.push_back({peer.process.end.number(), POLLIN, 0});
      ranks.push_back(peer.process.rank);
    }
  }
  if (mailbox_) polled.push_back({mailbox_->descriptor(), POLLIN, 0});
  if (poll(polled.data(), polled.size(), everybody_is_known_ && mailbox_ ? -1 : kLookMs) < 0) return;
  // The message of a process before it ends is there when its end is seen.
  while (mailbox_) {
    const std::optional<std::string> message = mailbox_->Receive();
    if (!message) break;
    Hear(*message);
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (polled[i].revents != 0) SeeEnd(ranks[i]);
  }
}

void Peers::Watcher::Watch() {
  try {
    Announce();
  } catch (const std::exception&) {
    everybody_is_known_ = true;  // nobody is
  }
  while (!stopping_) {
    try {
      if (!everybody_is_known_) FindNew();
    } catch (const std::exception&) {
      everybody_is_known_ = true;  // that ever will be
    }
    if (!stopping_) WatchOnce();
  }
}

void Peers::Watcher::Tell(const std::string& word) {
  if (getpid() != pid_) return;  // a fork speaks for nobody
  const std::string message = fmt::format("{} {}", word, options_.rank);
  c10::intrusive_ptr<c10d::Store> store;
  {
    const std::lock_guard lock(mutex_);
    for (const Peer& peer : peers_) {
      if (mailbox_ && !peer.ended) mailbox_->Send(peer.process.address, message);
    }
    if (!everybody_is_known_) store = asked_;  // for those that this one does not know yet
  }
  try {
    if (store) store->set(LeftKey(options_.rank), message);
  } catch (const std::exception&) {
    return;  // nobody can ask it
  }
}

std::optional<std::string> Peers::Watcher::Dead() {
  c10::intrusive_ptr<c10d::Store> store;
  {
    const std::lock_guard lock(mutex_);
    if (!first_death_.empty()) return DeathAsAbsence(first_death_);
    const auto now = std::chrono::steady_clock::now();
    if (!asked_ || now < ask_again_) return std::nullopt;
    ask_again_ = now + kAskAgain;
    store = asked_;
  }
  try {
    if (!store->check({kFirstDeath})) return std::nullopt;
    Remember(store->get_to_str(kFirstDeath));
  } catch (const std::exception&) {
    const std::lock_guard lock(mutex_);
    asked_ = nullptr;
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  return DeathAsAbsence(first_death_);
}

bool Peers::Watcher::StoreAnswers() {
  c10::intrusive_ptr<c10d::Store> store;
  {
    const std::lock_guard lock(mutex_);
    store = asked_;
  }
  try {
    if (store) (void)store->check({kFirstDeath});
  } catch (const std::exception&) {
    return false;
  }
  return store != nullptr;
}

std::vector<std::int64_t> Peers::Watcher::Ended() {
  const std::lock_guard lock(mutex_);
  std::vector<std::int64_t> ranks;
  for (const Peer& peer : peers_) {
    const std::int64_t rank = peer.process.rank;
    if (peer.ended && left_.contains(rank) && !failed_.contains(rank)) ranks.push_back(rank);
  }
  std::ranges::sort(ranks);
  return ranks;
}

std::vector<std::int64_t> Peers::Watcher::Stopped() {
  const std::lock_guard lock(mutex_);
  std::vector<std::int64_t> ranks;
  for (const Peer& peer : peers_) {
    if (!peer.ended && peer.process.IsStopped()) ranks.push_back(peer.process.rank);
  }
  std::ranges::sort(ranks);
  return ranks;
}

Peers::Peers(PeersOptions options) : watcher_(std::make_unique<Watcher>(std::move(options))) {}
Peers::~Peers() { Leave(); }

void Peers::Leave() { watcher_->Tell("left"); }
void Peers::Fail() { watcher_->Tell("failed"); }
std::optional<std::string> Peers::Dead() const { return watcher_->Dead(); }

std::optional<std::string> Peers::Ended() const {
  const std::vector<std::int64_t> ranks = watcher_->Ended();
  if (ranks.empty()) return std::nullopt;
  return fmt::format("{}: {} ended", DidNotArrive(ranks), ranks.size() == 1 ? "it has" : "they have");
}

std::optional<std::string> Peers::Stopped() const {
  const std::vector<std::int64_t> ranks = watcher_->Stopped();
  if (ranks.empty()) return std::nullopt;
  return fmt::format("{}: {} stopped", DidNotArrive(ranks), ranks.size() == 1 ? "it is" : "they are");
}

std::optional<std::string> Peers::SilentStore() const {
  const std::optional<std::int64_t> rank = watcher_->options().store_rank;
  if (!rank || *rank == watcher_->options().rank || watcher_->StoreAnswers()) return std::nullopt;
  return DidNotArrive({*rank}) + ": the store that it serves does not answer";
}

}  // namespace shardplan::executor
