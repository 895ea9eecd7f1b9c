// SPDX-License-Identifier: Apache-2.0
// The HTML report: the figures as one JSON object, and the page that draws them (simulator/src/report/page).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>

#include "recorded/timeline.h"
#include "report/comparison.h"
#include "report/page.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/measurements.h"
#include "shardplan/simulator/simulate.h"
#include "shardplan/simulator/simulate_recording.h"
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
  kAllToAll,
  kSendReceive,
  kOtherCollective,
  kCopy,
  kWait,
  kHost,
  kTrigger,
};

// Groups of collectives stand in the order of their activities.
SpanGroup GroupOf(CollectiveKind kind) {
  const auto activity = static_cast<std::size_t>(ActivityOf(kind));
  return static_cast<SpanGroup>(static_cast<std::size_t>(SpanGroup::kAllGather) + activity -
                                static_cast<std::size_t>(DeviceActivity::kAllGather));
}

SpanGroup GroupOf(const Plan& plan, const Span& span, const Instruction& instruction) {
  if (internal::WaitsForModelCollective(plan, instruction, span.stream, span.entry)) return SpanGroup::kWait;
  if (const OperatorEvent* own = internal::ModelCollectiveAt(plan, instruction, span.entry))
    return GroupOf(own->collective->kind);
  if (span.stream < 0) {
    const bool steps = instruction.kind == InstructionKind::kOptimizerStep && instruction.stream < 0;
    return steps ? SpanGroup::kOptimizer : SpanGroup::kHost;
  }
  switch (DescriptionOf(instruction.kind).family) {
    case InstructionFamily::kCompute: {
      const SegmentPhase phase = plan.segments[static_cast<std::size_t>(instruction.segment)].phase;
      if (phase == SegmentPhase::kOptimizer) return SpanGroup::kOptimizer;
      return phase == SegmentPhase::kBackward ? SpanGroup::kBackward : SpanGroup::kForward;
    }
    case InstructionFamily::kOptimizer:
      return SpanGroup::kOptimizer;
    case InstructionFamily::kCollective:
      return GroupOf(*DescriptionOf(instruction.kind).collective);
    case InstructionFamily::kOrder:
      return DescriptionOf(instruction.kind).order == OrderEffect::kWaits ? SpanGroup::kWait
                                                                          : SpanGroup::kCopy;
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

Json ReportData(const Report& r) {
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
    data["rows"] = Json::array({"host: triggers", "host: issues"});
    for (const std::string& stream : EngineStreams(plan_)) data["rows"].push_back(stream);
    data["report"] = ReportData(simulation_.report);
    data["spans"] = Spans();
    data["texts"] = texts_;
    data["categories"] = simulation_.categories;
    data["memory"] = Memory();
    return data;
  }

 private:
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
        text = internal::EntryText(plan_, instruction, span.stream, span.entry);
        if (internal::ModelCollectiveAt(plan_, instruction, span.entry) != nullptr)
          more = internal::InstructionText(plan_, instruction) + ", " + more;
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

Json Comparison(const std::vector<std::string>& titles, const std::vector<Report>& reports) {
  Json rows = List(internal::ComparisonRows(reports), [](const internal::ComparisonRow& row) {
    return Json{
        {"label", row.label}, {"heading", row.heading}, {"indented", row.indented}, {"cells", row.cells}};
  });
  return {{"titles", titles}, {"rows", std::move(rows)}};
}

constexpr std::string_view kReportBody = R"page(
<main>
<header><h1>@MODEL</h1><span class="sub">@CLUSTER</span><span class="tabs" id="tabs"></span></header>
<div class="cards" id="cards"></div>
<section id="activitiesbox" hidden><h2>Where the step's time goes</h2><div class="wide" id="activities"></div></section>
<section id="comparisonbox"><h2>Comparison</h2><div class="wide" id="comparison"></div></section>
<section id="timelinebox"><span class="tools"><span id="found"></span><input type="search" id="search" placeholder="unit, operator, buffer" aria-label="search the timeline"><button id="in" aria-label="zoom in">+</button><button id="out" aria-label="zoom out">&minus;</button><button id="all">whole step</button></span>
<h2>Timeline of the steady step</h2>
<p class="hint">One rank. Wheel or + and &minus; zoom, drag or arrows move, double click or 0 shows the whole step. / searches, n and N go to the next and the last that is found.</p>
<canvas id="timeline" role="img" aria-label="timeline of the steady step"></canvas><div class="legend" id="legend"></div></section>
<section id="memorybox"><h2>Memory</h2><p class="hint" id="peak"></p>
<canvas id="memory" role="img" aria-label="memory over the step by category"></canvas><div class="legend" id="memorylegend"></div></section>
<section id="tornadobox"><h2>How far the step may be off</h2><p class="hint" id="interval"></p><div class="tornado" id="tornado"></div></section>
<section id="kernelsbox" hidden><h2>Kernels by class of operators</h2><div class="wide" id="kernels"></div></section>
<section><h2>Collectives</h2><div class="wide" id="collectives"></div></section>
<div class="two"><section><h2>Units</h2><div class="scroll" id="units"></div></section>
<section><h2 id="streamshead">Streams</h2><div class="wide" id="streams"></div><h2 style="margin-top:18px">Notes</h2><ul id="notes"></ul></section></div>
</main><div id="tip"></div>
)page";

// A measured step's spans have a row for each stream.
class MeasuredData {
 public:
  explicit MeasuredData(const Report& report) : report_(report) {
    for (const TimelineSpan& span : report.timeline) {
      if (std::ranges::find(rows_, span.stream) == rows_.end()) rows_.push_back(span.stream);
    }
  }

  const std::vector<std::string>& rows() const { return rows_; }

  Json Make(const std::string& title) const {
    Json data;
    data["title"] = title;
    data["rows"] = rows_;
    data["report"] = ReportData(report_);
    data["texts"] = Json::array({""});
    data["spans"] = Json::array();
    std::vector<std::size_t> row_of;
    for (std::size_t r = 0; r < rows_.size(); ++r) row_of.push_back(r);
    AppendSpans(row_of, data);
    data["categories"] = Json::array();
    data["memory"] = Json::array();
    return data;
  }

  // `row_of`: of each of rows().
  void AppendSpans(const std::vector<std::size_t>& row_of, Json& data) const {
    std::map<std::string, std::size_t> text_index;
    for (const TimelineSpan& span : report_.timeline) {
      const auto [text, added] = text_index.try_emplace(span.name, data["texts"].size());
      if (added) data["texts"].push_back(span.name);
      const auto row = static_cast<std::size_t>(std::ranges::find(rows_, span.stream) - rows_.begin());
      for (const std::int64_t number : {static_cast<std::int64_t>(row_of[row]), span.begin_ns.value,
                                        span.duration_ns.value, static_cast<std::int64_t>(text->second),
                                        static_cast<std::int64_t>(GroupOf(span.activity)), std::int64_t{0}})
        data["spans"].push_back(number);
    }
  }

 private:
  static SpanGroup GroupOf(std::string_view activity) {
    static constexpr std::array<std::pair<std::string_view, SpanGroup>, 9> kGroups = {
        {{"forward", SpanGroup::kForward},
         {"backward", SpanGroup::kBackward},
         {"optimizer", SpanGroup::kOptimizer},
         {"all_gather", SpanGroup::kAllGather},
         {"reduce_scatter", SpanGroup::kReduceScatter},
         {"all_reduce", SpanGroup::kAllReduce},
         {"all_to_all", SpanGroup::kAllToAll},
         {"send_recv", SpanGroup::kSendReceive},
         {"other_collective", SpanGroup::kOtherCollective}}};
    for (const auto& [name, group] : kGroups) {
      if (name == activity) return group;
    }
    return SpanGroup::kCopy;
  }

  const Report& report_;
  std::vector<std::string> rows_;
};

// Both steps on one axis: below each stream of the plan what was measured of it.
Json PairTimeline(Json predicted, const Plan& plan, const MeasuredData& measured) {
  std::vector<std::string> rows;
  const std::vector<std::string> streams = EngineStreams(plan);
  std::vector<std::size_t> predicted_row(streams.size()), measured_row(measured.rows().size());
  std::vector<bool> placed(measured.rows().size());
  const auto place = [&](std::size_t m) {
    placed[m] = true;
    measured_row[m] = rows.size();
    rows.push_back(measured.rows()[m] + ", measured");
  };
  for (std::size_t s = 0; s < streams.size(); ++s) {
    const std::string& name = streams[s];
    predicted_row[s] = rows.size();
    rows.push_back(name + ", predicted");
    for (std::size_t m = 0; m < measured.rows().size(); ++m) {
      const std::string& row = measured.rows()[m];
      if (!placed[m] && (row == name || row.starts_with(name + " ("))) place(m);
    }
  }
  for (std::size_t m = 0; m < measured.rows().size(); ++m) {
    if (!placed[m]) place(m);
  }
  Json spans = Json::array();
  const Json& all = predicted["spans"];
  constexpr std::size_t kNumbers = 6;  // of a span
  for (std::size_t i = 0; i < all.size(); i += kNumbers) {
    const auto row = all[i].get<std::size_t>();
    if (row < 2) continue;  // the host's
    spans.push_back(predicted_row[row - 2]);
    for (std::size_t n = 1; n < kNumbers; ++n) spans.push_back(all[i + n]);
  }
  predicted["rows"] = rows;
  predicted["spans"] = std::move(spans);
  predicted["memory"] = Json::array();
  measured.AppendSpans(measured_row, predicted);
  return predicted;
}

Json PairData(const MeasuredComparison& c) {
  const auto percent = [](Nanoseconds part, Nanoseconds whole) {
    return fmt::format("{:+.1f} %", 100 * (static_cast<double>(part.value) /
                                               static_cast<double>(std::max<std::int64_t>(1, whole.value)) -
                                           1));
  };
  Json data;
  data["cards"] =
      Json::array({Json::array({"measured step", internal::Milliseconds(c.measured_ns),
                                "predicted " + internal::Milliseconds(c.predicted_ns)}),
                   Json::array({"measured against predicted", percent(c.measured_ns, c.predicted_ns),
                                "below zero: faster than predicted"})});
  for (const BytesPair& pair : c.memory) {
    if (c.memory.size() == 1) {
      data["cards"].push_back({"measured peak", internal::Gibibytes(pair.measured_bytes),
                               "predicted " + internal::Gibibytes(pair.predicted_bytes)});
    }
  }
  const auto times = [](const std::vector<TimePair>& pairs) {
    return List(pairs, [](const TimePair& pair) {
      return Json::array({pair.what, pair.predicted_ns.value, pair.measured_ns.value});
    });
  };
  data["activities"] = times(c.activities);
  data["units"] = times(c.units);
  data["kernels"] = List(c.kernels, [](const KernelPair& pair) {
    return Json::array({pair.kind, pair.phase, pair.predicted_count, pair.measured_count,
                        pair.predicted_ns.value, pair.measured_ns.value});
  });
  data["collectives"] = List(c.collectives, [](const CollectivePair& pair) {
    return Json::array({pair.kind, pair.communicator, pair.predicted_count, pair.measured_count,
                        pair.predicted_ns.value, pair.measured_ns.value, pair.predicted_exposed_ns.value,
                        pair.measured_exposed_ns.value});
  });
  std::vector<BytesPair> memory = c.memory;
  if (!memory.empty()) memory.push_back(c.reserved);
  data["memory"] = List(memory, [](const BytesPair& pair) {
    return Json::array({pair.what, pair.predicted_bytes.value, pair.measured_bytes.value});
  });
  data["remarks"] = c.remarks;
  return data;
}

// The page of these tabs, whose first reports the comparison is of.
std::string Page(const std::string& model, const std::string& below, std::int64_t ranks, Json comparison,
                 Json plans) {
  std::string body(kReportBody);
  internal::Fill(body, {{"@MODEL", internal::HtmlText(model)}, {"@CLUSTER", internal::HtmlText(below)}});
  std::string out = internal::PageHead(internal::HtmlText(model) + " &ndash; shardplan", body);
  out += internal::ScriptJson(
      {{"ranks", ranks}, {"comparison", std::move(comparison)}, {"plans", std::move(plans)}});
  out += internal::PageTail(internal::ReportScript());
  return out;
}

std::string ModelOf(const Report& report) { return report.model.empty() ? "shardplan" : report.model; }

}  // namespace

std::string ReportHtml(const std::vector<const Plan*>& plans,
                       const std::vector<const Simulation*>& simulations) {
  const std::vector<std::string> titles = Titles(simulations);
  const Report first = simulations.empty() ? Report{} : simulations.front()->report;
  std::vector<Report> reports;
  for (const Simulation* simulation : simulations) reports.push_back(simulation->report);
  Json data = Json::array();
  for (std::size_t p = 0; p < plans.size(); ++p)
    data.push_back(PlanData(*plans[p], *simulations[p]).Make(titles[p]));
  return Page(ModelOf(first), fmt::format("{}, {} ranks, simulated", first.cluster, first.world_size),
              first.world_size, Comparison(titles, reports), std::move(data));
}

std::string MeasuredHtml(const Plan& plan, const Simulation& simulation, const Report& measured) {
  const Result<MeasuredComparison> comparison = CompareMeasured(simulation.report, measured);
  SHARDPLAN_ASSERT(comparison.has_value(), "the caller has compared them");
  const Json predicted = PlanData(plan, simulation).Make("predicted");
  const MeasuredData measured_data(measured);
  Json pair = PairTimeline(predicted, plan, measured_data);
  pair["title"] = "predicted and measured";
  pair["length"] = std::max(simulation.report.step_ns, measured.step_ns).value;
  pair["pair"] = PairData(*comparison);
  const Report& report = simulation.report;
  return Page(ModelOf(report),
              fmt::format("{}, {} ranks: simulated; {}: measured", report.cluster, report.world_size,
                          measured.measured.device),
              report.world_size, Comparison({"predicted", "measured"}, {report, measured}),
              Json::array({std::move(pair), predicted, measured_data.Make("measured")}));
}

std::string RecordedHtml(const std::vector<const Recording*>& recordings,
                         const std::vector<RecordingSimulation>& simulations) {
  Report joined = simulations.front().report;
  std::vector<std::string> titles;
  std::vector<Report> reports;
  for (std::size_t r = 0; r < simulations.size(); ++r) {
    const std::string rank = fmt::format("rank {}", simulations[r].rank);
    titles.push_back(rank);
    reports.push_back(simulations[r].report);
    const auto spans = internal::RecordedTimeline(*recordings[r], simulations[r],
                                                  simulations.size() > 1 ? rank + " " : std::string());
    joined.timeline.insert(joined.timeline.end(), spans.begin(), spans.end());
  }
  return Page(ModelOf(joined), fmt::format("{}, {} ranks, rehearsed", joined.cluster, joined.world_size),
              joined.world_size, Comparison(titles, reports),
              Json::array({MeasuredData(joined).Make(titles.front())}));
}

}  // namespace shardplan
