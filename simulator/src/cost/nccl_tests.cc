// SPDX-License-Identifier: Apache-2.0
#include "cost/nccl_tests.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "cost/log_words.h"
#include "shardplan/schemas/collective_kinds.h"

namespace shardplan::internal {
namespace {

constexpr double kMostNanoseconds = 9'007'199'254'740'992.0;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 53;

struct Program {
  std::string_view name;
  std::optional<CollectiveKind> kind;  // nothing: there is no cost of it
};
// A recv is measured with its send. Parts of different sizes and the hypercube have no cost.
constexpr std::size_t kProgramCount = kCollectiveKindCount - 1 + 2;
constexpr auto kPrograms = [] {
  std::array<Program, kProgramCount> programs = {{{"alltoallv", {}}, {"hypercube", {}}}};
  std::size_t next = 2;
  for (const CollectiveDescription& is : kCollectiveKinds) {
    if (!is.nccl_tests.empty()) programs[next++] = {is.nccl_tests, is.kind};
  }
  return programs;
}();

// The words of a table's head, from "size" on; empty: the line is none.
std::vector<std::string_view> HeadOf(std::string_view line) {
  line = WithoutTag(line);
  std::vector<std::string_view> words = Words(line);
  if (words.size() < 6 || words[0] != "#" || words[1] != "size" || words[2] != "count" || words[3] != "type")
    return {};
  words.erase(words.begin());
  return words;
}

struct Interval {
  double low = 0, high = 1e9;
};

// busbw / algbw on `ranks` ranks.
double BusFactor(CollectiveKind kind, std::int64_t ranks) {
  const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  switch (DescriptionOf(kind).movement) {
    case CollectiveMovement::kRing:
    case CollectiveMovement::kExchange:
    case CollectiveMovement::kRooted:
      return others;
    case CollectiveMovement::kRingTwice:
      return 2 * others;
    case CollectiveMovement::kChain:
    case CollectiveMovement::kTransfer:
      return 1;
  }
  return 1;
}

struct RankLine {
  std::int64_t rank = 0, group = 0;
  std::string host, device;
};

struct Row {
  int line = 0;
  std::int64_t size_bytes = 0;
  std::int64_t duration_ns = 0;
  Interval factor;
  bool reduces = false, has_root = false;
};

class Reader {
 public:
  explicit Reader(const ReadOptions& options) : options_(options) {}

  Result<Measurements> Read(std::string_view text) {
    while (!text.empty()) {
      ++line_;
      const std::size_t end = std::min(text.find('\n'), text.size());
      const std::string_view line = WithoutTag(text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
      if (Status read = ReadLine(line); !read) return std::unexpected(read.error());
    }
    if (Status ended = EndTable(); !ended) return std::unexpected(ended.error());
    if (made_.collectives.empty())
      return Wrong(line_, "the tables of nccl-tests have no rows", "none", "a line for each size");
    return std::move(made_);
  }

 private:
  static std::unexpected<Error> Wrong(int line, std::string message, std::string_view found,
                                      std::string expected) {
    return std::unexpected(Error{ErrorCode::kBadInput, std::move(message), "", fmt::format("/line/{}", line),
                                 std::string(found), std::move(expected)});
  }

  Status ReadLine(std::string_view line) {
    if (const std::vector<std::string_view> head = HeadOf(line); !head.empty()) return BeginTable(head);
    const std::vector<std::string_view> words = Words(line);
    if (words.empty()) return {};
    if (words[0] != "#" && measures_ > 0 && NumberOf<std::int64_t>(words[0])) return ReadRow(words);
    if (words[0].starts_with("#") && !rows_.empty()) {
      if (Status ended = EndTable(); !ended) return ended;
    }
    if (words[0] == "#" && words.size() > 7 && words[1] == "Rank") ReadRank(words);
    ReadProgram(line);
    return {};
  }

  // "all_reduce_perf", in a path, in a command or alone. Facts of a run that is over are of no other.
  void ReadProgram(std::string_view line) {
    if (line.find("test concluded") != std::string_view::npos) return;
    for (std::size_t at = line.find("_perf"); at != std::string_view::npos; at = line.find("_perf", at + 1)) {
      std::size_t start = at;
      while (start > 0 &&
             (std::isalnum(static_cast<unsigned char>(line[start - 1])) != 0 || line[start - 1] == '_'))
        --start;
      const std::string_view name = line.substr(start, at - start);
      const auto found = std::ranges::find(kPrograms, name, &Program::name);
      if (found != kPrograms.end()) program_ = &*found;
    }
  }

  void ReadRank(const std::vector<std::string_view>& words) {
    if (listed_) ranks_.clear();  // of another run
    listed_ = false;
    RankLine made;
    std::size_t device = 0;
    for (std::size_t w = 1; w + 1 < words.size(); ++w) {
      if (words[w] == "Rank") made.rank = NumberOf<std::int64_t>(words[w + 1]).value_or(-1);
      if (words[w] == "Group") made.group = NumberOf<std::int64_t>(words[w + 1]).value_or(0);
      if (words[w] == "on") made.host = words[w + 1];
      if (words[w] == "device") device = w + 3;  // device 0 [0x04] NAME
      if (device > 0) break;
    }
    if (made.rank < 0 || made.host.empty() || device == 0) return;
    for (std::size_t w = device; w < words.size(); ++w)
      made.device += (made.device.empty() ? "" : " ") + std::string(words[w]);
    ranks_.push_back(std::move(made));
  }

  Status BeginTable(const std::vector<std::string_view>& head) {
    if (Status ended = EndTable(); !ended) return ended;
    listed_ = true;
    const auto first =
        std::ranges::find_if(head, [](std::string_view w) { return w == "time" || w == "cputime"; });
    if (first == head.end())
      return Wrong(line_, "the table of nccl-tests has no times", "none", "a column time");
    if (*first == "cputime")
      return Wrong(line_, "the times are those of the host that issues", "cputime", "a run without -C");
    measures_ = static_cast<std::size_t>(head.end() - first);
    stamped_ = head.back() == "timestamp";
    if (stamped_) --measures_;
    if (measures_ % 2 != 0)
      return Wrong(line_, "the table of nccl-tests has other columns in place than out of place",
                   fmt::format("{}", measures_), "as many of both");
    return {};
  }

  Status ReadRow(const std::vector<std::string_view>& words) {
    const std::size_t stamp = stamped_ ? 2 : 0;
    if (words.size() < 3 + measures_ + stamp || words.size() > 5 + measures_ + stamp)
      return Wrong(line_, "the row has another number of cells than the table's head",
                   fmt::format("{}", words.size()),
                   fmt::format("{} to {}", 3 + measures_ + stamp, 5 + measures_ + stamp));
    const std::size_t lead = words.size() - measures_ - stamp;
    const std::size_t first = lead + (options_.in_place ? measures_ / 2 : 0);
    const std::optional<std::int64_t> size = NumberOf<std::int64_t>(words[0]);
    const std::optional<double> time = NumberOf<double>(words[first]);
    const std::optional<double> algorithm = NumberOf<double>(words[first + 1]);
    const std::optional<double> bus = NumberOf<double>(words[first + 2]);
    if (!time || !algorithm || !bus || !(*time >= 0) || !(*time * 1e3 <= kMostNanoseconds) ||
        *size > kMostBytes || *size < 0)
      return Wrong(line_, "the row is none of nccl-tests",
                   fmt::format("{} {} {}", words[first], words[first + 1], words[first + 2]),
                   "a time in us, algbw and busbw in GB/s");
    const std::string_view wrong = words[first + 3];
    if (const std::optional<double> count = NumberOf<double>(wrong); count && *count >= 1)
      return Wrong(line_, "the collective's results were wrong", wrong, "0 or N/A in #wrong");
    if (*size == 0 || *time == 0) return {};
    Row row{.line = line_,
            .size_bytes = *size,
            .duration_ns = std::max<std::int64_t>(1, std::llround(*time * 1e3)),
            .factor = Factor(words[first + 1], *algorithm, words[first + 2], *bus)};
    if (lead > 3) row.reduces = words[3] != "none" && !NumberOf<std::int64_t>(words[3]);
    if (lead > 3) row.has_root = NumberOf<std::int64_t>(words[lead - 1]).value_or(-1) >= 0;
    rows_.push_back(row);
    return {};
  }

  // The interval of figures that are rounded to the decimals that they are printed with.
  static Interval Factor(std::string_view algorithm_text, double algorithm, std::string_view bus_text,
                         double bus) {
    const auto half = [](std::string_view text) {
      const std::size_t point = text.find('.');
      const std::size_t decimals = point == std::string_view::npos ? 0 : text.size() - point - 1;
      return 0.51 * std::pow(10.0, -static_cast<double>(decimals));
    };
    const double a = half(algorithm_text);
    const double b = half(bus_text);
    if (algorithm <= a || algorithm_text.find('e') != std::string_view::npos) return {};
    return {(bus - b) / (algorithm + a), (bus + b) / (algorithm - a)};
  }

  Status EndTable() {
    if (rows_.empty()) return {};
    Interval factor;
    bool reduces = false, has_root = false;
    for (const Row& row : rows_) {
      factor.low = std::max(factor.low, row.factor.low);
      factor.high = std::min(factor.high, row.factor.high);
      reduces |= row.reduces;
      has_root |= row.has_root;
    }
    const Result<CollectiveKind> kind = Kind(factor, reduces, has_root);
    if (!kind) return std::unexpected(kind.error());
    CollectiveMeasurement made{.kind = *kind};
    if (Status placed = Place(factor, made); !placed) return placed;
    for (const Row& row : rows_) {
      made.full_tensor_bytes = {row.size_bytes};
      made.duration_ns = {row.duration_ns};
      made_.collectives.push_back(made);
    }
    rows_.clear();
    measures_ = 0;
    program_ = nullptr;  // the next run says its own
    return {};
  }

  static std::string NameOf(CollectiveKind kind) {
    return std::string(std::ranges::find(kPrograms, std::optional(kind), &Program::kind)->name);
  }

  static std::string KnownKinds() {
    std::vector<std::string_view> names;
    for (const Program& program : kPrograms) {
      if (program.kind) names.push_back(program.name);
    }
    return fmt::format("{}", fmt::join(names, ", "));
  }

  // The program that the text names, the flag, what only one kind can print, the file's name.
  Result<CollectiveKind> Kind(const Interval& factor, bool reduces, bool has_root) const {
    const int line = rows_.front().line;
    if (program_ != nullptr) {
      if (!program_->kind)
        return Wrong(line, "there is no cost of this program's collective", program_->name, KnownKinds());
      if (options_.kind && *options_.kind != *program_->kind)
        return Wrong(line, "the text names another program than --collective", program_->name,
                     NameOf(*options_.kind));
      return *program_->kind;
    }
    if (options_.kind) return *options_.kind;
    if (reduces && has_root) return CollectiveKind::kReduce;
    if (reduces && factor.low > 0) {
      if (factor.low > 0.99) return CollectiveKind::kAllReduce;
      if (factor.high < 1) return CollectiveKind::kReduceScatter;
    }
    const Program* named = nullptr;
    for (const Program& program : kPrograms) {  // the longest name: all_reduce, not reduce
      if (options_.file_name.find(program.name) == std::string::npos) continue;
      if (named == nullptr || program.name.size() > named->name.size()) named = &program;
    }
    if (named != nullptr && named->kind) return *named->kind;
    return Wrong(line, "the text does not say which program of nccl-tests printed it", "none",
                 fmt::format("NAME_perf in the text, or --collective with one of {}", KnownKinds()));
  }

  // Ranks, nodes and groups.
  Status Place(const Interval& factor, CollectiveMeasurement& made) const {
    const int line = rows_.front().line;
    if (ranks_.empty())
      return Wrong(line, "the text has no list of devices", "none", "lines '#  Rank N ... device'");
    std::set<std::int64_t> listed, groups_here;
    std::set<std::string> devices;
    std::map<std::string, std::int64_t> first_of_host;
    const RankLine& first = *std::ranges::min_element(ranks_, {}, &RankLine::rank);
    for (const RankLine& rank : ranks_) {
      if (rank.host == first.host) groups_here.insert(rank.group);
      if (rank.group != first.group) continue;
      listed.insert(rank.rank);
      devices.insert(rank.device);
      const auto [it, added] = first_of_host.try_emplace(rank.host, rank.rank);
      if (!added) it->second = std::min(it->second, rank.rank);
    }
    if (devices.size() > 1)
      return Wrong(line, "the ranks are on devices of several kinds",
                   fmt::format("{}", fmt::join(devices, ", ")), "one");
    made.device = *devices.begin();
    made.concurrent_groups = static_cast<std::int64_t>(groups_here.size());
    const auto fits = [&](std::int64_t ranks) {
      const double expected = BusFactor(made.kind, ranks);
      return factor.low <= expected && expected <= factor.high;
    };
    const auto count = static_cast<std::int64_t>(listed.size());
    if (fits(count) && Whole(listed)) {
      made.ranks = count;
      made.nodes = static_cast<std::int64_t>(first_of_host.size());
      return {};
    }
    const std::int64_t least = std::max(count, groups_here.size() > 1 ? count : *listed.rbegin() + 1);
    std::vector<std::int64_t> candidates;
    for (std::int64_t ranks = std::max<std::int64_t>(2, least); ranks <= kMaxRanks && candidates.size() < 2;
         ++ranks) {
      if (fits(ranks)) candidates.push_back(ranks);
      if (BusFactor(made.kind, ranks) > factor.high) break;
    }
    if (candidates.size() != 1)
      return Wrong(
          line,
          candidates.empty() ? "busbw and algbw are not those of this collective on these ranks"
                             : "the list of devices is not whole, and the bandwidths do not tell the ranks",
          fmt::format("{} on {} ranks, busbw / algbw {:.4f} to {:.4f}", NameOf(made.kind), count, factor.low,
                      std::min(factor.high, 2.0)),
          candidates.empty() ? fmt::format("{:.4f}", BusFactor(made.kind, count)) : "a line for each rank");
    made.ranks = candidates.front();
    // Ranks fill one node after the other.
    if (first_of_host.size() > 1) {
      std::int64_t in_node = kMaxRanks;
      for (const auto& [host, rank] : first_of_host) {
        if (rank > first.rank) in_node = std::min(in_node, rank - first.rank);
      }
      made.nodes = (made.ranks - 1) / in_node + 1;
    }
    return {};
  }

  // Every rank from the first to the last, or every one that another group does not have.
  bool Whole(const std::set<std::int64_t>& listed) const {
    std::set<std::int64_t> all;
    for (const RankLine& rank : ranks_) all.insert(rank.rank);
    return *all.begin() == 0 && static_cast<std::int64_t>(all.size()) == *all.rbegin() + 1 && !listed.empty();
  }

  const ReadOptions& options_;
  int line_ = 0;
  const Program* program_ = nullptr;  // that the text named since the last table
  std::vector<RankLine> ranks_;
  bool listed_ = false;       // all of them, for the tables that follow
  std::size_t measures_ = 0;  // columns of a row's measures; 0: not in a table
  bool stamped_ = false;
  std::vector<Row> rows_;
  Measurements made_;
};

}  // namespace

bool IsNcclTests(std::string_view text) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    if (!HeadOf(text.substr(0, end)).empty()) return true;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return false;
}

std::optional<CollectiveKind> KindOfProgram(std::string_view name) {
  const auto found = std::ranges::find(kPrograms, name, &Program::name);
  return found == kPrograms.end() ? std::nullopt : found->kind;
}

Result<Measurements> ReadNcclTests(std::string_view text, const ReadOptions& options) {
  return Reader(options).Read(text);
}

}  // namespace shardplan::internal
