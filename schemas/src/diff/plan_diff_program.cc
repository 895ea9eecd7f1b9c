// SPDX-License-Identifier: Apache-2.0
// Differences of two programs: triggers are aligned by what they are, the instructions of each by a longest
// common subsequence; what is left over on both sides is told as moved, changed, added or removed.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "diff/plan_diff.h"
#include "diff/plan_diff_lines.h"
#include "names/enum_names.h"
#include "text/plan_words.h"
#include "text/sentence_groups.h"

namespace shardplan {
namespace {

// An instruction of one plan that has no counterpart in its place in the other.
struct Leftover {
  const DiffLine* line = nullptr;
  std::string trigger;
  TriggerKind trigger_kind = TriggerKind::kStepBegin;
  bool told = false;
};

bool HasRole(const Plan& plan, BufferId buffer, BufferRole role) {
  return buffer >= 0 && buffer < static_cast<BufferId>(plan.buffers.size()) &&
         plan.buffers[static_cast<std::size_t>(buffer)].role == role;
}

// Positions of `a` and `b` that have no equal line in the other, whatever the order.
void UnmatchedSets(const std::vector<DiffLine>& a, const std::vector<DiffLine>& b,
                   std::vector<std::size_t>& only_a, std::vector<std::size_t>& only_b) {
  std::map<std::string_view, std::int64_t> surplus;
  for (const DiffLine& line : b) ++surplus[line.text];
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (surplus[a[i].text]-- <= 0) only_a.push_back(i);
  }
  for (std::size_t i = b.size(); i-- > 0;) {
    if (surplus[b[i].text]-- > 0) only_b.push_back(i);
  }
  std::ranges::reverse(only_b);
}

// Positions of `a` and `b` that a longest common subsequence leaves over.
void Unmatched(const std::vector<DiffLine>& a, const std::vector<DiffLine>& b,
               std::vector<std::size_t>& only_a, std::vector<std::size_t>& only_b) {
  std::size_t begin = 0;
  while (begin < a.size() && begin < b.size() && a[begin].text == b[begin].text) ++begin;
  std::size_t end = 0;
  while (end < a.size() - begin && end < b.size() - begin &&
         a[a.size() - 1 - end].text == b[b.size() - 1 - end].text)
    ++end;
  const std::size_t rows = a.size() - begin - end;
  const std::size_t columns = b.size() - begin - end;
  constexpr std::size_t kMaxCells = 16'000'000;
  if (columns > 0 && rows > kMaxCells / columns) return UnmatchedSets(a, b, only_a, only_b);
  std::vector<std::vector<std::uint32_t>> length(rows + 1, std::vector<std::uint32_t>(columns + 1, 0));
  for (std::size_t i = rows; i-- > 0;) {
    for (std::size_t k = columns; k-- > 0;) {
      length[i][k] = a[begin + i].text == b[begin + k].text ? length[i + 1][k + 1] + 1
                                                            : std::max(length[i + 1][k], length[i][k + 1]);
    }
  }
  std::size_t i = 0;
  std::size_t k = 0;
  while (i < rows || k < columns) {
    if (i < rows && k < columns && a[begin + i].text == b[begin + k].text) {
      ++i, ++k;
    } else if (k == columns || (i < rows && length[i + 1][k] >= length[i][k + 1])) {
      only_a.push_back(begin + i++);
    } else {
      only_b.push_back(begin + k++);
    }
  }
}

// The triggers of a step with the lines of their instructions; a trigger that comes twice gets a number.
struct StepLines {
  std::vector<std::string> order;
  std::map<std::string, const std::vector<DiffLine>*> triggers;
  std::map<std::string, std::size_t> position;
  std::map<std::string, TriggerKind> kinds;

  StepLines(const Plan& plan, const PlanStep& step, const std::vector<std::vector<DiffLine>>& lines) {
    const PlanWords words(plan);
    std::map<std::string, int> seen;
    for (std::size_t i = 0; i < step.triggers.size(); ++i) {
      std::string key = words.Line(step.triggers[i]);
      if (const int count = seen[key]++; count > 0) key += fmt::format(" (again {})", count);
      position[key] = order.size();
      kinds[key] = step.triggers[i].kind;
      triggers[key] = &lines[i];
      order.push_back(std::move(key));
    }
  }
};

class StepDiff {
 public:
  StepDiff(const PlanPair& plans, StepLines a, StepLines b)
      : plans_(plans), a_(std::move(a)), b_(std::move(b)) {}

  std::vector<std::string> Run() {
    CompareOrder();
    for (const std::string& key : a_.order) {
      if (!b_.triggers.contains(key)) Tell("only A passes the trigger " + key);
    }
    for (const std::string& key : b_.order) {
      if (!a_.triggers.contains(key)) Tell("only B passes the trigger " + key);
    }
    CollectLeftovers();
    TellMoved();
    TellChanged();
    TellRest(only_a_, plans_.a, "A", "B");
    TellRest(only_b_, plans_.b, "B", "A");
    return std::move(sentences_);
  }

 private:
  void Tell(std::string sentence) { sentences_.push_back(std::move(sentence)); }

  void CompareOrder() {
    const auto common = [](const StepLines& of, const StepLines& other) {
      std::vector<std::string> keys;
      std::ranges::copy_if(of.order, std::back_inserter(keys),
                           [&](const std::string& key) { return other.triggers.contains(key); });
      return keys;
    };
    const std::vector<std::string> a = common(a_, b_);
    const std::vector<std::string> b = common(b_, a_);
    const auto [at_a, at_b] = std::ranges::mismatch(a, b);
    if (at_a == a.end()) return;
    Tell(fmt::format("triggers come in another order: A passes {} where B passes {}", *at_a, *at_b));
  }

  void CollectLeftovers() {
    static const std::vector<DiffLine> kNone;
    std::vector<std::string> keys = a_.order;
    std::ranges::copy_if(b_.order, std::back_inserter(keys),
                         [&](const std::string& key) { return !a_.triggers.contains(key); });
    for (const std::string& key : keys) {
      const std::vector<DiffLine>& lines_a = a_.triggers.contains(key) ? *a_.triggers.at(key) : kNone;
      const std::vector<DiffLine>& lines_b = b_.triggers.contains(key) ? *b_.triggers.at(key) : kNone;
      std::vector<std::size_t> left_a, left_b;
      Unmatched(lines_a, lines_b, left_a, left_b);
      const TriggerKind kind = a_.kinds.contains(key) ? a_.kinds.at(key) : b_.kinds.at(key);
      for (const std::size_t i : left_a) only_a_.push_back({&lines_a[i], key, kind});
      for (const std::size_t i : left_b) only_b_.push_back({&lines_b[i], key, kind});
    }
  }

  // The same line left over in both: moved. All that moved between the same two triggers is told at once.
  void TellMoved() {
    std::map<std::string, std::vector<std::size_t>> lines_b;
    for (std::size_t i = only_b_.size(); i-- > 0;) lines_b[only_b_[i].line->text].push_back(i);
    struct Move {
      std::string from, to, unit;
      auto operator<=>(const Move&) const = default;
    };
    std::vector<Move> order;
    std::map<Move, std::vector<const DiffLine*>> moves;
    for (Leftover& in_a : only_a_) {
      auto candidates = lines_b.find(in_a.line->text);
      if (candidates == lines_b.end() || candidates->second.empty()) continue;
      Leftover& in_b = only_b_[candidates->second.back()];
      candidates->second.pop_back();
      in_a.told = in_b.told = true;
      const Move move{in_a.trigger, in_b.trigger, in_a.line->unit};
      if (moves[move].empty()) order.push_back(move);
      moves[move].push_back(in_a.line);
    }
    for (const Move& move : order) {
      const std::string what = Summary(moves[move]);
      if (move.from == move.to) {
        Tell(fmt::format("in {}, B issues {} at another place", move.from, what));
      } else {
        Tell(fmt::format("B issues {} {}: in {} instead of {}", what, Direction(move.from, move.to), move.to,
                         move.from));
      }
    }
  }
  std::string Direction(const std::string& from, const std::string& to) const {
    const StepLines& known = a_.position.contains(to) ? a_ : b_;
    if (!known.position.contains(from) || !known.position.contains(to)) return "elsewhere";
    return known.position.at(to) < known.position.at(from) ? "earlier" : "later";
  }

  // The same kind on the same operand in the same trigger with other details.
  void TellChanged() {
    std::map<std::string_view, std::vector<std::size_t>> in_trigger_of_b;
    for (std::size_t i = 0; i < only_b_.size(); ++i) in_trigger_of_b[only_b_[i].trigger].push_back(i);
    for (Leftover& in_a : only_a_) {
      if (in_a.told) continue;
      for (const std::size_t i : in_trigger_of_b[in_a.trigger]) {
        Leftover& in_b = only_b_[i];
        if (in_b.told || !SameSubject(in_a, in_b)) continue;
        in_a.told = in_b.told = true;
        Tell(fmt::format("in {}: \"{}\" in A, \"{}\" in B", in_a.trigger, in_a.line->text, in_b.line->text));
        break;
      }
    }
  }
  static bool SameSubject(const Leftover& a, const Leftover& b) {
    const auto subject = [](const std::string& line) {  // the kind and the first operand
      const std::size_t first = line.find(' ');
      return first == std::string::npos ? line : line.substr(0, line.find(' ', first + 1));
    };
    const InstructionKind kind = a.line->instruction->kind;
    return kind == b.line->instruction->kind && !IsOrder(kind) &&
           subject(a.line->text) == subject(b.line->text);
  }

  // Tells the rest of a trigger, unit by unit.
  void TellRest(std::vector<Leftover>& leftovers, const Plan& plan, const char* has, const char* has_not) {
    for (std::size_t i = 0; i < leftovers.size(); ++i) {
      if (leftovers[i].told) continue;
      std::vector<const DiffLine*> together;
      for (std::size_t k = i; k < leftovers.size() && leftovers[k].trigger == leftovers[i].trigger; ++k) {
        if (leftovers[k].told || leftovers[k].line->unit != leftovers[i].line->unit) continue;
        leftovers[k].told = true;
        together.push_back(leftovers[k].line);
      }
      Tell(fmt::format("in {}, {} {}; {} does not", leftovers[i].trigger, has,
                       Deed(plan, together, leftovers[i].trigger_kind), has_not));
    }
  }

  // "reshards layers.3 (bind_sharded, free)" where it is one of the big things, else the lines.
  static std::string Deed(const Plan& plan, const std::vector<const DiffLine*>& lines, TriggerKind trigger) {
    std::string deed;
    const std::string& unit = lines.front()->unit;
    const bool prepares = trigger == TriggerKind::kLazyInit;
    const auto has = [&](InstructionKind kind, auto... role) {
      return std::ranges::any_of(lines, [&](const DiffLine* line) {
        const Instruction& instruction = *line->instruction;
        return instruction.kind == kind && (HasRole(plan, instruction.src, role) && ...);
      });
    };
    const auto add = [&](bool done, const char* what) {
      if (done) deed += fmt::format("{}{} {}", deed.empty() ? "" : " and ", what, unit);
    };
    const bool gathers = has(InstructionKind::kAllGather);
    add(prepares, "prepares");
    add(gathers, "unshards");
    add(!gathers && has(InstructionKind::kBindUnsharded), "finishes unsharding");
    const bool keeps = has(InstructionKind::kReshardPostForward);
    add(keeps, "reshards to the smaller mesh");
    add(!keeps && !prepares && has(InstructionKind::kFree, BufferRole::kParamUnsharded), "reshards");
    add(has(InstructionKind::kReduceScatter), "reduce-scatters the gradients of");
    const bool counts = has(InstructionKind::kAllReduce, BufferRole::kOrderCheck);
    add(has(InstructionKind::kAllReduce) && !counts, "all-reduces the gradients of");
    if (!deed.empty()) return fmt::format("{} ({})", deed, Kinds(lines));
    constexpr std::size_t kMostLines = 4;
    if (lines.size() > kMostLines)
      return fmt::format("issues {} of {}", Kinds(lines), unit.empty() ? "no unit" : unit);
    std::string text;
    for (const DiffLine* line : lines) text += fmt::format("{}\"{}\"", text.empty() ? "" : ", ", line->text);
    return "issues " + text;
  }

  // "allocate, copy_in, all_gather", each kind once.
  static std::string Kinds(const std::vector<const DiffLine*>& lines) {
    std::string text;
    std::set<InstructionKind> seen;
    for (const DiffLine* line : lines) {
      if (!seen.insert(line->instruction->kind).second) continue;
      text += fmt::format("{}{}", text.empty() ? "" : ", ", EnumName(line->instruction->kind));
    }
    return text;
  }
  // "allocate, copy_in, all_gather of layers.2".
  static std::string Summary(const std::vector<const DiffLine*>& lines) {
    if (lines.size() == 1) return fmt::format("\"{}\"", lines.front()->text);
    return fmt::format("{} of {}", Kinds(lines),
                       lines.front()->unit.empty() ? "no unit" : lines.front()->unit);
  }

  const PlanPair& plans_;
  StepLines a_;
  StepLines b_;
  std::vector<std::string> sentences_;
  std::vector<Leftover> only_a_;
  std::vector<Leftover> only_b_;
};

}  // namespace

std::vector<std::string> ProgramDifferences(const PlanPair& plans) {
  std::vector<std::string> sentences;
  const std::vector<PlanStep>& a = plans.a.steps;
  const std::vector<PlanStep>& b = plans.b.steps;
  const auto lines_a = DiffLinesOf(plans.a);
  const auto lines_b = DiffLinesOf(plans.b);
  std::vector<std::string> told;                          // in the order in which they were first said
  std::map<std::string, std::vector<std::string>> where;  // in which steps
  const std::size_t common = std::min(a.size(), b.size());
  for (std::size_t i = 0; i < common; ++i) {
    if (a[i].name != b[i].name)
      sentences.push_back(fmt::format("step {} of A is called {} in B", a[i].name, b[i].name));
    StepDiff diff(plans, StepLines(plans.a, a[i], lines_a[i]), StepLines(plans.b, b[i], lines_b[i]));
    for (std::string& sentence : GroupSentences(diff.Run())) {
      if (where[sentence].empty()) told.push_back(sentence);
      where[sentence].push_back(a[i].name);
    }
  }
  for (const std::string& sentence : told) {
    const std::vector<std::string>& steps = where[sentence];
    const bool everywhere = steps.size() == common && common > 1;
    for (const std::string& step : steps) {
      sentences.push_back(everywhere ? sentence : fmt::format("step {}: {}", step, sentence));
      if (everywhere) break;
    }
  }
  for (std::size_t i = common; i < std::max(a.size(), b.size()); ++i) {
    const PlanStep& step = i < a.size() ? a[i] : b[i];
    sentences.push_back(fmt::format("step {}: only in {} ({} triggers)", step.name, i < a.size() ? "A" : "B",
                                    step.triggers.size()));
  }
  return sentences;
}

}  // namespace shardplan
