// SPDX-License-Identifier: Apache-2.0
#include "documents/plan_parts.h"

#include <utility>

#include "documents/document_json.h"
#include "documents/plan_check.h"
#include "documents/plan_fields.h"
#include "documents/plan_outline.h"

namespace shardplan {
namespace {

class TextInMemory final : public DocumentBytes {
 public:
  explicit TextInMemory(std::string_view text) : text_(text) {}
  std::size_t size() const override { return text_.size(); }
  std::string_view Read(std::size_t begin, std::size_t end) override {
    return text_.substr(begin, end - begin);
  }

 private:
  std::string_view text_;
};

class PartsReader {
 public:
  explicit PartsReader(DocumentBytes& bytes) : bytes_(bytes) {}

  std::optional<Plan> Read() {
    std::optional<PlanOutline> outline = OutlineOf(bytes_);
    if (!outline) return std::nullopt;
    const Result<JsonTape> rest = JsonTape::Parse(outline->rest);
    if (!rest) return std::nullopt;
    outline->rest = {};
    Plan plan;
    if (!ExpectSchema(*rest, kPlanSchema) || !JsonReader(*rest, context_).ReadDocument(plan)) {
      return std::nullopt;
    }
    const auto of_plan = [](std::string_view name) { return SpecOf<Plan>(name); };
    if (!ReadList(outline->buffers, of_plan("buffers"), plan.buffers)) return std::nullopt;
    context_.Define(RefKind::kBuffer, plan.buffers);
    if (!ReadList(outline->segments, of_plan("segments"), plan.segments)) return std::nullopt;
    context_.Define(RefKind::kSegment, plan.segments);
    if (outline->triggers.size() != plan.steps.size()) return std::nullopt;
    for (std::size_t s = 0; s < plan.steps.size(); ++s) {
      if (!ReadList(outline->triggers[s], {}, plan.steps[s].triggers)) return std::nullopt;
    }
    if (!ReadList(outline->procedures, {}, plan.procedures)) return std::nullopt;
    if (!CheckPlan(plan)) return std::nullopt;
    return plan;
  }

 private:
  template <typename T>
  static Spec SpecOf(std::string_view name) {
    Spec spec;
    ForEachField<T>([&](const auto& field) {
      if (field.name == name) spec = field.spec;
      return field.name != name;
    });
    return spec;
  }

  template <typename T>
  bool ReadList(std::vector<TextRange>& ranges, const Spec& spec, std::vector<T>& list) {
    list.reserve(ranges.size());
    for (const TextRange& range : ranges) {
      const Result<JsonTape> tape = JsonTape::Parse(bytes_.Read(range.begin, range.end));
      if (!tape || !JsonReader(*tape, context_).ReadElementOf(list, spec)) return false;
    }
    ranges = {};
    return true;
  }

  DocumentBytes& bytes_;
  ReadingContext context_;
};

}  // namespace

std::optional<Plan> ReadPlanByParts(DocumentBytes& bytes) { return PartsReader(bytes).Read(); }

std::optional<Plan> ReadPlanByParts(std::string_view text) {
  TextInMemory bytes(text);
  return ReadPlanByParts(bytes);
}

}  // namespace shardplan
