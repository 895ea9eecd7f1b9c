// SPDX-License-Identifier: Apache-2.0
#include "texts/curve_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace shardplan::cli {
namespace {

constexpr double kWidth = 720, kHeight = 420, kLeft = 70, kRight = 190, kTop = 30, kBottom = 50;
constexpr double kLine = 15;
constexpr double kGibibyte = 1 << 30;

std::string Escaped(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '&':
        escaped += "&amp;";
        break;
      default:
        escaped += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
  }
  return escaped;
}

// From figures to places.
class Scale {
 public:
  explicit Scale(const Optimization& report) {
    Add(report.peak_reserved_bytes, report.step_ns);
    for (const CurvePoint& point : report.curve) Add(point.peak_reserved_bytes, point.step_ns);
    for (const BaselineReport& baseline : report.baselines)
      Add(baseline.peak_reserved_bytes, baseline.step_ns);
    if (report.lower_bound_ns.value > 0) Add(report.peak_reserved_bytes, report.lower_bound_ns);
    const double bytes = std::max(1.0, most_bytes_ - least_bytes_),
                 time = std::max(1.0, longest_ - shortest_);
    least_bytes_ -= bytes / 20;
    most_bytes_ += bytes / 20;
    shortest_ -= time / 20;
    longest_ += time / 20;
  }
  double X(Bytes bytes) const {
    const double part = (static_cast<double>(bytes.value) - least_bytes_) / (most_bytes_ - least_bytes_);
    return kLeft + std::clamp(part, 0.0, 1.0) * (kWidth - kLeft - kRight);
  }
  double Y(Nanoseconds time) const {
    const double part = (static_cast<double>(time.value) - shortest_) / (longest_ - shortest_);
    return kHeight - kBottom - std::clamp(part, 0.0, 1.0) * (kHeight - kTop - kBottom);
  }
  Bytes BytesAt(double part) const {
    return {static_cast<std::int64_t>(least_bytes_ + part * (most_bytes_ - least_bytes_))};
  }
  Nanoseconds TimeAt(double part) const {
    return {static_cast<std::int64_t>(shortest_ + part * (longest_ - shortest_))};
  }

 private:
  void Add(Bytes bytes, Nanoseconds time) {
    const auto b = static_cast<double>(bytes.value), t = static_cast<double>(time.value);
    least_bytes_ = any_ ? std::min(least_bytes_, b) : b;
    most_bytes_ = any_ ? std::max(most_bytes_, b) : b;
    shortest_ = any_ ? std::min(shortest_, t) : t;
    longest_ = any_ ? std::max(longest_, t) : t;
    any_ = true;
  }

  bool any_ = false;
  double least_bytes_ = 0, most_bytes_ = 0, shortest_ = 0, longest_ = 0;
};

std::string TextAt(double x, double y, std::string_view anchor, std::string_view text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     Escaped(text));
}

std::string Axes(const Scale& scale) {
  std::string svg;
  for (int tick = 0; tick <= 4; ++tick) {
    const double part = 0.05 + 0.225 * tick;
    const Bytes bytes = scale.BytesAt(part);
    const Nanoseconds time = scale.TimeAt(part);
    svg += fmt::format("<path d=\"M{0:.1f} {1} V{2}\" stroke=\"#ddd\"/>\n", scale.X(bytes), kTop,
                       kHeight - kBottom);
    svg += fmt::format("<path d=\"M{0} {1:.1f} H{2}\" stroke=\"#ddd\"/>\n", kLeft, scale.Y(time),
                       kWidth - kRight);
    svg += TextAt(scale.X(bytes), kHeight - kBottom + 16, "middle",
                  fmt::format("{:.4g}", static_cast<double>(bytes.value) / kGibibyte));
    svg += TextAt(kLeft - 6, scale.Y(time) + 4, "end",
                  fmt::format("{:.5g}", static_cast<double>(time.value) / 1e6));
  }
  svg += TextAt((kLeft + kWidth - kRight) / 2, kHeight - 12, "middle", "GiB, reserved by the allocator");
  svg += TextAt(8, 18, "start", "ms a step");
  return svg;
}

}  // namespace

std::string CurvePicture(const Optimization& report) {
  const Scale scale(report);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      kWidth, kHeight + 10 + kLine * static_cast<double>(report.baselines.size()));
  svg += Axes(scale);
  std::string path;
  for (const CurvePoint& point : report.curve) {
    const double x = scale.X(point.peak_reserved_bytes), y = scale.Y(point.step_ns);
    path += path.empty() ? fmt::format("M{:.1f} {:.1f}", x, y) : fmt::format(" H{:.1f} V{:.1f}", x, y);
  }
  svg += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"#1565c0\" stroke-width=\"2\"/>\n", path);
  // Names are long and points may be near each other: numbers are at the points, names below.
  for (std::size_t b = 0; b < report.baselines.size(); ++b) {
    const BaselineReport& baseline = report.baselines[b];
    const double x = scale.X(baseline.peak_reserved_bytes), y = scale.Y(baseline.step_ns);
    svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"#c62828\"/>\n", x, y);
    svg += TextAt(x + 6, y + 4, "start", fmt::format("{}", b + 1));
    svg += TextAt(kLeft, kHeight + kLine * static_cast<double>(b) + 6, "start",
                  fmt::format("{}  {}: {:.5g} ms in {:.4g} GiB", b + 1, baseline.name,
                              static_cast<double>(baseline.step_ns.value) / 1e6,
                              static_cast<double>(baseline.peak_reserved_bytes.value) / kGibibyte));
  }
  if (report.lower_bound_ns.value > 0) {
    const double y = scale.Y(report.lower_bound_ns);
    svg += fmt::format("<path d=\"M{} {:.1f} H{}\" stroke=\"#2e7d32\" stroke-dasharray=\"6 4\"/>\n", kLeft, y,
                       kWidth - kRight);
    svg += TextAt(kWidth - kRight + 4, y + 4, "start", "lower bound at this budget");
  }
  const double x = scale.X(report.peak_reserved_bytes), y = scale.Y(report.step_ns);
  svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\" fill=\"#1565c0\"/>\n", x, y);
  svg += TextAt(x + 8, y - 6, "start", "this plan");
  return svg + "</svg>\n";
}

}  // namespace shardplan::cli
