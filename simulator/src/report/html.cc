// The HTML report: the figures as one JSON object, and the page that draws them (simulator/page).
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "report/comparison.h"
#include "report/page.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/simulator/simulate.h"
#include "text/format.h"
#include "text/instruction_text.h"

namespace shardplan {
namespace {

using Json = nlohmann::ordered_json;

// Samples of the memory chart; finer changes are merged, keeping the highest of each slot.
constexpr std::int64_t kMaxMemoryPoints = 4000;

// Indices into `groups` of report.js.
enum class SpanGroup : std::uint8_t {
  kForward,
  kBackward,
  kOptimizer,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kCopy,
  kWait,
  kHost,
  kTrigger,
};

SpanGroup GroupOf(const Plan& plan, const Span& span, const Instruction& instruction) {
  if (span.stream < 0) {
    const bool steps = instruction.kind == InstructionKind::kOptimizerStep && instruction.stream < 0;
    return steps ? SpanGroup::kOptimizer : SpanGroup::kHost;
  }
  switch (DescriptionOf(instruction.kind).family) {
    case InstructionFamily::kCompute: {
      const SegmentPhase phase = plan.segments[static_cast<std::size_t>(instruction.segment)].phase;
      return phase == SegmentPhase::kBackward ? SpanGroup::kBackward : SpanGroup::kForward;
    }
    case InstructionFamily::kOptimizer:
      return SpanGroup::kOptimizer;
    case InstructionFamily::kCollective:
      return instruction.kind == InstructionKind::kAllGather       ? SpanGroup::kAllGather
             : instruction.kind == InstructionKind::kReduceScatter ? SpanGroup::kReduceScatter
                                                                   : SpanGroup::kAllReduce;
    case InstructionFamily::kOrder:
      return instruction.kind == InstructionKind::kWait ? SpanGroup::kWait : SpanGroup::kCopy;
    case InstructionFamily::kMemory:
    case InstructionFamily::kBind:
    case InstructionFamily::kCopy:
    case InstructionFamily::kScale:
      return SpanGroup::kCopy;
  }
  return SpanGroup::kCopy;
}

template <typename Items, typename Make>
Json List(const Items& items, Make make) {
  Json list = Json::array();
  for (const auto& item : items) list.push_back(make(item));
  return list;
}

// The data of a plan, as report.js reads it.
class PlanData {
 public:
  PlanData(const Plan& plan, const Simulation& simulation) : plan_(plan), simulation_(simulation) {
    for (const Span& span : simulation.spans) begin_ = std::max(begin_, span.end_ns);
    begin_ -= simulation.report.step_ns;  // of the last step
    last_step_ = static_cast<std::int32_t>(plan.steps.size()) - 1;
  }

  Json Make(const std::string& title) {
    Json data;
    data["title"] = title;
    data["streams"] = List(plan_.streams, [](const PlanStream& stream) { return stream.name; });
    data["report"] = ReportData();
    data["spans"] = Spans();
    data["texts"] = texts_;
    data["categories"] = simulation_.categories;
    data["memory"] = Memory();
    return data;
  }

 private:
  Json ReportData() const {
    const Report& r = simulation_.report;
    Json data = {{"step", r.step_ns.value},
                 {"forward", r.forward_ns.value},
                 {"backward", r.backward_ns.value},
                 {"compute", r.compute_ns.value},
                 {"communication", r.communication_ns.value},
                 {"exposed", r.exposed_communication_ns.value},
                 {"overlap", r.overlap_ppm},
                 {"tokens", r.tokens_per_second_per_rank},
                 {"mfu", r.model_flops_utilization_ppm},
                 {"peak", r.memory.peak_bytes.value},
                 {"reserved", r.memory.reserved_bytes.value},
                 {"releases", r.memory.cache_releases},
                 {"context", r.memory.context_bytes.value},
                 {"needed", NeededBytes(r.memory).value},
                 {"device", r.memory.device_memory_bytes.value},
                 {"fits", r.memory.fits},
                 {"peakAt", r.memory.peak_at}};
    data["collectives"] = List(r.collectives, [](const CollectiveReport& c) {
      return Json::array({c.kind, c.communicator, c.count, c.full_tensor_bytes.value, c.busy_ns.value,
                          c.exposed_ns.value, c.cost_source});
    });
    data["units"] = List(r.units, [](const UnitReport& u) {
      return Json::array(
          {u.unit, u.param_bytes.value, u.forward_ns.value, u.backward_ns.value, u.exposed_ns.value});
    });
    data["streams"] = List(r.streams, [](const StreamReport& s) {
      return Json::array({s.stream, s.busy_ns.value, s.operations});
    });
    data["figures"] = List(r.figures, [](const FigureReport& f) {
      return Json::array({f.figure, f.origin, f.off_ppm, f.better_ns.value, f.worse_ns.value});
    });
    data["low"] = r.step_low_ns.value;
    data["high"] = r.step_high_ns.value;
    data["notes"] = r.notes;
    return data;
  }

  std::size_t TextIndex(std::string text) {
    const auto [it, added] = text_index_.try_emplace(std::move(text), texts_.size());
    if (added) texts_.push_back(it->first);
    return it->second;
  }

  // Six numbers a span. Rows: 0 triggers, 1 what the host issues, then the streams.
  Json Spans() {
    Json spans = Json::array();
    for (const Span& span : simulation_.spans) {
      if (span.step != last_step_) continue;
      const Trigger& trigger =
          plan_.steps[static_cast<std::size_t>(span.step)].triggers[static_cast<std::size_t>(span.trigger)];
      std::string text = internal::TriggerText(plan_, trigger);
      std::string more;
      SpanGroup group = SpanGroup::kTrigger;
      int row = 0;
      if (span.instruction >= 0) {
        const Instruction& instruction = trigger.instructions[static_cast<std::size_t>(span.instruction)];
        group = GroupOf(plan_, span, instruction);
        row = span.stream + 2;
        more = "issued at " + text;
        if (!instruction.reason.empty()) more += " (" + instruction.reason.str() + ")";
        text = internal::InstructionText(plan_, instruction);
      }
      spans.push_back(row);
      spans.push_back((span.start_ns - begin_).value);
      spans.push_back((span.end_ns - span.start_ns).value);
      spans.push_back(TextIndex(std::move(text)));
      spans.push_back(static_cast<int>(group));
      spans.push_back(TextIndex(std::move(more)));
    }
    return spans;
  }

  // [time, bytes of each category]: the state after the last change of each slot of time, or the highest in
  // it.
  Json Memory() const {
    const std::int64_t slot_ns =
        std::max<std::int64_t>(1, simulation_.report.step_ns.value / kMaxMemoryPoints);
    Json points = Json::array();
    std::vector<std::int64_t> now(simulation_.categories.size());
    std::vector<std::int64_t> highest;
    std::int64_t highest_total = -1;
    std::int64_t highest_ns = 0;
    const auto flush = [&] {
      if (highest_total < 0) return;
      Json point = Json::array({highest_ns});
      for (const std::int64_t bytes : highest) point.push_back(bytes);
      points.push_back(std::move(point));
      highest_total = -1;
    };
    for (const MemorySample& sample : simulation_.memory) {
      now[static_cast<std::size_t>(sample.category)] = sample.category_bytes.value;
      const std::int64_t time_ns = std::max<std::int64_t>(0, (sample.time_ns - begin_).value);
      if (highest_total >= 0 && time_ns / slot_ns != highest_ns / slot_ns) flush();
      // Before the step only the last state counts.
      if (sample.total_bytes.value < highest_total && sample.step == last_step_) continue;
      highest_total = sample.total_bytes.value;
      highest = now;
      highest_ns = time_ns;
    }
    flush();
    return points;
  }

  const Plan& plan_;
  const Simulation& simulation_;
  Nanoseconds begin_;
  std::int32_t last_step_ = 0;
  std::vector<std::string> texts_;
  std::map<std::string, std::size_t> text_index_;
};

// The policies' names; numbered where two plans have the same.
std::vector<std::string> Titles(const std::vector<const Simulation*>& simulations) {
  std::map<std::string, int> seen;
  std::vector<std::string> titles;
  for (const Simulation* simulation : simulations) {
    std::string title = simulation->report.policy.empty() ? "plan" : simulation->report.policy;
    const int number = ++seen[title];
    if (number > 1) title += fmt::format(" ({})", number);
    titles.push_back(std::move(title));
  }
  return titles;
}

Json Comparison(const std::vector<const Simulation*>& simulations) {
  std::vector<Report> reports;
  for (const Simulation* simulation : simulations) reports.push_back(simulation->report);
  return List(internal::ComparisonRows(reports), [](const internal::ComparisonRow& row) {
    return Json{
        {"label", row.label}, {"heading", row.heading}, {"indented", row.indented}, {"cells", row.cells}};
  });
}

constexpr std::string_view kReportBody = R"page(
<main>
<header><h1>@MODEL</h1><span class="sub">@CLUSTER</span><span class="tabs" id="tabs"></span></header>
<div class="cards" id="cards"></div>
<section><h2>Comparison</h2><div class="wide" id="comparison"></div></section>
<section id="timelinebox"><span class="tools"><button id="in">+</button><button id="out">&minus;</button><button id="all">whole step</button></span>
<h2>Timeline of the steady step</h2>
<p class="hint">One rank. Wheel zooms, drag moves, double click shows the whole step.</p>
<canvas id="timeline"></canvas><div class="legend" id="legend"></div></section>
<section id="memorybox"><h2>Memory</h2><p class="hint" id="peak"></p>
<canvas id="memory"></canvas><div class="legend" id="memorylegend"></div></section>
<section id="tornadobox"><h2>How far the step may be off</h2><p class="hint" id="interval"></p><div class="tornado" id="tornado"></div></section>
<section><h2>Collectives</h2><div class="wide" id="collectives"></div></section>
<div class="two"><section><h2>Units</h2><div class="scroll" id="units"></div></section>
<section><h2>Streams</h2><div class="wide" id="streams"></div><h2 style="margin-top:18px">Notes</h2><ul id="notes"></ul></section></div>
</main><div id="tip"></div>
)page";

}  // namespace

std::string ReportHtml(const std::vector<const Plan*>& plans,
                       const std::vector<const Simulation*>& simulations) {
  const std::vector<std::string> titles = Titles(simulations);
  const Report first = simulations.empty() ? Report{} : simulations.front()->report;
  const std::string model = first.model.empty() ? "shardplan" : first.model;
  std::string body(kReportBody);
  internal::Fill(body, {{"@MODEL", internal::HtmlText(model)},
                        {"@CLUSTER", internal::HtmlText(fmt::format("{}, {} ranks, simulated", first.cluster,
                                                                    first.world_size))}});
  std::string out = internal::PageHead(internal::HtmlText(model) + " &ndash; shardplan", body);
  Json data = {{"ranks", first.world_size}, {"comparison", Comparison(simulations)}};
  Json& plan_data = data["plans"] = Json::array();
  for (std::size_t p = 0; p < plans.size(); ++p) {
    plan_data.push_back(PlanData(*plans[p], *simulations[p]).Make(titles[p]));
  }
  out += internal::ScriptJson(data);
  out += internal::PageTail(internal::ReportScript());
  return out;
}

}  // namespace shardplan
