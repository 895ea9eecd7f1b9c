// Differences of two programs: triggers are aligned by what they are, the instructions of each by a longest
// common subsequence; what is left over on both sides is told as moved, changed, added or removed.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "enum_names.h"
#include "plan_diff.h"
#include "plan_words.h"

namespace shardplan {
namespace {

// An instruction of one plan that has no counterpart in its place in the other.
struct Leftover {
  std::string line;
  std::string trigger;
  const Instruction* instruction = nullptr;
  std::string unit;  // whose parameters it is about; "" unknown
  bool told = false;
};

std::string UnitOf(const Plan& plan, const PlanWords& words, const Instruction& instruction) {
  if (instruction.unit >= 0) return words.Word(RefKind::kUnit, instruction.unit);
  for (const BufferId buffer : {instruction.src, instruction.dst}) {
    if (buffer < 0 || buffer >= static_cast<BufferId>(plan.buffers.size())) continue;
    const UnitId unit = plan.buffers[static_cast<std::size_t>(buffer)].unit;
    if (unit >= 0) return words.Word(RefKind::kUnit, unit);
  }
  return "";
}

bool HasRole(const Plan& plan, BufferId buffer, BufferRole role) {
  return buffer >= 0 && buffer < static_cast<BufferId>(plan.buffers.size()) &&
         plan.buffers[static_cast<std::size_t>(buffer)].role == role;
}

// Positions of `a` and `b` that have no equal line in the other, whatever the order.
void UnmatchedSets(const std::vector<std::string>& a, const std::vector<std::string>& b,
                   std::vector<std::size_t>& only_a, std::vector<std::size_t>& only_b) {
  std::map<std::string_view, std::int64_t> surplus;
  for (const std::string& line : b) ++surplus[line];
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (surplus[a[i]]-- <= 0) only_a.push_back(i);
  }
  for (std::size_t i = b.size(); i-- > 0;) {
    if (surplus[b[i]]-- > 0) only_b.push_back(i);
  }
  std::ranges::reverse(only_b);
}

// Positions of `a` and `b` that a longest common subsequence leaves over.
void Unmatched(const std::vector<std::string>& a, const std::vector<std::string>& b,
               std::vector<std::size_t>& only_a, std::vector<std::size_t>& only_b) {
  std::size_t begin = 0;
  while (begin < a.size() && begin < b.size() && a[begin] == b[begin]) ++begin;
  std::size_t end = 0;
  while (end < a.size() - begin && end < b.size() - begin && a[a.size() - 1 - end] == b[b.size() - 1 - end])
    ++end;
  const std::size_t rows = a.size() - begin - end;
  const std::size_t columns = b.size() - begin - end;
  constexpr std::size_t kMaxCells = 16'000'000;
  if (columns > 0 && rows > kMaxCells / columns) return UnmatchedSets(a, b, only_a, only_b);
  std::vector<std::vector<std::uint32_t>> length(rows + 1, std::vector<std::uint32_t>(columns + 1, 0));
  for (std::size_t i = rows; i-- > 0;) {
    for (std::size_t k = columns; k-- > 0;) {
      length[i][k] = a[begin + i] == b[begin + k] ? length[i + 1][k + 1] + 1
                                                  : std::max(length[i + 1][k], length[i][k + 1]);
    }
  }
  std::size_t i = 0;
  std::size_t k = 0;
  while (i < rows || k < columns) {
    if (i < rows && k < columns && a[begin + i] == b[begin + k]) {
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
  std::map<std::string, const Trigger*> triggers;
  std::map<std::string, std::size_t> position;

  StepLines(const PlanWords& words, const PlanStep& step) {
    std::map<std::string, int> seen;
    for (const Trigger& trigger : step.triggers) {
      std::string key = words.Line(trigger);
      if (const int count = seen[key]++; count > 0) key += fmt::format(" (again {})", count);
      position[key] = order.size();
      triggers[key] = &trigger;
      order.push_back(std::move(key));
    }
  }
};

class StepDiff {
 public:
  StepDiff(const PlanPair& plans, const PlanStep& a, const PlanStep& b, std::vector<std::string>& sentences)
      : plans_(plans),
        words_a_(plans.a),
        words_b_(plans.b),
        a_(words_a_, a),
        b_(words_b_, b),
        step_(a.name),
        sentences_(sentences) {}

  void Run() {
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
  }

 private:
  void Tell(const std::string& sentence) {
    sentences_.push_back(fmt::format("step {}: {}", step_, sentence));
  }

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

  static std::vector<std::string> Lines(const PlanWords& words, const Trigger& trigger) {
    std::vector<std::string> lines;
    for (Instruction instruction : trigger.instructions) {
      instruction.reason.clear();
      lines.push_back(words.Line(instruction));
    }
    return lines;
  }
  void CollectLeftovers() {
    static const Trigger kNone;
    std::vector<std::string> keys = a_.order;
    std::ranges::copy_if(b_.order, std::back_inserter(keys),
                         [&](const std::string& key) { return !a_.triggers.contains(key); });
    for (const std::string& key : keys) {
      const Trigger& in_a = a_.triggers.contains(key) ? *a_.triggers.at(key) : kNone;
      const Trigger& in_b = b_.triggers.contains(key) ? *b_.triggers.at(key) : kNone;
      const std::vector<std::string> lines_a = Lines(words_a_, in_a);
      const std::vector<std::string> lines_b = Lines(words_b_, in_b);
      std::vector<std::size_t> left_a, left_b;
      Unmatched(lines_a, lines_b, left_a, left_b);
      for (const std::size_t i : left_a) {
        const Instruction& instruction = in_a.instructions[i];
        only_a_.push_back({lines_a[i], key, &instruction, UnitOf(plans_.a, words_a_, instruction)});
      }
      for (const std::size_t i : left_b) {
        const Instruction& instruction = in_b.instructions[i];
        only_b_.push_back({lines_b[i], key, &instruction, UnitOf(plans_.b, words_b_, instruction)});
      }
    }
  }

  // The same line left over in both: moved. All that moved between the same two triggers is told at once.
  void TellMoved() {
    std::map<std::string, std::vector<std::size_t>> lines_b;
    for (std::size_t i = only_b_.size(); i-- > 0;) lines_b[only_b_[i].line].push_back(i);
    std::vector<std::pair<std::string, std::string>> order;
    std::map<std::pair<std::string, std::string>, std::vector<const Leftover*>> moves;
    for (Leftover& in_a : only_a_) {
      auto candidates = lines_b.find(in_a.line);
      if (candidates == lines_b.end() || candidates->second.empty()) continue;
      Leftover& in_b = only_b_[candidates->second.back()];
      candidates->second.pop_back();
      in_a.told = in_b.told = true;
      const std::pair<std::string, std::string> move(in_a.trigger, in_b.trigger);
      if (moves[move].empty()) order.push_back(move);
      moves[move].push_back(&in_a);
    }
    for (const auto& move : order) {
      const std::string what = Summary(moves[move]);
      if (move.first == move.second) {
        Tell(fmt::format("in {}, B issues {} at another place", move.first, what));
      } else {
        Tell(fmt::format("B issues {} {}: in {} instead of {}", what, Direction(move.first, move.second),
                         move.second, move.first));
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
        Tell(fmt::format("in {}: \"{}\" in A, \"{}\" in B", in_a.trigger, in_a.line, in_b.line));
        break;
      }
    }
  }
  static bool SameSubject(const Leftover& a, const Leftover& b) {
    const auto subject = [](const std::string& line) {  // the kind and the first operand
      const std::size_t first = line.find(' ');
      return first == std::string::npos ? line : line.substr(0, line.find(' ', first + 1));
    };
    return a.instruction->kind == b.instruction->kind && subject(a.line) == subject(b.line);
  }

  void TellRest(std::vector<Leftover>& leftovers, const Plan& plan, const char* has, const char* has_not) {
    for (std::size_t i = 0; i < leftovers.size(); ++i) {
      if (leftovers[i].told) continue;
      std::vector<const Leftover*> same_trigger;
      for (std::size_t k = i; k < leftovers.size(); ++k) {
        if (leftovers[k].trigger != leftovers[i].trigger) break;  // they were collected trigger by trigger
        if (leftovers[k].told) continue;
        leftovers[k].told = true;
        same_trigger.push_back(&leftovers[k]);
      }
      Tell(fmt::format("in {}, {} {}; {} does not", leftovers[i].trigger, has, Deed(plan, same_trigger),
                       has_not));
    }
  }

  // "reshards layers.3 (bind_sharded ..., free ...)".
  std::string Deed(const Plan& plan, const std::vector<const Leftover*>& leftovers) const {
    std::vector<std::string> deeds;
    const auto add = [&](const std::string& deed) {
      if (std::ranges::find(deeds, deed) == deeds.end()) deeds.push_back(deed);
    };
    std::string lines;
    for (const Leftover* leftover : leftovers) {
      const Instruction& instruction = *leftover->instruction;
      if (instruction.kind == InstructionKind::kAllGather) add("unshards " + leftover->unit);
      if (instruction.kind == InstructionKind::kReduceScatter)
        add("reduces the gradients of " + leftover->unit);
      if (instruction.kind == InstructionKind::kAllReduce)
        add("all-reduces the gradients of " + leftover->unit);
      if (instruction.kind == InstructionKind::kFree &&
          HasRole(plan, instruction.src, BufferRole::kParamUnsharded)) {
        add("reshards " + leftover->unit);
      }
      lines += (lines.empty() ? "" : "; ") + leftover->line;
    }
    std::string text;
    for (const std::string& deed : deeds) text += (text.empty() ? "" : " and ") + deed;
    return text.empty() ? "has " + lines : fmt::format("{} ({})", text, lines);
  }

  // "allocate, copy_in, all_gather of layers.2".
  static std::string Summary(const std::vector<const Leftover*>& leftovers) {
    if (leftovers.size() == 1) return leftovers.front()->line;
    std::vector<std::string> kinds;
    std::vector<std::string> units;
    const auto add = [](std::vector<std::string>& to, std::string text) {
      if (!text.empty() && std::ranges::find(to, text) == to.end()) to.push_back(std::move(text));
    };
    for (const Leftover* leftover : leftovers) {
      add(kinds, std::string(EnumName(leftover->instruction->kind)));
      add(units, leftover->unit);
    }
    const auto join = [](const std::vector<std::string>& words) {
      std::string text;
      for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
      return text;
    };
    return units.empty() ? join(kinds) : fmt::format("{} of {}", join(kinds), join(units));
  }

  const PlanPair& plans_;
  PlanWords words_a_;
  PlanWords words_b_;
  StepLines a_;
  StepLines b_;
  std::string step_;
  std::vector<std::string>& sentences_;
  std::vector<Leftover> only_a_;
  std::vector<Leftover> only_b_;
};

}  // namespace

std::vector<std::string> ProgramDifferences(const PlanPair& plans) {
  std::vector<std::string> sentences;
  const std::vector<PlanStep>& a = plans.a.steps;
  const std::vector<PlanStep>& b = plans.b.steps;
  for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    if (i >= a.size() || i >= b.size()) {
      const PlanStep& step = i < a.size() ? a[i] : b[i];
      sentences.push_back(fmt::format("step {}: only in {} ({} triggers)", step.name,
                                      i < a.size() ? "A" : "B", step.triggers.size()));
      continue;
    }
    if (a[i].name != b[i].name) {
      sentences.push_back(fmt::format("step {} of A is called {} in B", a[i].name, b[i].name));
    }
    StepDiff(plans, a[i], b[i], sentences).Run();
  }
  return sentences;
}

}  // namespace shardplan
