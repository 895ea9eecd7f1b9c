// SPDX-License-Identifier: Apache-2.0
#include "optimize/prices.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace shardplan::optimize {
namespace {

__extension__ using Int128 = __int128;

constexpr std::int64_t kMostWindows = 72;
constexpr int kRounds = 6;
constexpr int kStepsOfRound = 100;
// Parts of kPriceScale. The longest step of a price; of the price of a byte in parts of itself, or of the
// least that counts.
constexpr std::int64_t kLongestStep = kPriceScale / 10;
constexpr std::int64_t kLongestByteStep = kPriceScale / 2;
constexpr std::int64_t kLeastByteStep = kPriceScale / 10;
constexpr std::int64_t kDearestByte = kPriceScale * 256;

// [Note: prices that prove most]
// The bound is concave in the prices of memory, and in those of kernels along the highest prices of links.
// The cheapest work at given prices is a supergradient: a price goes up where work exceeds what the price's
// window earns for it. So the search is supergradient ascent with shorter and shorter steps. It goes on from
// the best prices now and then, and in the end tries each by itself. Slopes of prices differ by orders of
// magnitude, and so do the prices that prove most: a byte that a gather waits for is worth a hundredth of one
// that a reduction waits for. So each price has a step of its own: the mean of its slopes over the mean of
// their sizes, the older ones less and less.
class PriceClimb {
 public:
  PriceClimb(const StepWork& work, const WindowedWork& windowed)
      : work_(work), windowed_(windowed), byte_unit_(windowed.BytePriceOfGather()) {
    at_.kernels.assign(windowed.cuts().size() + 1, kPriceScale);
    at_.shares.assign(windowed.cuts().size() + 1, 0);
    at_.bytes.assign(windowed.cuts().size(), 0);
  }

  CertificateBranch Run(LayoutKind layout) {
    Begin();
    Climb();
    at_ = best_;
    Polish(kPriceScale / 64);
    return {layout, WindowsOf(best_), BytesOf(best_), {best_ns_}};
  }

 private:
  // Parts of kPriceScale: of kernels' highest price, of what of the links' prices is the second link's, and
  // of `byte_unit_`.
  struct Point {
    std::vector<std::int64_t> kernels, shares, bytes;
  };

  WindowPrices PricesAt(std::int64_t kernels, std::int64_t share) const {
    std::vector<std::int64_t> shares(work_.cluster().links.size(), 0);
    if (windowed_.links() > 0) shares[0] = kPriceScale - (windowed_.links() > 1 ? share : 0);
    if (windowed_.links() > 1) shares[1] = share;
    return HighestPrices(work_.cluster(), kernels, shares);
  }
  std::vector<WindowPrices> WindowsOf(const Point& point) const {
    std::vector<WindowPrices> windows;
    for (std::size_t w = 0; w < point.kernels.size(); ++w)
      windows.push_back(PricesAt(point.kernels[w], point.shares[w]));
    return windows;
  }
  std::vector<std::int64_t> BytesOf(const Point& point) const {
    std::vector<std::int64_t> bytes;
    for (const std::int64_t part : point.bytes) {
      const Int128 price = Int128{part} * byte_unit_ / kPriceScale;
      bytes.push_back(static_cast<std::int64_t>(std::min<Int128>(price, kHighestBytePrice)));
    }
    return bytes;
  }
  std::int64_t Value(const Point& point, WindowUse* use = nullptr) const {
    return windowed_.ValueOf(WindowsOf(point), BytesOf(point), use).value;
  }
  bool Keep(const Point& point, std::int64_t value) {
    if (value <= best_ns_) return false;
    best_ns_ = value;
    best_ = point;
    return true;
  }

  // The same prices in all windows, and the same price of a byte while most is there in each pass.
  void Begin() {
    best_ = at_;
    best_ns_ = -1;
    for (int part = 0; part <= 16; ++part) {
      for (int share = 0; share <= (windowed_.links() > 1 ? 4 : 0); ++share) {
        std::ranges::fill(at_.kernels, kPriceScale / 16 * part);
        std::ranges::fill(at_.shares, kPriceScale / 4 * share);
        Keep(at_, Value(at_));
      }
    }
    at_ = best_;
    // Passes that make gradients, which are every second in most loops, are where most is there.
    const std::vector<std::int64_t> peaks = work_.PeakOperators();
    const Point none = best_;
    for (const std::size_t first : {0, 1}) {
      for (std::int64_t price = kPriceScale / 16; price <= kDearestByte; price *= 2) {
        at_ = none;
        for (std::size_t pass = first; pass < peaks.size(); pass += 1 + first) {
          const auto cut =
              std::ranges::lower_bound(windowed_.cuts(), 2 * peaks[pass] + 1) - windowed_.cuts().begin();
          if (cut < std::ssize(at_.bytes)) at_.bytes[static_cast<std::size_t>(cut)] = price;
        }
        Keep(at_, Value(at_));
      }
    }
    at_ = best_;
  }

  // The slope of the value, in nanoseconds for kPriceScale, for each price alone.
  Point SlopesOf(const WindowUse& use) const {
    constexpr std::int64_t kLittle = kPriceScale / 256;
    Point slopes;
    const auto worth = [&](const WindowPrices& prices, std::size_t w) {
      const PricesBesideWaits beside = windowed_.PricesBeside(prices, w);
      Int128 sum = Int128{prices.kernels} * use.kernels_ns[w] + Int128{beside.copies} * use.copies_ns[w] +
                   Int128{beside.waits} * windowed_.waits_ns()[w];
      for (std::size_t l = 0; l < use.links_ns[w].size(); ++l)
        sum += Int128{prices.links[l]} * use.links_ns[w][l];
      return sum;
    };
    const auto slope = [&](std::size_t w, std::int64_t kernels, std::int64_t share, bool of_share) {
      const std::int64_t moved = (of_share ? share : kernels) + kLittle <= kPriceScale ? kLittle : -kLittle;
      const WindowPrices here = PricesAt(kernels, share);
      const WindowPrices there = PricesAt(kernels + (of_share ? 0 : moved), share + (of_share ? moved : 0));
      return static_cast<std::int64_t>((worth(there, w) - worth(here, w)) / moved);
    };
    for (std::size_t w = 0; w < at_.kernels.size(); ++w) {
      slopes.kernels.push_back(slope(w, at_.kernels[w], at_.shares[w], false));
      slopes.shares.push_back(windowed_.links() > 1 ? slope(w, at_.kernels[w], at_.shares[w], true) : 0);
    }
    for (const std::int64_t bytes : use.bytes)
      slopes.bytes.push_back(static_cast<std::int64_t>(Int128{bytes} * byte_unit_ / kBytePriceScale));
    return slopes;
  }

  void Climb() {
    std::int64_t longest = kPriceScale;  // in parts of the longest of all
    for (int round = 0; round < kRounds; ++round) {
      at_ = best_;
      along_ = sizes_ = {};
      std::int64_t length = longest;
      for (int step = 0; step < kStepsOfRound; ++step) {
        WindowUse use;
        Keep(at_, Value(at_, &use));
        Point slopes = SlopesOf(use);
        HoldAtEnds(slopes);
        Move(at_.kernels, slopes.kernels, along_.kernels, sizes_.kernels, length, false);
        Move(at_.shares, slopes.shares, along_.shares, sizes_.shares, length, false);
        Move(at_.bytes, slopes.bytes, along_.bytes, sizes_.bytes, length, true);
        length -= length / 50;
      }
      longest /= 2;
    }
  }

  // `along`, `sizes`: means of the slopes so far, and of their sizes.
  static void Move(std::vector<std::int64_t>& prices, const std::vector<std::int64_t>& slopes,
                   std::vector<std::int64_t>& along, std::vector<std::int64_t>& sizes, std::int64_t length,
                   bool of_bytes) {
    along.resize(prices.size(), 0);
    sizes.resize(prices.size(), 0);
    for (std::size_t i = 0; i < prices.size(); ++i) {
      const std::int64_t size = std::abs(slopes[i]);
      along[i] += (slopes[i] - along[i]) / 5;
      sizes[i] = sizes[i] == 0 ? size : sizes[i] + (size - sizes[i]) / 100;
      if (sizes[i] == 0) continue;
      const Int128 longest =
          of_bytes ? Int128{kLongestByteStep} * std::max(prices[i], kLeastByteStep) / kPriceScale
                   : Int128{kLongestStep};
      const Int128 by = longest * length / kPriceScale * along[i] / sizes[i];
      prices[i] = static_cast<std::int64_t>(
          std::clamp<Int128>(prices[i] + by, 0, of_bytes ? kDearestByte : kPriceScale));
    }
  }

  // A price at an end of its range does not go beyond it, and takes no part of the step.
  void HoldAtEnds(Point& slopes) const {
    const auto hold = [](std::vector<std::int64_t>& along, const std::vector<std::int64_t>& prices,
                         std::int64_t most) {
      for (std::size_t i = 0; i < along.size(); ++i) {
        if ((prices[i] <= 0 && along[i] < 0) || (prices[i] >= most && along[i] > 0)) along[i] = 0;
      }
    };
    hold(slopes.kernels, at_.kernels, kPriceScale);
    hold(slopes.shares, at_.shares, kPriceScale);
    hold(slopes.bytes, at_.bytes, kDearestByte);
  }

  // Each price by itself, up or down.
  void Polish(std::int64_t by) {
    for (auto of : {&Point::kernels, &Point::bytes}) {
      for (std::size_t i = 0; i < (at_.*of).size(); ++i) {
        for (const std::int64_t change : {by, -by}) {
          Point next = at_;
          (next.*of)[i] = std::clamp<std::int64_t>((next.*of)[i] + change, 0,
                                                   of == &Point::bytes ? kDearestByte : kPriceScale);
          if (!Keep(next, Value(next))) continue;
          at_ = std::move(next);
          break;
        }
      }
    }
  }

  const StepWork& work_;
  const WindowedWork& windowed_;
  const std::int64_t byte_unit_;
  Point at_, best_;
  Point along_, sizes_;  // of slopes
  std::int64_t best_ns_ = 0;
};

}  // namespace

// [Note: where windows end]
// A gather lies wholly before its first reader: a cut there says so, and one between two of them says less.
// So of the positions in a stretch of the model's time the cut is where most bytes have to be gathered by
// then, or may be reduced from then on.
std::vector<std::int64_t> ChooseCuts(const StepWork& work) {
  std::set<std::int64_t> cuts = {1, 2 * work.operators()};
  for (const std::int64_t begin : work.pass_begins()) {
    if (begin > 0) cuts.insert(2 * begin);
  }
  for (const std::int64_t peak : work.PeakOperators()) cuts.insert(2 * peak + 1);
  std::int64_t whole_ns = 0;
  for (const std::int64_t duration : work.durations_ns()) whole_ns += duration;
  const std::int64_t stretch_ns =
      whole_ns / std::max<std::int64_t>(8, kMostWindows - static_cast<std::int64_t>(cuts.size())) + 1;
  const std::map<std::int64_t, std::int64_t> deadlines = work.Deadlines();
  auto deadline = deadlines.begin();
  std::int64_t passed_ns = 0, best = -1, most_bytes = 0;
  for (std::int64_t i = 0; i < work.operators(); ++i) {
    const std::int64_t stretch = passed_ns / stretch_ns;
    passed_ns += work.durations_ns()[static_cast<std::size_t>(i)];
    for (; deadline != deadlines.end() && deadline->first <= 2 * i + 2; ++deadline) {
      if (deadline->second <= most_bytes) continue;
      std::tie(best, most_bytes) = *deadline;
    }
    if (passed_ns / stretch_ns == stretch && i + 1 < work.operators()) continue;
    cuts.insert(best >= 0 ? best : 2 * i + 2);
    best = -1;
    most_bytes = 0;
  }
  return {cuts.begin(), cuts.end()};
}

CertificateBranch FindPrices(const StepWork& work, const std::vector<std::int64_t>& cuts, LayoutKind layout,
                             Bytes budget) {
  const WindowedWork windowed(work, cuts, layout, budget);
  return PriceClimb(work, windowed).Run(layout);
}

}  // namespace shardplan::optimize
