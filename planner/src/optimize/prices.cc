#include "optimize/prices.h"

#include <algorithm>
#include <functional>
#include <set>

namespace shardplan::optimize {
namespace {

constexpr std::int64_t kMostWindows = 24;
constexpr int kSweeps = 2;

// Goes up, one range of windows or cuts after the other, by steps that get smaller. The value is concave in
// the prices of memory, and in the kernels' prices along the highest prices of links.
class PriceClimb {
 public:
  PriceClimb(const StepWork& work, const WindowedWork& windowed)
      : work_(work),
        windowed_(windowed),
        kernels_(windowed.cuts().size() + 1, kPriceScale),
        part_shares_(windowed.cuts().size() + 1, 0),
        bytes_(windowed.cuts().size(), 0) {}

  CertificateBranch Run(LayoutKind layout) {
    Begin();
    for (int sweep = 0; sweep < kSweeps; ++sweep) {
      const std::int64_t byte_price = windowed_.BytePriceOfGather();
      for (int level = 1; level <= 8; ++level) {
        MoveAll(kernels_, kPriceScale >> level, kPriceScale);
        MoveAll(bytes_, 2 * byte_price >> level, kHighestBytePrice);
        if (windowed_.part_link() >= 0 && level <= 3)
          MoveAll(part_shares_, kPriceScale >> level, kPriceScale);
      }
    }
    return {layout, Windows(), bytes_, {best_ns_}};
  }

 private:
  void Begin() {
    std::int64_t best_kernels = kPriceScale;
    best_ns_ = -1;
    for (int part = 0; part <= 16; ++part) {
      std::ranges::fill(kernels_, kPriceScale / 16 * part);
      const std::int64_t value = Value();
      if (value <= best_ns_) continue;
      best_ns_ = value;
      best_kernels = kernels_.front();
    }
    std::ranges::fill(kernels_, best_kernels);
  }

  std::vector<WindowPrices> Windows() const {
    std::vector<WindowPrices> windows;
    const std::size_t links = work_.cluster().links.size();
    for (std::size_t w = 0; w < kernels_.size(); ++w) {
      std::vector<std::int64_t> shares(links, 0);
      if (windowed_.gather_link() >= 0) shares[windowed_.gather_link()] = kPriceScale - part_shares_[w];
      if (windowed_.part_link() >= 0) shares[windowed_.part_link()] += part_shares_[w];
      windows.push_back(HighestPrices(work_.cluster(), kernels_[w], shares));
    }
    return windows;
  }
  std::int64_t Value() const { return windowed_.ValueOf(Windows(), bytes_).value; }

  // Ranges of one, two, four ... neighbours.
  void MoveAll(std::vector<std::int64_t>& prices, std::int64_t step, std::int64_t most) {
    if (step <= 0) return;
    for (std::size_t length = prices.size(); length > 0; length /= 2) {
      for (std::size_t first = 0; first + length <= prices.size();
           first += std::max<std::size_t>(1, length / 2)) {
        if (!Move(prices, first, length, step, most)) Move(prices, first, length, -step, most);
      }
    }
  }

  bool Move(std::vector<std::int64_t>& prices, std::size_t first, std::size_t length, std::int64_t step,
            std::int64_t most) {
    bool moved = false;
    while (true) {
      const std::vector<std::int64_t> before = prices;
      for (std::size_t i = first; i < first + length; ++i)
        prices[i] = std::clamp<std::int64_t>(prices[i] + step, 0, most);
      const std::int64_t value = prices == before ? best_ns_ : Value();
      if (value <= best_ns_) {
        prices = before;
        return moved;
      }
      best_ns_ = value;
      moved = true;
    }
  }

  const StepWork& work_;
  const WindowedWork& windowed_;
  std::vector<std::int64_t> kernels_;      // by window
  std::vector<std::int64_t> part_shares_;  // by window: of the link within a part of the ranks
  std::vector<std::int64_t> bytes_;        // by cut
  std::int64_t best_ns_ = 0;
};

}  // namespace

std::vector<std::int64_t> ChooseCuts(const StepWork& work) {
  std::set<std::int64_t> cuts = {1, 2 * work.operators()};
  for (const std::int64_t begin : work.pass_begins()) {
    if (begin > 0) cuts.insert(2 * begin);
  }
  std::int64_t whole_ns = 0;
  for (const std::int64_t duration : work.durations_ns()) whole_ns += duration;
  const std::int64_t others =
      std::max<std::int64_t>(8, kMostWindows - static_cast<std::int64_t>(cuts.size()));
  std::int64_t passed_ns = 0, next = 1;
  for (std::int64_t i = 0; i < work.operators(); ++i) {
    passed_ns += work.durations_ns()[static_cast<std::size_t>(i)];
    for (; next < others && passed_ns >= whole_ns / others * next; ++next) cuts.insert(2 * i + 2);
  }
  return {cuts.begin(), cuts.end()};
}

CertificateBranch FindPrices(const StepWork& work, const std::vector<std::int64_t>& cuts, LayoutKind layout,
                             Bytes budget) {
  const WindowedWork windowed(work, cuts, layout, budget);
  return PriceClimb(work, windowed).Run(layout);
}

}  // namespace shardplan::optimize
