// SPDX-License-Identifier: Apache-2.0
#include "texts/measured_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "shardplan/schemas/printable.h"
#include "texts/figures.h"

namespace shardplan::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMostRows = 10;  // of units: those that differ most

// "+4.2 %" of what was predicted. Empty where nothing was.
std::string Off(std::int64_t predicted, std::int64_t measured) {
  if (predicted == 0) return "";
  return fmt::format("{:+.1f} %",
                     100 * static_cast<double>(measured - predicted) / static_cast<double>(predicted));
}

std::string TimeLine(const std::string& label, Nanoseconds predicted, Nanoseconds measured,
                     const std::string& more = "") {
  std::string line = fmt::format("  {:<30} {:>11.3f} {:>11.3f} {:>+11.3f} ms {:>10}", Printable(label),
                                 InMilliseconds(predicted), InMilliseconds(measured),
                                 InMilliseconds(measured - predicted), Off(predicted.value, measured.value));
  if (!more.empty()) line += "   " + more;
  while (line.ends_with(' ')) line.pop_back();
  return line + "\n";
}

std::string ColumnHeads(std::string_view title, std::string_view unit_column = "difference") {
  return fmt::format("{:<32} {:>11} {:>11} {:>14}\n", title, "predicted", "measured", unit_column);
}

std::string Verdict(const MeasuredComparison& c, const Report& predicted) {
  std::string text =
      fmt::format("The step took {:.3f} ms; {:.3f} ms were predicted: ", InMilliseconds(c.measured_ns),
                  InMilliseconds(c.predicted_ns));
  const Nanoseconds more = c.measured_ns - c.predicted_ns;
  text +=
      more.value == 0
          ? "the same"
          : fmt::format("{:.1f} % {}",
                        std::abs(100 * InMilliseconds(more) / std::max(1e-6, InMilliseconds(c.predicted_ns))),
                        more.value > 0 ? "longer than predicted" : "shorter than predicted");
  const auto along = [&](const TimePair& pair) {
    return more.value > 0 ? pair.measured_ns - pair.predicted_ns : pair.predicted_ns - pair.measured_ns;
  };
  const auto most = std::ranges::max_element(c.activities, {}, along);
  if (more.value != 0 && most != c.activities.end() && along(*most).value > 0) {
    const bool half = 2 * along(*most).value > std::abs(more.value);
    text += fmt::format("; {}: {} ({:+.3f} ms)", half ? "most of it" : "the largest part",
                        Printable(most->what), InMilliseconds(most->measured_ns - most->predicted_ns));
  }
  text += ".\n";
  if (predicted.step_high_ns.value > 0) {
    const bool inside = predicted.step_low_ns <= c.measured_ns && c.measured_ns <= predicted.step_high_ns;
    text += fmt::format(
        "The cluster's figures make {:.3f} to {:.3f} ms, two times in three; what was measured is {}.\n",
        InMilliseconds(predicted.step_low_ns), InMilliseconds(predicted.step_high_ns),
        inside ? "between" : "not");
  }
  return text;
}

std::string Activities(const MeasuredComparison& c) {
  std::string text = ColumnHeads("what the device did");
  for (const TimePair& pair : c.activities) text += TimeLine(pair.what, pair.predicted_ns, pair.measured_ns);
  return text + TimeLine("step", c.predicted_ns, c.measured_ns);
}

std::string Kernels(const MeasuredComparison& c) {
  if (c.kernels.empty()) return "";
  std::vector<KernelPair> sorted = c.kernels;
  std::ranges::stable_sort(sorted, [](const KernelPair& a, const KernelPair& b) {
    return std::max(a.predicted_ns, a.measured_ns) > std::max(b.predicted_ns, b.measured_ns);
  });
  std::string text = ColumnHeads("kernels by class of operators");
  for (const KernelPair& pair : sorted) {
    const std::string label = pair.kind == pair.phase ? pair.kind : pair.kind + ", " + pair.phase;
    text += TimeLine(label, pair.predicted_ns, pair.measured_ns,
                     fmt::format("{} / {} kernels", pair.predicted_count, pair.measured_count));
  }
  return text + "\n";
}

// "12.3 / 11.9 GB/s": of the whole tensors.
std::string Bandwidth(const CollectivePair& pair) {
  const auto rate = [](Bytes size, Nanoseconds time) {
    return static_cast<double>(size.value) / std::max(1.0, static_cast<double>(time.value));
  };
  const Bytes measured = pair.measured_bytes.value > 0 ? pair.measured_bytes : pair.predicted_bytes;
  return fmt::format("{} / {} calls, {:.1f} / {:.1f} GB/s", pair.predicted_count, pair.measured_count,
                     rate(pair.predicted_bytes, pair.predicted_ns), rate(measured, pair.measured_ns));
}

std::string Collectives(const MeasuredComparison& c, const Report& measured) {
  if (c.collectives.empty()) return "";
  std::string text = ColumnHeads("collectives");
  for (const CollectivePair& pair : c.collectives) {
    text +=
        TimeLine(pair.kind + " " + pair.communicator, pair.predicted_ns, pair.measured_ns, Bandwidth(pair));
    text += TimeLine("  exposed", pair.predicted_exposed_ns, pair.measured_exposed_ns);
  }
  if (measured.measured.waiting_ns.value > 0) {
    text += fmt::format("  {:.3f} ms of them this rank waited for others\n",
                        InMilliseconds(measured.measured.waiting_ns));
  }
  return text + "\n";
}

std::string Units(const MeasuredComparison& c) {
  if (c.units.empty()) return "";
  std::vector<TimePair> sorted = c.units;
  std::ranges::stable_sort(sorted, [](const TimePair& a, const TimePair& b) {
    return std::abs((a.measured_ns - a.predicted_ns).value) >
           std::abs((b.measured_ns - b.predicted_ns).value);
  });
  std::string text = ColumnHeads("units");
  for (std::size_t u = 0; u < std::min(kMostRows, sorted.size()); ++u)
    text += TimeLine(sorted[u].what, sorted[u].predicted_ns, sorted[u].measured_ns);
  if (sorted.size() > kMostRows)
    text += fmt::format("  ... and {} that differ less\n", sorted.size() - kMostRows);
  return text + "\n";
}

std::string BytesLine(const std::string& label, Bytes predicted, Bytes measured) {
  return fmt::format("  {:<30} {:>11.3f} {:>11.3f} {:>+11.3f} GiB {:>9}\n", Printable(label),
                     InGibibytes(predicted), InGibibytes(measured), InGibibytes(measured - predicted),
                     Off(predicted.value, measured.value));
}

std::string Memory(const MeasuredComparison& c) {
  if (c.memory.empty()) return "";
  std::string text = ColumnHeads("memory, at the peak");
  Bytes predicted, measured;
  for (const BytesPair& pair : c.memory) {
    text += BytesLine(pair.what, pair.predicted_bytes, pair.measured_bytes);
    predicted += pair.predicted_bytes;
    measured += pair.measured_bytes;
  }
  if (c.memory.size() > 1) text += BytesLine("allocated", predicted, measured);
  return text + BytesLine("reserved", c.reserved.predicted_bytes, c.reserved.measured_bytes) + "\n";
}

}  // namespace

std::string MeasuredText(const MeasuredComparison& c, const Report& predicted, const Report& measured) {
  std::string text = Verdict(c, predicted) + "\n";
  for (const std::string& remark : c.remarks) text += "  " + Printable(remark) + "\n";
  if (!c.remarks.empty()) text += "\n";
  text += Activities(c) + "\n" + Kernels(c) + Collectives(c, measured) + Units(c) + Memory(c);
  while (text.ends_with("\n\n")) text.pop_back();
  return text;
}

Json ToJson(const MeasuredComparison& c) {
  const auto times = [](const std::vector<TimePair>& pairs, const char* name) {
    Json list = Json::array();
    for (const TimePair& pair : pairs) {
      list.push_back({{name, pair.what},
                      {"predicted_ns", pair.predicted_ns.value},
                      {"measured_ns", pair.measured_ns.value}});
    }
    return list;
  };
  Json kernels = Json::array(), collectives = Json::array(), memory = Json::array();
  for (const KernelPair& pair : c.kernels) {
    kernels.push_back({{"kind", pair.kind},
                       {"phase", pair.phase},
                       {"predicted_count", pair.predicted_count},
                       {"measured_count", pair.measured_count},
                       {"predicted_ns", pair.predicted_ns.value},
                       {"measured_ns", pair.measured_ns.value}});
  }
  for (const CollectivePair& pair : c.collectives) {
    collectives.push_back({{"kind", pair.kind},
                           {"communicator", pair.communicator},
                           {"predicted_count", pair.predicted_count},
                           {"measured_count", pair.measured_count},
                           {"predicted_bytes", pair.predicted_bytes.value},
                           {"measured_bytes", pair.measured_bytes.value},
                           {"predicted_ns", pair.predicted_ns.value},
                           {"measured_ns", pair.measured_ns.value},
                           {"predicted_exposed_ns", pair.predicted_exposed_ns.value},
                           {"measured_exposed_ns", pair.measured_exposed_ns.value}});
  }
  for (const BytesPair& pair : c.memory) {
    memory.push_back({{"category", pair.what},
                      {"predicted_bytes", pair.predicted_bytes.value},
                      {"measured_bytes", pair.measured_bytes.value}});
  }
  return {{"predicted_ns", c.predicted_ns.value},
          {"measured_ns", c.measured_ns.value},
          {"activities", times(c.activities, "activity")},
          {"kernels", std::move(kernels)},
          {"collectives", std::move(collectives)},
          {"units", times(c.units, "unit")},
          {"memory", std::move(memory)},
          {"predicted_reserved_bytes", c.reserved.predicted_bytes.value},
          {"measured_reserved_bytes", c.reserved.measured_bytes.value},
          {"remarks", c.remarks}};
}

}  // namespace shardplan::cli
