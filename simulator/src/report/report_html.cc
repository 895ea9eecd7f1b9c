// The HTML report: the figures as one JSON object, and the page that draws them (simulator/page).
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "report/comparison.h"
#include "report/format.h"
#include "report/report_builder.h"
#include "report/report_page.h"
#include "shardplan/simulator/simulate.h"

namespace shardplan {
namespace {

using internal::AppendJsonString;

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
  if (span.stream < 0) return SpanGroup::kHost;
  switch (instruction.kind) {
    case InstructionKind::kCompute: {
      const SegmentPhase phase = plan.segments[static_cast<std::size_t>(instruction.segment)].phase;
      return phase == SegmentPhase::kBackward ? SpanGroup::kBackward : SpanGroup::kForward;
    }
    case InstructionKind::kOptimizerStep:
      return SpanGroup::kOptimizer;
    case InstructionKind::kAllGather:
      return SpanGroup::kAllGather;
    case InstructionKind::kReduceScatter:
      return SpanGroup::kReduceScatter;
    case InstructionKind::kAllReduce:
      return SpanGroup::kAllReduce;
    case InstructionKind::kWait:
      return SpanGroup::kWait;
    default:
      return SpanGroup::kCopy;
  }
}

class PlanWriter {
 public:
  PlanWriter(const Plan& plan, const Simulation& simulation, std::string title, std::string& out)
      : plan_(plan), simulation_(simulation), title_(std::move(title)), out_(out) {
    for (const Span& span : simulation.spans) begin_ = std::max(begin_, span.end_ns);
    begin_ -= simulation.report.step_ns;  // of the last step
    last_step_ = static_cast<std::int32_t>(plan.steps.size()) - 1;
  }

  void Write() {
    out_ += "{\"title\":";
    AppendJsonString(out_, title_);
    out_ += ",\"streams\":";
    WriteList(plan_.streams, [&](const PlanStream& stream) { AppendJsonString(out_, stream.name); });
    out_ += ",\n\"report\":";
    WriteReport(simulation_.report);
    out_ += ",\n\"spans\":[";
    WriteSpans();
    out_ += "],\n\"texts\":";
    WriteList(texts_, [&](const std::string& text) { AppendJsonString(out_, text); });
    out_ += ",\n\"categories\":";
    WriteList(simulation_.categories, [&](const std::string& name) { AppendJsonString(out_, name); });
    out_ += ",\n\"memory\":[";
    WriteMemory();
    out_ += "]}";
  }

 private:
  template <typename List, typename WriteItem>
  void WriteList(const List& list, WriteItem write) {
    out_ += '[';
    bool first = true;
    for (const auto& item : list) {
      if (!first) out_ += ',';
      first = false;
      write(item);
    }
    out_ += ']';
  }

  // An array of strings and numbers.
  template <typename... Cells>
  void WriteRow(const Cells&... cells) {
    out_ += '[';
    bool first = true;
    const auto write = [&](const auto& cell) {
      if (!first) out_ += ',';
      first = false;
      if constexpr (std::is_convertible_v<decltype(cell), std::string_view>) {
        AppendJsonString(out_, cell);
      } else {
        out_ += std::to_string(cell);
      }
    };
    (write(cells), ...);
    out_ += ']';
  }

  void WriteReport(const Report& r) {
    Bytes nccl;
    for (const CategoryBytes& entry : r.memory.peak_by_category) {
      if (entry.category == "nccl_buffers") nccl = entry.size_bytes;
    }
    out_ += fmt::format(
        R"({{"step":{},"forward":{},"backward":{},"compute":{},"communication":{},"exposed":{},"overlap":{},)"
        R"("tokens":{},"mfu":{},"peak":{},"context":{},"nccl":{},"device":{},"fits":{},"peakAt":)",
        r.step_ns.value, r.forward_ns.value, r.backward_ns.value, r.compute_ns.value,
        r.communication_ns.value, r.exposed_communication_ns.value, r.overlap_ppm,
        r.tokens_per_second_per_rank, r.model_flops_utilization_ppm, r.memory.peak_bytes.value,
        r.memory.context_bytes.value, nccl.value, r.memory.device_memory_bytes.value, r.memory.fits);
    AppendJsonString(out_, r.memory.peak_at);
    out_ += ",\"collectives\":";
    WriteList(r.collectives, [&](const CollectiveReport& c) {
      WriteRow(c.kind, c.communicator, c.count, c.full_tensor_bytes.value, c.busy_ns.value,
               c.exposed_ns.value, c.cost_source);
    });
    out_ += ",\"units\":";
    WriteList(r.units, [&](const UnitReport& u) {
      WriteRow(u.unit, u.param_bytes.value, u.forward_ns.value, u.backward_ns.value, u.exposed_ns.value);
    });
    out_ += ",\"streams\":";
    WriteList(r.streams, [&](const StreamReport& s) { WriteRow(s.stream, s.busy_ns.value, s.operations); });
    out_ += ",\"notes\":";
    WriteList(r.notes, [&](const std::string& note) { AppendJsonString(out_, note); });
    out_ += '}';
  }

  std::size_t TextIndex(std::string text) {
    const auto [it, added] = text_index_.try_emplace(std::move(text), texts_.size());
    if (added) texts_.push_back(it->first);
    return it->second;
  }

  // Rows: 0 triggers, 1 what the host issues, then the streams.
  void WriteSpans() {
    bool first = true;
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
        if (!instruction.reason.empty()) more += " (" + instruction.reason + ")";
        text = internal::InstructionText(plan_, instruction);
      }
      if (!first) out_ += ',';
      first = false;
      out_ += fmt::format("{},{},{},{},{},{}", row, (span.start_ns - begin_).value,
                          (span.end_ns - span.start_ns).value, TextIndex(std::move(text)),
                          static_cast<int>(group), TextIndex(std::move(more)));
    }
  }

  // [time, bytes of each category]: the state after the last change of each slot of time, or the highest in
  // it.
  void WriteMemory() {
    const std::int64_t slot_ns =
        std::max<std::int64_t>(1, simulation_.report.step_ns.value / kMaxMemoryPoints);
    std::vector<std::int64_t> now(simulation_.categories.size());
    std::vector<std::int64_t> highest;
    std::int64_t highest_total = -1;
    std::int64_t highest_ns = 0;
    bool first = true;
    const auto flush = [&] {
      if (highest_total < 0) return;
      if (!first) out_ += ',';
      first = false;
      out_ += fmt::format("[{},{}]", highest_ns, fmt::join(highest, ","));
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
  }

  const Plan& plan_;
  const Simulation& simulation_;
  std::string title_;
  std::string& out_;
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

void AppendComparison(const std::vector<const Simulation*>& simulations, std::string& out) {
  std::vector<Report> reports;
  for (const Simulation* simulation : simulations) reports.push_back(simulation->report);
  bool first = true;
  for (const internal::ComparisonRow& row : internal::ComparisonRows(reports)) {
    if (!first) out += ",\n";
    first = false;
    out += "{\"label\":";
    AppendJsonString(out, row.label);
    out += fmt::format(",\"heading\":{},\"indented\":{},\"cells\":[", row.heading, row.indented);
    for (std::size_t c = 0; c < row.cells.size(); ++c) {
      if (c > 0) out += ',';
      AppendJsonString(out, row.cells[c]);
    }
    out += "]}";
  }
}

constexpr std::string_view kBody = R"page(
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
  std::string body(kBody);
  internal::Replace(body, "@MODEL", internal::HtmlText(model));
  internal::Replace(
      body, "@CLUSTER",
      internal::HtmlText(fmt::format("{}, {} ranks, simulated", first.cluster, first.world_size)));
  std::string out = internal::PageHead(internal::HtmlText(model) + " &ndash; shardplan", body);
  out += fmt::format("{{\"ranks\":{},\"comparison\":[", first.world_size);
  AppendComparison(simulations, out);
  out += "],\n\"plans\":[";
  for (std::size_t p = 0; p < plans.size(); ++p) {
    if (p > 0) out += ",\n";
    PlanWriter(*plans[p], *simulations[p], titles[p], out).Write();
  }
  out += "]}";
  out += internal::PageTail(internal::ReportScript());
  return out;
}

}  // namespace shardplan
