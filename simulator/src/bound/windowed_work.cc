// The bound itself: prices on windows and cuts, and what no plan can get around at these prices.
#include <algorithm>
#include <limits>
#include <utility>

#include "bound/concurrent_rates.h"
#include "bound/cost_lines.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/lower_bound.h"

namespace shardplan {

using internal::Int128;
using internal::kSlopeScale;

// [Note: scale of the sum]
// Work of kernels and collectives is counted in nanoseconds x kSlopeScale, its prices in parts of
// kPriceScale. So the sum is in nanoseconds x 2^52, and a byte at a price of 2^-40 ns is 2^12 of it.
namespace {
constexpr std::int64_t kByteFactor = kSlopeScale / (kBytePriceScale / kPriceScale);
constexpr Int128 kSumScale = Int128{kSlopeScale} * kPriceScale;
}  // namespace

std::int64_t WindowedWork::CutsUpTo(std::int64_t position) const {
  return std::ranges::upper_bound(cuts_, position) - cuts_.begin();
}

WindowedWork::WindowedWork(const StepWork& work, std::vector<std::int64_t> cuts, LayoutKind layout,
                           Bytes budget)
    : work_(work), cuts_(std::move(cuts)) {
  AddWindows();
  AddCuts(budget);
  AddParameters(layout);
}

void WindowedWork::AddWindows() {
  kernels_ns_.assign(cuts_.size() + 1, 0);
  for (std::int64_t i = 0; i < work_.operators(); ++i)
    kernels_ns_[CutsUpTo(2 * i + 1)] += work_.durations_ns_[i];
}

std::int32_t WindowedWork::part_link() const {
  for (const StepWork::SubMesh& part : work_.sub_meshes_) {
    if (part.gather.link >= 0 && part.gather.link != work_.gather_.link) return part.gather.link;
  }
  return -1;
}

std::int64_t WindowedWork::BytePriceOfGather() const {
  return std::max<std::int64_t>(work_.gather_.per_byte * (kBytePriceScale / kSlopeScale), 1);
}

// What is used before a cut and after it, whatever the plan.
void WindowedWork::AddCuts(Bytes budget) {
  room_bytes_.assign(cuts_.size(), budget.value - work_.static_bytes_.value);
  for (const StepWork::Storage& storage : work_.storages_) {
    if (storage.first < 0) continue;
    const std::int64_t end = CutsUpTo(2 * storage.last + 1);
    for (std::int64_t cut = CutsUpTo(2 * storage.first + 1); cut < end; ++cut)
      room_bytes_[cut] -= storage.size_bytes;
  }
}

void WindowedWork::AddParameters(LayoutKind layout) {
  const bool flat = layout == LayoutKind::kFlat;
  copied_per_gathered_ = flat ? 0 : 2;
  SetCopiedPerShard(flat);
  std::int64_t first_read = std::numeric_limits<std::int64_t>::max(), last_grad = -1;
  for (const StepWork::Parameter& p : work_.parameters_) {
    if (p.numel == 0) continue;
    const std::int64_t bytes = p.numel * p.gathered;
    for (std::size_t r = 0; r < p.reads.size(); ++r) {
      const std::int64_t start = 2 * p.reads[r] + 1;
      if (r == 0) {
        first_read = std::min(first_read, start);
        first_gathers_[{CutsUpTo(start - 1), CutsUpTo(start)}] += bytes;
      } else if (const Gap gap{CutsUpTo(2 * p.reads[r - 1] + 1), CutsUpTo(start), CutsUpTo(start - 1)};
                 std::get<0>(gap) < std::get<1>(gap)) {
        gaps_[gap] += bytes;
      }
    }
    casts_gradients_ = casts_gradients_ || p.gathered != p.reduced || !flat;
    for (std::size_t g = 0; g < p.grads.size(); ++g) {
      const std::int64_t end = 2 * p.grads[g] + 2;
      const bool again = g + 1 < p.grads.size();
      Reduced& reduced =
          reductions_[{CutsUpTo(end), CutsUpTo(end - 1), again ? CutsUpTo(2 * p.grads[g + 1] + 1) : -1}];
      reduced.numel += p.numel;
      reduced.gradient_bytes += p.numel * std::min(p.gathered, p.reduced);
      reduced.reduced_bytes += p.numel * p.reduced;
      if (!again) last_grad = std::max(last_grad, end);
    }
  }
  if (first_read < std::numeric_limits<std::int64_t>::max()) first_window_ = CutsUpTo(first_read - 1);
  if (last_grad >= 0) last_window_ = CutsUpTo(last_grad);
}

// The shard is read in the dtype that it is stored in and written in the one that is gathered; of a flat
// parameter only where these differ.
void WindowedWork::SetCopiedPerShard(bool flat) {
  copied_per_shard_ = std::numeric_limits<std::int64_t>::max();
  for (const StepWork::Parameter& p : work_.parameters_) {
    if (p.numel == 0) continue;
    const bool copied = !flat || p.stored != p.gathered;
    copied_per_shard_ = std::min(copied_per_shard_, copied ? 1 + p.stored / p.gathered : 0);
  }
  if (copied_per_shard_ == std::numeric_limits<std::int64_t>::max()) copied_per_shard_ = 0;
}

// One evaluation at given prices.
class WindowedWork::Sum {
 public:
  Sum(const WindowedWork& of, const std::vector<WindowPrices>& windows,
      const std::vector<std::int64_t>& bytes)
      : of_(of), windows_(windows), bytes_(bytes), before_(bytes.size() + 1, 0) {
    for (std::size_t c = 0; c < bytes.size(); ++c) before_[c + 1] = before_[c] + bytes[c];
  }

  Int128 Take() {
    Int128 sum = 0;
    for (std::size_t w = 0; w < windows_.size(); ++w) {
      sum += Int128{of_.kernels_ns_[w]} * windows_[w].kernels * kSlopeScale;
    }
    for (std::size_t c = 0; c < bytes_.size(); ++c) {
      sum -= Int128{of_.room_bytes_[c]} * bytes_[c] * kByteFactor;
    }
    for (const auto& [gap, bytes] : of_.gaps_) sum += Between(gap, bytes);
    for (const auto& [reduction, what] : of_.reductions_) {
      if (reduction.next >= 0) sum += Reduce(reduction, what, reduction.window);
    }
    return sum + FirstGathers() + LastReductions() + AllReduceBegin();
  }

 private:
  // What cuts [from, to) charge for so many bytes.
  Int128 Kept(std::int64_t bytes, std::int64_t from, std::int64_t to) const {
    return to <= from ? 0 : (before_[to] - before_[from]) * bytes * kByteFactor;
  }
  Int128 LinkPrice(std::int64_t window, std::int32_t link) const {
    return link < 0 ? 0 : windows_[window].links[link];
  }

  // [Note: buckets]
  // Parameters that are gathered by one collective are there before the first of their readers, and each
  // collective costs the begin of its line. A collective that is over later costs its parameters no more: so
  // of all ways to cut them into collectives, one that puts neighbours in the order of their readers together
  // is the cheapest, and the recurrence over such ways finds it. Reductions likewise, from the end.
  Int128 FirstGathers() const {
    std::vector<Int128> least = {0};  // of the first so many
    const auto begin = of_.first_gathers_.begin();
    for (auto item = begin; item != of_.first_gathers_.end(); ++item) least.push_back(-1);
    std::size_t first = 0;
    for (auto bucket = begin; bucket != of_.first_gathers_.end(); ++bucket, ++first) {
      const std::int64_t over = bucket->first.first;
      Int128 cost = least[first] +
                    CheapestUntil(over, of_.work_.gather_.link) * of_.work_.gather_.fixed_ns * kSlopeScale;
      std::size_t end = first;
      for (auto item = bucket; item != of_.first_gathers_.end(); ++item) {
        const auto& [key, bytes] = *item;
        cost +=
            Gather(of_.work_.gather_, bytes, bytes / of_.work_.shards_, 0, over, key.first, 0, key.second);
        Int128& best = least[++end];
        if (best < 0 || cost < best) best = cost;
      }
    }
    return least.back();
  }

  Int128 LastReductions() const {
    std::vector<std::pair<Reduction, Reduced>> items;  // from the last on
    for (const auto& item : of_.reductions_) {
      if (item.first.next < 0) items.push_back(item);
    }
    std::ranges::reverse(items);
    std::vector<Int128> least(items.size() + 1, -1);
    least[0] = 0;
    for (std::size_t first = 0; first < items.size(); ++first) {
      const std::int64_t from = items[first].first.window;
      Int128 cost = least[first] +
                    CheapestFrom(from, of_.work_.reduce_.link) * of_.work_.reduce_.fixed_ns * kSlopeScale;
      for (std::size_t end = first; end < items.size(); ++end) {
        cost += Reduce(items[end].first, items[end].second, from);
        if (least[end + 1] < 0 || cost < least[end + 1]) least[end + 1] = cost;
      }
    }
    return least.back();
  }

  // On a link in windows [first, over], copied until the window `last`, and there until the last of cuts
  // [cut, cuts) that come behind its begin.
  Int128 Gather(const StepWork::Line& line, std::int64_t bytes, std::int64_t shard_bytes, std::int64_t first,
                std::int64_t over, std::int64_t last, std::int64_t cut, std::int64_t cuts) const {
    const Int128 on_link = Int128{bytes} * line.per_byte;
    const Int128 copied = (Int128{bytes} * of_.copied_per_gathered_ + shard_bytes * of_.copied_per_shard_) *
                          of_.work_.copy_slope_;
    Int128 link_price = std::numeric_limits<std::int64_t>::max(), kernel_price = link_price, least = -1;
    for (std::int64_t begin = last; begin > over; --begin) {
      kernel_price = std::min(kernel_price, Int128{windows_[begin].kernels});
    }
    for (std::int64_t begin = over; begin >= first; --begin) {
      link_price = std::min(link_price, LinkPrice(begin, line.link));
      kernel_price = std::min(kernel_price, Int128{windows_[begin].kernels});
      const Int128 cost =
          link_price * on_link + kernel_price * copied + Kept(bytes, std::max(begin, cut), cuts);
      if (least < 0 || cost < least) least = cost;
    }
    return std::max<Int128>(least, 0);
  }

  // Kept whole, gathered again, or kept in part and gathered again from fewer ranks.
  Int128 Between(const Gap& gap, std::int64_t bytes) const {
    const auto& [from, to, last] = gap;
    Int128 least = Kept(bytes, from, to);
    if (least == 0) return 0;
    least = std::min(least,
                     Gather(of_.work_.gather_, bytes, bytes / of_.work_.shards_, from, last, last, from, to));
    for (const StepWork::SubMesh& part : of_.work_.sub_meshes_) {
      least = std::min(least, Kept(bytes / part.ranks, from, to) +
                                  Gather(part.gather, bytes, 0, from, last, last, from, to));
    }
    return least;
  }

  // Together with others, from the window `from` on; or, where another gradient of the parameter comes, added
  // to that one.
  Int128 Reduce(const Reduction& reduction, const Reduced& what, std::int64_t from) const {
    const StepWork::Line& line = of_.work_.reduce_;
    const auto windows = static_cast<std::int64_t>(windows_.size());
    const Int128 on_link = Int128{what.reduced_bytes} * line.per_byte;
    const Int128 on_replicas =
        reduction.next < 0 ? Int128{what.reduced_bytes / of_.work_.shards_} * of_.work_.all_reduce_.per_byte
                           : 0;
    Int128 link_price = std::numeric_limits<std::int64_t>::max(), least = -1;
    for (std::int64_t end = from; end < windows; ++end) {
      link_price = std::min(link_price, LinkPrice(end, line.link));
      const Int128 cost = link_price * on_link + Kept(what.gradient_bytes, reduction.cut, end);
      if (least < 0 || cost < least) least = cost;
    }
    least += CheapestFrom(reduction.window, of_.work_.all_reduce_.link) * on_replicas;
    if (of_.casts_gradients_) {
      const Int128 moved = Int128{what.gradient_bytes} + what.reduced_bytes;
      least += CheapestKernels(reduction.window) * moved * of_.work_.copy_slope_;
    }
    if (reduction.next < 0) return least;
    return std::min(least, Kept(what.gradient_bytes, reduction.cut, reduction.next));
  }

  Int128 CheapestFrom(std::int64_t window, std::int32_t link) const {
    Int128 price = std::numeric_limits<std::int64_t>::max();
    for (auto w = static_cast<std::size_t>(window); w < windows_.size(); ++w) {
      price = std::min(price, LinkPrice(static_cast<std::int64_t>(w), link));
    }
    return price;
  }
  Int128 CheapestKernels(std::int64_t window) const {
    std::int64_t price = std::numeric_limits<std::int64_t>::max();
    for (auto w = static_cast<std::size_t>(window); w < windows_.size(); ++w) {
      price = std::min(price, windows_[w].kernels);
    }
    return price;
  }

  Int128 CheapestUntil(std::int64_t window, std::int32_t link) const {
    Int128 price = std::numeric_limits<std::int64_t>::max();
    for (std::int64_t w = 0; w <= window; ++w) price = std::min(price, LinkPrice(w, link));
    return price;
  }

  // One collective at least adds the last gradient up over the replicas.
  Int128 AllReduceBegin() const {
    if (of_.last_window_ < 0) return 0;
    const StepWork::Line& line = of_.work_.all_reduce_;
    return CheapestFrom(of_.last_window_, line.link) * line.fixed_ns * kSlopeScale;
  }

  const WindowedWork& of_;
  const std::vector<WindowPrices>& windows_;
  const std::vector<std::int64_t>& bytes_;
  std::vector<Int128> before_;  // by cut: the prices of those before it
};

Nanoseconds WindowedWork::ValueOf(const std::vector<WindowPrices>& windows,
                                  const std::vector<std::int64_t>& bytes) const {
  const Int128 sum = Sum(*this, windows, bytes).Take();
  const Int128 before = std::clamp<Int128>(sum / kSumScale, 0, kLongestStep.value);
  const auto before_ns = static_cast<std::int64_t>(before);
  return std::max(work_.host_ns_, Nanoseconds{before_ns} + work_.optimizer_ns_);
}

Status WindowedWork::CheckPrices(const std::vector<WindowPrices>& windows,
                                 const std::vector<std::int64_t>& bytes) const {
  const auto refused = [](std::string what) { return MakeError(ErrorCode::kNegative, std::move(what)); };
  if (windows.size() != cuts_.size() + 1 || bytes.size() != cuts_.size())
    return refused("a branch of the certificate does not have prices for every window and cut");
  if (std::ranges::any_of(bytes, [](std::int64_t price) { return price < 0 || price > kHighestBytePrice; }))
    return refused("a price of a byte is negative or more than 1,024 ns");
  const std::size_t links = work_.cluster_.links.size();
  for (const WindowPrices& prices : windows) {
    const bool negative =
        prices.kernels < 0 || std::ranges::any_of(prices.links, [](std::int64_t price) { return price < 0; });
    if (negative || prices.links.size() != links)
      return refused("a window of the certificate does not have a price for every link, from 0 on");
    for (const internal::ConcurrentRates& rates : internal::ConcurrentRatesOf(work_.cluster_)) {
      Int128 earned = Int128{prices.kernels} * rates.kernels_ppm;
      for (std::size_t l = 0; l < links; ++l) earned += Int128{prices.links[l]} * rates.links_ppm[l];
      if (earned > Int128{kPriceScale} * 1'000'000)
        return refused("the prices of a window add up to more than a nanosecond for what can be done in one");
    }
  }
  return {};
}

Result<Nanoseconds> WindowedWork::Value(const std::vector<WindowPrices>& windows,
                                        const std::vector<std::int64_t>& bytes) const {
  if (Status checked = CheckPrices(windows, bytes); !checked) return std::unexpected(checked.error());
  return ValueOf(windows, bytes);
}

}  // namespace shardplan
