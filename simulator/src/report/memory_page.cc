// The memory page: the figures as one JSON object, and the page that draws them
// (simulator/src/report/page/memory.js).
#include "shardplan/simulator/memory_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "report/format.h"
#include "report/report_builder.h"
#include "report/report_page.h"
#include "shardplan/simulator/memory_explanation.h"

namespace shardplan {
namespace {

using internal::AppendJsonString;

constexpr std::int64_t kGranularity = 512;

constexpr std::string_view kBody = R"page(
<main>
<header><h1>@MODEL</h1><span class="sub">@ABOUT</span></header>
<section><h2>Allocated bytes over the steady step</h2><p class="hint">@PEAK Wheel zooms, drag moves, double click shows the whole step.</p>
<canvas id="plot"></canvas><div class="legend" id="legend"></div></section>
<section id="mapbox"><h2>Addresses over the steady step</h2>
<p class="hint">@RESERVED Segments of the caching allocator one above the other; grey is reserved and free.</p>
<canvas id="map"></canvas></section>
</main><div id="tip"></div>
)page";

class PageWriter {
 public:
  PageWriter(const Plan& plan, const MemoryStream& stream, const ReservedMemory* reserved, std::string& out)
      : plan_(plan), stream_(stream), reserved_(reserved), out_(out) {
    const std::int32_t steady = plan.steps.size() == 1 ? 0 : plan.steady_step;
    begin_ = end_ = static_cast<std::int32_t>(stream.actions.size());
    for (std::size_t a = stream.first_recorded; a < stream.actions.size(); ++a) {
      if (stream.actions[a].at.step != steady) continue;
      begin_ = std::min(begin_, static_cast<std::int32_t>(a));
      end_ = static_cast<std::int32_t>(a);
    }
  }

  void Write(std::int32_t peak) {
    out_ += "{\"categories\":";
    WriteList(MemoryCategories(), [&](const std::string& name) { AppendJsonString(out_, name); });
    out_ += ",\"units\":";
    std::vector<std::string> units;
    for (std::size_t u = 0; u < plan_.units.size(); ++u)
      units.push_back(UnitText(plan_, static_cast<UnitId>(u)));
    WriteList(units, [&](const std::string& name) { AppendJsonString(out_, name); });
    out_ += fmt::format(",\"begin\":{},\"end\":{},\"peak\":{},\n\"marks\":[", begin_, end_, peak);
    WriteMarks();
    out_ += "],\n\"blocks\":[";
    WriteBlocks();
    out_ += "],\n\"segments\":[";
    WriteSegments();
    out_ += "],\n\"labels\":";
    WriteList(labels_, [&](const std::string& label) { AppendJsonString(out_, label); });
    out_ += "}";
  }

 private:
  template <typename List, typename WriteItem>
  void WriteList(const List& list, WriteItem write) {
    out_ += '[';
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (i > 0) out_ += ',';
      write(list[i]);
    }
    out_ += ']';
  }

  std::size_t LabelIndex(std::string label) {
    const auto [it, added] = label_index_.try_emplace(std::move(label), labels_.size());
    if (added) labels_.push_back(it->first);
    return it->second;
  }

  // Where the triggers are: at the first action in each.
  void WriteMarks() {
    std::int32_t trigger = -2;
    bool first = true;
    for (std::int32_t a = begin_; a <= end_ && static_cast<std::size_t>(a) < stream_.actions.size(); ++a) {
      const MemoryPoint& at = stream_.actions[static_cast<std::size_t>(a)].at;
      if (at.trigger == trigger) continue;
      trigger = at.trigger;
      const auto& triggers = plan_.steps[static_cast<std::size_t>(at.step)].triggers;
      if (trigger < 0 || static_cast<std::size_t>(trigger) >= triggers.size()) continue;
      const std::string text = internal::TriggerText(plan_, triggers[static_cast<std::size_t>(trigger)]);
      out_ += fmt::format("{}[{},{}]", first ? "" : ",", a, LabelIndex(text));
      first = false;
    }
  }

  void WriteBlocks() {
    bool first = true;
    for (std::size_t b = 0; b < stream_.blocks.size(); ++b) {
      const MemoryBlock& block = stream_.blocks[b];
      if (block.requested_bytes.value == 0 || block.born > end_ || (block.died >= 0 && block.died < begin_))
        continue;
      const std::int64_t bytes =
          (block.requested_bytes.value + kGranularity - 1) / kGranularity * kGranularity;
      BlockPlacement at;
      if (reserved_ != nullptr && b < reserved_->placements.size()) at = reserved_->placements[b];
      out_ += fmt::format("{}[{},{},{},{},{},{},{},{}]", first ? "" : ",\n", bytes, block.category,
                          block.unit, LabelIndex(BlockName(plan_, stream_, static_cast<std::int32_t>(b))),
                          block.born, block.died, at.address - base_address(), at.size_bytes.value);
      first = false;
    }
  }

  // By address.
  void WriteSegments() {
    if (reserved_ == nullptr) return;
    std::vector<SegmentLife> lives = reserved_->segments;
    std::erase_if(lives, [&](const SegmentLife& s) { return s.to >= 0 && s.to < begin_; });
    std::ranges::sort(lives, {}, [](const SegmentLife& s) { return std::pair(s.address, s.from); });
    bool first = true;
    for (const SegmentLife& s : lives) {
      out_ += fmt::format("{}[{},{},{},{}]", first ? "" : ",", s.address - base_address(), s.size_bytes.value,
                          s.from, s.to);
      first = false;
    }
  }

  // Addresses are written relative to the first, so that they are exact as JavaScript numbers.
  DeviceAddress base_address() const {
    return reserved_ == nullptr || reserved_->segments.empty() ? 0 : reserved_->segments.front().address;
  }

  const Plan& plan_;
  const MemoryStream& stream_;
  const ReservedMemory* reserved_;
  std::string& out_;
  std::int32_t begin_ = 0;
  std::int32_t end_ = 0;
  std::vector<std::string> labels_;
  std::map<std::string, std::size_t> label_index_;
};

}  // namespace

std::string MemoryHtml(const Plan& plan, const MemoryStream& stream, const ReservedMemory* reserved) {
  const MemoryExplanation explanation = ExplainMemory(plan, stream);
  const std::string model = internal::HtmlText(plan.model.empty() ? "shardplan" : plan.model);
  std::string body(kBody);
  internal::Replace(body, "@MODEL", model);
  internal::Replace(
      body, "@ABOUT",
      internal::HtmlText(fmt::format("{}, {} ranks, memory of one", plan.policy, plan.world_size)));
  internal::Replace(
      body, "@PEAK",
      internal::HtmlText(
          fmt::format("Peak {} in {}.", internal::Gibibytes(explanation.peak_bytes), explanation.peak_text)));
  const Bytes held = reserved == nullptr ? Bytes{} : reserved->peak_reserved_bytes;
  internal::Replace(body, "@RESERVED", fmt::format("At most {} reserved.", internal::Gibibytes(held)));
  std::string out = internal::PageHead(model + " &ndash; memory", body);
  PageWriter(plan, stream, reserved, out).Write(explanation.peak_action);
  out += internal::PageTail(internal::MemoryScript());
  return out;
}

}  // namespace shardplan
