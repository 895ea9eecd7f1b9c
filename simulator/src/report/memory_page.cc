// SPDX-License-Identifier: Apache-2.0
// The memory page: the figures as one JSON object, and the page that draws them
// (simulator/src/report/page/memory.js).

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "report/page.h"
#include "shardplan/simulator/memory_explanation.h"
#include "text/format.h"
#include "text/instruction_text.h"

namespace shardplan {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kGranularity = 512;

constexpr std::string_view kMemoryBody = R"page(
<main>
<header><h1>@MODEL</h1><span class="sub">@ABOUT</span></header>
<section><h2>Allocated bytes over the steady step</h2><p class="hint">@PEAK Wheel or + and &minus; zoom, drag or arrows move, double click or 0 shows the whole step.</p>
<canvas id="plot" role="img" aria-label="allocated bytes by category"></canvas><div class="legend" id="legend"></div></section>
<section id="mapbox"><h2>Addresses over the steady step</h2>
<p class="hint">@RESERVED Segments of the caching allocator one above the other; grey is reserved and free.</p>
<canvas id="map" role="img" aria-label="blocks by address"></canvas></section>
</main><div id="tip"></div>
)page";

// The data of the page, as memory.js reads it.
class PageData {
 public:
  PageData(const Plan& plan, const MemoryHistory& history, const ReservedMemory* reserved)
      : plan_(plan), history_(history), reserved_(reserved) {
    const std::int32_t steady = plan.steps.size() == 1 ? 0 : plan.steady_step;
    begin_ = end_ = static_cast<std::int32_t>(history.actions.size());
    for (std::size_t a = history.first_recorded; a < history.actions.size(); ++a) {
      if (history.actions[a].at.step != steady) continue;
      begin_ = std::min(begin_, static_cast<std::int32_t>(a));
      end_ = static_cast<std::int32_t>(a);
    }
  }

  Json Make(std::int32_t peak) {
    Json data = {{"categories", MemoryCategories()}, {"units", Json::array()}};
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      data["units"].push_back(UnitText(plan_, static_cast<UnitId>(u)));
    }
    data["begin"] = begin_;
    data["end"] = end_;
    data["peak"] = peak;
    data["marks"] = Marks();
    data["blocks"] = Blocks();
    data["segments"] = Segments();
    data["labels"] = labels_;
    return data;
  }

 private:
  std::size_t LabelIndex(std::string label) {
    const auto [it, added] = label_index_.try_emplace(std::move(label), labels_.size());
    if (added) labels_.push_back(it->first);
    return it->second;
  }

  // [action, label]: where the triggers are, at the first action in each.
  Json Marks() {
    Json marks = Json::array();
    std::int32_t trigger = -2;
    for (std::int32_t a = begin_; a <= end_ && static_cast<std::size_t>(a) < history_.actions.size(); ++a) {
      const MemoryPoint& at = history_.actions[static_cast<std::size_t>(a)].at;
      if (at.trigger == trigger) continue;
      trigger = at.trigger;
      const auto& triggers = plan_.steps[static_cast<std::size_t>(at.step)].triggers;
      if (trigger < 0 || static_cast<std::size_t>(trigger) >= triggers.size()) continue;
      const std::string text = internal::TriggerText(plan_, triggers[static_cast<std::size_t>(trigger)]);
      marks.push_back({a, LabelIndex(text)});
    }
    return marks;
  }

  // [bytes, category, unit, label, born, died, address, size of the caching allocator's block].
  Json Blocks() {
    Json blocks = Json::array();
    for (std::size_t b = 0; b < history_.blocks.size(); ++b) {
      const MemoryBlock& block = history_.blocks[b];
      if (block.requested_bytes.value == 0 || block.born > end_ || (block.died >= 0 && block.died < begin_))
        continue;
      const std::int64_t bytes =
          (block.requested_bytes.value + kGranularity - 1) / kGranularity * kGranularity;
      BlockPlacement at;
      if (reserved_ != nullptr && b < reserved_->placements.size()) at = reserved_->placements[b];
      const std::size_t label = LabelIndex(BlockName(plan_, history_, static_cast<std::int32_t>(b)));
      blocks.push_back({bytes, block.category, block.unit, label, block.born, block.died,
                        at.address - base_address(), at.size_bytes.value});
    }
    return blocks;
  }

  // [address, bytes, from, to] by address.
  Json Segments() const {
    Json segments = Json::array();
    if (reserved_ == nullptr) return segments;
    std::vector<SegmentLife> lives = reserved_->segments;
    std::erase_if(lives, [&](const SegmentLife& s) { return s.to >= 0 && s.to < begin_; });
    std::ranges::sort(lives, {}, [](const SegmentLife& s) { return std::pair(s.address, s.from); });
    for (const SegmentLife& s : lives) {
      segments.push_back({s.address - base_address(), s.size_bytes.value, s.from, s.to});
    }
    return segments;
  }

  // Addresses are written relative to the first, so that they are exact as JavaScript numbers.
  DeviceAddress base_address() const {
    return reserved_ == nullptr || reserved_->segments.empty() ? 0 : reserved_->segments.front().address;
  }

  const Plan& plan_;
  const MemoryHistory& history_;
  const ReservedMemory* reserved_;
  std::int32_t begin_ = 0;
  std::int32_t end_ = 0;
  std::vector<std::string> labels_;
  std::map<std::string, std::size_t> label_index_;
};

}  // namespace

std::string MemoryHtml(const Plan& plan, const MemoryHistory& history, const ReservedMemory* reserved) {
  const MemoryExplanation explanation = ExplainMemory(plan, history);
  const std::string model = internal::HtmlText(plan.model.empty() ? "shardplan" : plan.model);
  std::string body(kMemoryBody);
  const Bytes held = reserved == nullptr ? Bytes{} : reserved->peak_reserved_bytes;
  internal::Fill(
      body,
      {{"@MODEL", model},
       {"@ABOUT",
        internal::HtmlText(fmt::format("{}, {} ranks, memory of one", plan.policy, plan.world_size))},
       {"@PEAK", internal::HtmlText(fmt::format("Peak {} in {}.", internal::Gibibytes(explanation.peak_bytes),
                                                explanation.peak_text))},
       {"@RESERVED", fmt::format("At most {} reserved.", internal::Gibibytes(held))}});
  std::string out = internal::PageHead(model + " &ndash; memory", body);
  out += internal::ScriptJson(PageData(plan, history, reserved).Make(explanation.peak_action));
  out += internal::PageTail(internal::MemoryScript());
  return out;
}

}  // namespace shardplan
