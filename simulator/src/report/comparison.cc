// SPDX-License-Identifier: Apache-2.0
#include "report/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <set>

#include "cost/fixed_log.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/simulate.h"
#include "text/format.h"

namespace shardplan::internal {
namespace {

using CellOf = std::function<std::string(const Report&)>;

// "123.45 ms   54.3 %": a time and its part of the step.
std::string PartOfStep(Nanoseconds time, const Report& report) {
  if (report.step_ns.value == 0) return Milliseconds(time);
  return fmt::format("{}  {:>7}", Milliseconds(time),
                     Percent(MulDiv(time.value, 1'000'000, report.step_ns.value)));
}

using Categories = std::vector<CategoryBytes> MemoryReport::*;

Bytes CategoryOf(const Report& report, const std::string& category,
                 Categories where = &MemoryReport::peak_by_category) {
  for (const CategoryBytes& entry : report.memory.*where) {
    if (entry.category == category) return entry.size_bytes;
  }
  return {};
}

std::string Fits(const Report& report) {
  if (report.memory.device_memory_bytes.value == 0) return "-";
  std::string text =
      fmt::format("{} ({} of {})", report.memory.fits ? "yes" : "NO", Gibibytes(NeededBytes(report.memory)),
                  Gibibytes(report.memory.device_memory_bytes));
  if (report.memory.fits && report.memory.cache_releases > 0)
    text += fmt::format(", {} cache releases", report.memory.cache_releases);
  return text;
}

// All categories of any report, the largest first.
std::vector<std::string> CategoriesBySize(const std::vector<Report>& reports,
                                          Categories where = &MemoryReport::peak_by_category) {
  std::set<std::string> names;
  for (const Report& report : reports) {
    for (const CategoryBytes& entry : report.memory.*where) names.insert(entry.category);
  }
  std::vector<std::string> sorted(names.begin(), names.end());
  const auto largest = [&](const std::string& category) {
    Bytes most;
    for (const Report& report : reports) most = std::max(most, CategoryOf(report, category, where));
    return most;
  };
  std::ranges::stable_sort(
      sorted, [&](const std::string& a, const std::string& b) { return largest(a) > largest(b); });
  return sorted;
}

}  // namespace

bool OutsideAllocated(std::string_view category) {
  return category == "cuda_context" || category == "nccl_buffers" || category == "unmanaged";
}

std::vector<ComparisonRow> ComparisonRows(const std::vector<Report>& reports) {
  std::vector<ComparisonRow> rows;
  const auto row = [&](std::string label, const CellOf& cell, bool indented = false) {
    ComparisonRow added{std::move(label), {}, false, indented};
    for (const Report& report : reports) added.cells.push_back(cell(report));
    rows.push_back(std::move(added));
  };
  const auto heading = [&](std::string label) { rows.push_back({std::move(label), {}, true, false}); };
  heading("time of a step");
  row("step", [](const Report& r) { return Milliseconds(r.step_ns); });
  row(
      "forward, timed alone", [](const Report& r) { return Milliseconds(r.forward_ns); }, true);
  row(
      "backward, timed alone", [](const Report& r) { return Milliseconds(r.backward_ns); }, true);
  row(
      "optimizer, timed alone", [](const Report& r) { return Milliseconds(r.optimizer_ns); }, true);
  row("compute busy", [](const Report& r) { return PartOfStep(r.compute_ns, r); });
  row("communication", [](const Report& r) { return PartOfStep(r.communication_ns, r); });
  row(
      "exposed", [](const Report& r) { return PartOfStep(r.exposed_communication_ns, r); }, true);
  row(
      "overlapped", [](const Report& r) { return Percent(r.overlap_ppm); }, true);
  row("host issuing", [](const Report& r) { return PartOfStep(r.host_ns - r.host_work_ns, r); });
  if (std::ranges::any_of(reports, [](const Report& r) { return r.host_work_ns.value > 0; })) {
    row("host computing", [](const Report& r) { return PartOfStep(r.host_work_ns, r); });
  }
  heading("throughput");
  row("tokens/s per GPU", [](const Report& r) { return Thousands(r.tokens_per_second_per_rank); });
  row("model FLOPs utilization", [](const Report& r) { return Percent(r.model_flops_utilization_ppm); });
  heading("peak memory of a GPU");
  row("allocated", [](const Report& r) { return Gibibytes(r.memory.peak_bytes); });
  const std::vector<std::string> categories = CategoriesBySize(reports);
  for (const std::string& category : categories) {
    if (OutsideAllocated(category)) continue;
    row(
        category, [&](const Report& r) { return Gibibytes(CategoryOf(r, category)); }, true);
  }
  for (const std::string& category : categories) {
    if (OutsideAllocated(category))
      row(category, [&](const Report& r) { return Gibibytes(CategoryOf(r, category)); });
  }
  row("reserved", [](const Report& r) { return Gibibytes(r.memory.reserved_bytes); });
  row("fits", Fits);
  const std::vector<std::string> on_host = CategoriesBySize(reports, &MemoryReport::host_peak_by_category);
  if (on_host.empty()) return rows;
  heading("peak memory of a rank's host");
  row("allocated", [](const Report& r) { return Gibibytes(r.memory.host_peak_bytes); });
  for (const std::string& category : on_host) {
    row(
        category,
        [&](const Report& r) {
          return Gibibytes(CategoryOf(r, category, &MemoryReport::host_peak_by_category));
        },
        true);
  }
  return rows;
}

}  // namespace shardplan::internal

namespace shardplan {

Bytes NeededBytes(const MemoryReport& memory) {
  Bytes needed = memory.reserved_bytes;
  for (const CategoryBytes& entry : memory.peak_by_category) {
    if (internal::OutsideAllocated(entry.category)) needed += entry.size_bytes;
  }
  return needed;
}

namespace {

std::string Title(const Report& report) { return report.policy.empty() ? "plan" : Printable(report.policy); }

// The heading over the columns: what all reports share is said once.
std::string Caption(const std::vector<Report>& reports) {
  const Report& first = reports.front();
  const auto same = [&](auto field) {
    return std::ranges::all_of(reports, [&](const Report& r) { return r.*field == first.*field; });
  };
  std::string caption;
  if (same(&Report::model)) caption += Printable(first.model);
  if (same(&Report::cluster) && !first.cluster.empty())
    caption += (caption.empty() ? "" : " on ") + Printable(first.cluster);
  if (same(&Report::world_size)) caption += fmt::format(", {} ranks", first.world_size);
  return caption;
}

void AppendPeaks(const std::vector<Report>& reports, std::string& out) {
  for (const Report& report : reports) {
    if (report.memory.peak_at.empty()) continue;
    out += fmt::format("peak of {}: {}\n", Title(report), Printable(report.memory.peak_at));
  }
}

}  // namespace

std::string ComparisonTable(const std::vector<Report>& reports) {
  if (reports.empty()) return "";
  const std::vector<internal::ComparisonRow> rows = internal::ComparisonRows(reports);
  std::size_t label_width = 0;
  std::vector<std::size_t> widths;
  for (const Report& report : reports) widths.push_back(Title(report).size());
  for (const internal::ComparisonRow& row : rows) {
    label_width = std::max(label_width, row.label.size() + (row.indented ? 4 : 2));
    for (std::size_t c = 0; c < row.cells.size(); ++c) widths[c] = std::max(widths[c], row.cells[c].size());
  }
  std::string out = Caption(reports) + "\n\n" + std::string(label_width, ' ');
  std::size_t total = label_width;
  for (std::size_t c = 0; c < reports.size(); ++c) {
    out += fmt::format("  {:>{}}", Title(reports[c]), widths[c]);
    total += widths[c] + 2;
  }
  out += "\n" + std::string(total, '-') + "\n";
  for (const internal::ComparisonRow& row : rows) {
    if (row.heading) {
      out += row.label + "\n";
      continue;
    }
    out += fmt::format("{:<{}}", (row.indented ? "    " : "  ") + row.label, label_width);
    for (std::size_t c = 0; c < row.cells.size(); ++c)
      out += fmt::format("  {:>{}}", row.cells[c], widths[c]);
    out += "\n";
  }
  AppendPeaks(reports, out);
  return out;
}

}  // namespace shardplan
