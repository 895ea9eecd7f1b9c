// SPDX-License-Identifier: Apache-2.0
#include "diff/plan_diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "diff/field_diff.h"
#include "documents/plan_fields.h"
#include "shardplan/schemas/plan_text.h"
#include "text/plan_text_fields.h"
#include "text/plan_words.h"
#include "text/sentence_groups.h"

namespace shardplan {
namespace {

void Append(std::vector<std::string>& to, std::vector<std::string> from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

// Elements of both lists by name (the k-th of a name with the k-th): gone, new, and changed field by field.
template <typename T>
void CompareTables(const PlanPair& plans, const char* what, const std::vector<T>& a, const std::vector<T>& b,
                   std::vector<std::string>& sentences) {
  std::map<std::pair<std::string, int>, const T*> in_b;
  std::map<std::string, int> count_a, count_b;
  for (const T& element : b) {
    const std::string key = ElementKey(element);
    in_b[{key, count_b[key]++}] = &element;
  }
  for (const T& element : a) {
    const std::string key = ElementKey(element);
    const auto other = in_b.find({key, count_a[key]++});
    if (other == in_b.end()) {
      sentences.push_back(fmt::format("{} {}: only in A", what, key));
      continue;
    }
    FieldDiff diff(&plans.names_a, &plans.names_b);
    diff.Compare(fmt::format("{} {}", what, key), element, *other->second);
    Append(sentences, diff.Take());
  }
  for (const T& element : b) {
    const std::string key = ElementKey(element);
    if (count_a[key]-- > 0) continue;
    sentences.push_back(fmt::format("{} {}: only in B", what, key));
  }
}

// FLOPs, bytes and entries of a segment.
struct SegmentSum {
  std::size_t operators = 0;
  std::int64_t flops = 0;
  Nanoseconds duration_ns;
  Bytes allocated_bytes;
  Bytes traffic_bytes;
  bool operator==(const SegmentSum&) const = default;
};

SegmentSum SumOf(const Segment& segment) {
  SegmentSum sum;
  for (const SegmentEntry& entry : segment.entries) {
    if (const auto* op = std::get_if<OperatorEvent>(&entry)) {
      ++sum.operators;
      sum.flops += op->flops;
      if (op->duration_ns.value > 0) sum.duration_ns += op->duration_ns;
      sum.traffic_bytes += op->bytes_read + op->bytes_written;
    } else if (const auto* allocate = std::get_if<AllocateEvent>(&entry)) {
      sum.allocated_bytes += allocate->size_bytes;
    }
  }
  return sum;
}

std::string SumText(const SegmentSum& sum) {
  return fmt::format("{} operators, {} FLOPs, {} bytes moved, {} bytes allocated, {} ns measured",
                     sum.operators, sum.flops, sum.traffic_bytes.value, sum.allocated_bytes.value,
                     sum.duration_ns.value);
}

// Without what only explains: reasons and numbering.
Plan WithoutReasons(Plan plan) {
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) {
      for (Instruction& instruction : trigger.instructions.Edit()) instruction.reason.clear();
    }
  }
  for (Procedure& procedure : plan.procedures) {
    for (Instruction& instruction : procedure.instructions.Edit()) instruction.reason.clear();
  }
  return plan;
}

}  // namespace

std::vector<std::string> TableDifferences(const PlanPair& plans) {
  std::vector<std::string> sentences;
  FieldDiff diff(&plans.names_a, &plans.names_b);
  diff.Compare("plan", PlanHeaderOf(plans.a), PlanHeaderOf(plans.b));
  diff.Compare("strategy", plans.a.strategy, plans.b.strategy);
  diff.Compare("cluster", plans.a.cluster, plans.b.cluster);
  Append(sentences, diff.Take());
  CompareTables(plans, "communicator", plans.a.communicators, plans.b.communicators, sentences);
  CompareTables(plans, "stream", plans.a.streams, plans.b.streams, sentences);
  CompareTables(plans, "unit", plans.a.units, plans.b.units, sentences);
  CompareTables(plans, "buffer", plans.a.buffers, plans.b.buffers, sentences);
  CompareTables(plans, "exchange", plans.a.exchanges, plans.b.exchanges, sentences);
  CompareTables(plans, "input", plans.a.inputs, plans.b.inputs, sentences);
  CompareTables(plans, "model buffer", plans.a.model_buffers, plans.b.model_buffers, sentences);
  return sentences;
}

std::vector<std::string> SegmentDifferences(const PlanPair& plans) {
  std::vector<std::string> sentences;
  std::vector<SegmentHeader> headers_a, headers_b;
  std::map<std::pair<std::string, int>, const Segment*> in_b;
  std::map<std::string, int> count_a, count_b;
  for (const Segment& segment : plans.b.segments) {
    headers_b.push_back(SegmentHeaderOf(segment));
    in_b[{segment.name, count_b[segment.name]++}] = &segment;
  }
  for (const Segment& segment : plans.a.segments) {
    headers_a.push_back(SegmentHeaderOf(segment));
    const auto other = in_b.find({segment.name, count_a[segment.name]++});
    if (other == in_b.end() || segment.entries == other->second->entries) continue;
    const SegmentSum a = SumOf(segment);
    const SegmentSum b = SumOf(*other->second);
    sentences.push_back(
        a == b
            ? fmt::format("segment {}: the same work in another order or with other storages", segment.name)
            : fmt::format("segment {}: {} in A; {} in B", segment.name, SumText(a), SumText(b)));
  }
  CompareTables(plans, "segment", headers_a, headers_b, sentences);
  return sentences;
}

std::vector<std::string> ProcedureDifferences(const PlanPair& plans) {
  const auto lines_of = [](const Plan& plan, const PlanNames& names) {
    std::map<std::string, std::vector<std::string>> lines;
    const PlanWords words(plan, &names);
    for (const Procedure& procedure : plan.procedures) {
      auto& of_one = lines[fmt::format("procedure {} of {}", Name(procedure.kind),
                                       words.Word(RefKind::kUnit, procedure.unit))];
      for (const Instruction& instruction : procedure.instructions) of_one.push_back(words.Line(instruction));
    }
    return lines;
  };
  const auto a = lines_of(plans.a, plans.names_a), b = lines_of(plans.b, plans.names_b);
  std::vector<std::string> sentences;
  for (const auto& [name, lines] : a) {
    const auto other = b.find(name);
    if (other == b.end()) {
      sentences.push_back(fmt::format("{}: only in A", name));
      continue;
    }
    const auto [at_a, at_b] = std::ranges::mismatch(lines, other->second);
    if (at_a == lines.end() && at_b == other->second.end()) continue;
    sentences.push_back(fmt::format("{}: instruction {} is {} in A, {} in B", name, at_a - lines.begin(),
                                    at_a == lines.end() ? "none" : *at_a,
                                    at_b == other->second.end() ? "none" : *at_b));
  }
  for (const auto& [name, lines] : b) {
    if (!a.contains(name)) sentences.push_back(fmt::format("{}: only in B", name));
  }
  return sentences;
}

std::vector<std::string> DescribeDifferences(const Plan& a, const Plan& b) {
  if (a == b) return {};
  const PlanPair plans(a, b);
  std::vector<std::string> sentences = TableDifferences(plans);
  Append(sentences, SegmentDifferences(plans));
  Append(sentences, ProgramDifferences(plans));
  Append(sentences, ProcedureDifferences(plans));
  if (!sentences.empty()) return GroupSentences(sentences);
  if (WithoutReasons(a) == WithoutReasons(b)) return {"only the reasons given for instructions differ"};
  return {
      "the plans do the same; only the order and numbering of their tables or events (or reasons) differ"};
}

}  // namespace shardplan
