// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/verifier/oracle.h"

#include <algorithm>
#include <memory>
#include <unordered_set>
#include <vector>

#include "tests/schemas/verifier/oracle_program.h"

namespace shardplan::test {
namespace {

using Value = std::uint64_t;
constexpr Value kGarbage = 0xdead;

Value Mix(Value a, Value b) {
  a ^= b + 0x9e3779b97f4a7c15ULL + (a << 6) + (a >> 2);
  a *= 0xff51afd7ed558ccdULL;
  return a ^ (a >> 33);
}

Value Written(std::size_t item, std::size_t which, Value read) { return Mix(Mix(item + 1, which + 1), read); }

// Which instances may have the same block: a symmetric table.
class Shared {
 public:
  explicit Shared(std::size_t instances) : instances_(instances), table_(instances * instances, false) {}
  bool operator()(int a, int b) const { return table_[static_cast<std::size_t>(a) * instances_ + b]; }
  void Add(int a, int b) {
    table_[static_cast<std::size_t>(a) * instances_ + b] = true;
    table_[static_cast<std::size_t>(b) * instances_ + a] = true;
  }

 private:
  std::size_t instances_;
  std::vector<char> table_;
};

// A moment: what is issued, what is done, what memory holds.
struct Moment {
  std::size_t issued = 0;         // items that the host is past
  std::vector<std::size_t> done;  // by stream: how many of its items are done
  std::vector<char> recorded;     // by record
  std::vector<Value> values;      // by instance
  std::shared_ptr<const Shared> shared;
  Value shared_key = 0;  // tells two `shared` apart

  // Moments are told apart by 64 bits: that two of the some hundred thousand of a plan collide is not to be
  // feared.
  Value Key() const {
    Value key = Mix(issued, shared_key);
    for (const std::size_t n : done) key = Mix(key, n);
    for (const Value value : values) key = Mix(key, value);
    return key;  // `recorded` follows from `done`
  }
};

class Explorer {
 public:
  Explorer(const Program& program, const OracleOptions& options) : p_(program), options_(options) {
    for (const Item& item : p_.items) {
      streams_ = std::max(streams_, static_cast<std::size_t>(item.stream + 1));
      holds_back_ = holds_back_ || !item.safe_after.empty();
      records_ += item.kind == Item::Kind::kRecord ? 1 : 0;
    }
    queue_.resize(streams_);
    for (std::size_t i = 0; i < p_.items.size(); ++i) {
      if (RunsOnStream(p_.items[i])) queue_[p_.items[i].stream].push_back(i);
    }
    FindRightValues();
  }

  void Run(OracleVerdict& verdict) {
    Moment start;
    start.done.assign(streams_, 0);
    start.recorded.assign(records_, false);
    start.values = first_values_;
    start.shared = std::make_shared<const Shared>(p_.instances.size());
    std::vector<Moment> open = {start};
    while (!open.empty() && !verdict.wrong_value) {
      Moment m = std::move(open.back());
      open.pop_back();
      if (options_.reduce) Settle(m);
      if (!seen_.insert(m.Key()).second) continue;
      if (static_cast<std::int64_t>(seen_.size()) > options_.max_states) {
        verdict.complete = false;
        break;
      }
      if (!verdict.race) verdict.race = HasRace(m);
      for (Moment& next : Successors(m, verdict)) open.push_back(std::move(next));
    }
    verdict.states = static_cast<std::int64_t>(seen_.size());
  }

 private:
  static bool RunsOnStream(const Item& item) {
    return item.stream >= 0 && item.kind != Item::Kind::kHostWait;
  }

  // Runs the program in host order and keeps what each work reads.
  void FindRightValues() {
    first_values_.assign(p_.instances.size(), kGarbage);
    for (std::size_t i = 0; i < p_.instances.size(); ++i) {
      if (p_.instances[i].pool < 0) first_values_[i] = Mix(77, i);
    }
    std::vector<Value> values = first_values_;
    right_.resize(p_.items.size());
    for (std::size_t i = 0; i < p_.items.size(); ++i) {
      if (p_.items[i].kind != Item::Kind::kWork) continue;
      right_[i] = ReadAll(p_.items[i], values);
      WriteAll(i, values, nullptr);
    }
  }

  static Value ReadAll(const Item& item, const std::vector<Value>& values) {
    Value read = 1;
    for (const int instance : item.reads) read = Mix(read, values[instance]);
    return read;
  }

  void WriteAll(std::size_t i, std::vector<Value>& values, const Shared* shared) const {
    const Value read = ReadAll(p_.items[i], values);
    for (std::size_t k = 0; k < p_.items[i].writes.size(); ++k) {
      const int target = p_.items[i].writes[k];
      for (int other = 0; shared != nullptr && other < std::ssize(values); ++other) {
        if ((*shared)(target, other)) values[other] = kGarbage;
      }
      values[target] = Written(i, k, read);
    }
  }

  // Does what only enables more: issuing, recording, passing waits.
  void Settle(Moment& m) const {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t s = 0; s < streams_; ++s) {
        while (CanRun(m, s) && Front(m, s).kind != Item::Kind::kWork) {
          RunOrder(m, s);
          moved = true;
        }
      }
      while (CanIssue(m) && !IssueMatters(m)) {
        IssueNext(m);
        moved = true;
      }
    }
  }

  bool CanIssue(const Moment& m) const {
    if (m.issued == p_.items.size()) return false;
    const Item& item = p_.items[m.issued];
    return item.kind != Item::Kind::kHostWait || m.recorded[item.record];
  }

  // Work of the host itself, and an allocation while a freed block is held back, depend on when they happen.
  bool IssueMatters(const Moment& m) const {
    const Item& item = p_.items[m.issued];
    if (item.kind == Item::Kind::kWork) return item.stream < 0;
    return holds_back_ && item.kind == Item::Kind::kAllocate &&
           Reusable(m, item.instance, true) != Reusable(m, item.instance, false);
  }

  // Freed instances of the pool that `instance` is allocated from; held-back ones (record_stream) only if
  // their streams are done.
  std::vector<int> Reusable(const Moment& m, int instance, bool with_held_back) const {
    std::vector<int> freed;
    const StreamId pool = p_.instances[instance].pool;
    for (std::size_t i = 0; i < m.issued && pool >= 0; ++i) {
      const Item& item = p_.items[i];
      if (item.kind != Item::Kind::kFree || p_.instances[item.instance].pool != pool) continue;
      const bool held_back =
          std::ranges::any_of(item.safe_after, [&](StreamId s) { return DoneUpTo(m, s) < i; });
      if (!held_back || with_held_back) freed.push_back(item.instance);
    }
    return freed;
  }

  // The first item of the stream, in host order, that is not done.
  std::size_t DoneUpTo(const Moment& m, StreamId s) const {
    if (static_cast<std::size_t>(s) >= streams_ || m.done[s] == queue_[s].size()) return p_.items.size();
    return queue_[s][m.done[s]];
  }

  void IssueNext(Moment& m) const {
    const std::size_t i = m.issued;
    const Item& item = p_.items[i];
    if (item.kind == Item::Kind::kAllocate) {
      const std::vector<int> freed = Reusable(m, item.instance, false);
      if (!freed.empty()) {
        Shared shared = *m.shared;
        for (const int other : freed) {
          shared.Add(item.instance, other);
          m.shared_key = Mix(m.shared_key, Mix(i, static_cast<Value>(other)));
        }
        m.shared = std::make_shared<const Shared>(std::move(shared));
      }
    }
    if (item.kind == Item::Kind::kWork && item.stream < 0) WriteAll(i, m.values, m.shared.get());
    ++m.issued;
  }

  const Item& Front(const Moment& m, std::size_t s) const { return p_.items[queue_[s][m.done[s]]]; }

  bool CanRun(const Moment& m, std::size_t s) const {
    if (m.done[s] == queue_[s].size() || queue_[s][m.done[s]] >= m.issued) return false;
    return Front(m, s).kind != Item::Kind::kWait || m.recorded[Front(m, s).record];
  }

  void RunOrder(Moment& m, std::size_t s) const {
    if (Front(m, s).kind == Item::Kind::kRecord) m.recorded[Front(m, s).record] = true;
    ++m.done[s];
  }

  std::vector<Moment> Successors(const Moment& m, OracleVerdict& verdict) const {
    std::vector<Moment> next;
    if (CanIssue(m)) {
      const Item& item = p_.items[m.issued];
      const bool works = item.kind == Item::Kind::kWork && item.stream < 0;
      if (works && ReadAll(item, m.values) != right_[m.issued]) verdict.wrong_value = true;
      next.push_back(m);
      IssueNext(next.back());
    }
    for (std::size_t s = 0; s < streams_; ++s) {
      if (!CanRun(m, s)) continue;
      const std::size_t i = queue_[s][m.done[s]];
      next.push_back(m);
      if (p_.items[i].kind != Item::Kind::kWork) {
        RunOrder(next.back(), s);
        continue;
      }
      if (ReadAll(p_.items[i], m.values) != right_[i]) verdict.wrong_value = true;
      WriteAll(i, next.back().values, m.shared.get());
      ++next.back().done[s];
    }
    return next;
  }

  // Two pieces of work that could both be next touch the same memory, and one writes.
  bool HasRace(const Moment& m) const {
    std::vector<const Item*> ready;
    for (std::size_t s = 0; s < streams_; ++s) {
      if (CanRun(m, s) && Front(m, s).kind == Item::Kind::kWork) ready.push_back(&Front(m, s));
    }
    if (CanIssue(m) && p_.items[m.issued].kind == Item::Kind::kWork && p_.items[m.issued].stream < 0) {
      ready.push_back(&p_.items[m.issued]);
    }
    for (std::size_t a = 0; a < ready.size(); ++a) {
      for (std::size_t b = 0; b < a; ++b) {
        if (Conflict(m, *ready[a], *ready[b]) || Conflict(m, *ready[b], *ready[a])) return true;
      }
    }
    return false;
  }

  static bool Conflict(const Moment& m, const Item& writer, const Item& other) {
    for (const int written : writer.writes) {
      for (const std::vector<int>* used : {&other.reads, &other.writes}) {
        for (const int instance : *used) {
          if (instance == written || (*m.shared)(instance, written)) return true;
        }
      }
    }
    return false;
  }

  const Program& p_;
  OracleOptions options_;
  std::size_t streams_ = 0;
  int records_ = 0;
  bool holds_back_ = false;                      // some free has streams that it is safe after
  std::vector<std::vector<std::size_t>> queue_;  // by stream: items in order
  std::vector<Value> first_values_, right_;
  std::unordered_set<Value> seen_;
};

}  // namespace

OracleVerdict AskOracle(const Plan& plan, const OracleOptions& options) {
  OracleVerdict verdict;
  const Program program = ReadInHostOrder(plan);
  if (!program.problems.empty()) {
    verdict.problem = *program.problems.begin();
    return verdict;
  }
  Explorer(program, options).Run(verdict);
  return verdict;
}

}  // namespace shardplan::test
