// SPDX-License-Identifier: Apache-2.0
// The bound itself: prices on windows and cuts, and what no plan can get around at these prices.
#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "bound/concurrent_rates.h"
#include "bound/cost_lines.h"
#include "bound/step_parts.h"
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
    : work_(*work.parts_), cuts_(std::move(cuts)) {
  AddWindows();
  AddCuts(layout, budget);
  AddStretches();
  AddParameters(layout);
}

// [Note: collectives of the model]
// A collective that the compute stream waits for at once starts when the operator before it has ended, and
// the one behind it starts when it has ended. So it is in one window, like an operator. Another one is
// between the operator before it and the one behind the wait. Positions of an operator that is a collective
// are two instants of the compute stream between its neighbours: around it if it is waited for at once.
void WindowedWork::AddWindows() {
  kernels_ns_.assign(cuts_.size() + 1, 0);
  waits_ns_ = kernels_ns_;
  for (std::int64_t i = 0; i < std::ssize(work_.durations_ns); ++i)
    kernels_ns_[CutsUpTo(2 * i + 1)] += work_.durations_ns[i];
  for (const StepWork::Parts::ModelCollective& collective : work_.model_collectives) {
    const bool waits = collective.until < 0;
    const std::int64_t from = CutsUpTo(2 * collective.op + (waits ? 1 : 0));
    const std::int64_t to = waits ? from : CutsUpTo(2 * collective.until);
    if (waits) waits_ns_[from] += collective.duration_ns;
    moved_[{from, to, collective.loads}] += collective.duration_ns;
  }
}

std::size_t WindowedWork::links() const {
  return std::min(work_.cluster.links.size(), std::tuple_size_v<StepWork::Parts::Line>);
}

std::int64_t WindowedWork::BytePriceOfGather() const {
  std::int64_t per_byte = 0;
  for (const StepWork::Parts::Mesh& mesh : work_.meshes) {
    for (const StepWork::Parts::LineOnLink& on : mesh.gather) per_byte = std::max(per_byte, on.per_byte);
  }
  return std::max<std::int64_t>(per_byte * (kBytePriceScale / kSlopeScale), 1);
}

// Bytes that are there from the start of operator `first` to the end of operator `last`.
void WindowedWork::UseRoom(std::int64_t bytes, std::int64_t first, std::int64_t last) {
  const std::int64_t end = CutsUpTo(2 * last + 2);
  for (std::int64_t cut = CutsUpTo(2 * first); cut < end; ++cut) room_bytes_[cut] -= bytes;
}

// [Note: shards and what two levels leave]
// The pool of reduced gradients holds all shards when the optimizer steps. In earlier micro-batches it may
// hold what the first of two levels leaves instead, so its peak is not the sum of the two. If that may be,
// shards count from the first part of their gradient on, as the least that waits in any case.
bool WindowedWork::ShardsCountAlways(LayoutKind layout) const {
  const auto may_leave_some = [&](const StepWork::Parts::Parameter& p) {
    return p.grads.size() > 1 && !work_.MeshOf(p).two_levels.empty();
  };
  return layout == LayoutKind::kPerParameter && work_.pools_apart &&
         std::ranges::none_of(work_.parameters, may_leave_some);
}

// Memory at a cut that every plan has.
void WindowedWork::AddCuts(LayoutKind layout, Bytes budget) {
  const std::int64_t apart = ShardsCountAlways(layout) ? work_.GradientShards() : 0;
  room_bytes_.assign(cuts_.size(), budget.value - work_.static_bytes.value - apart);
  for (const StepWork::Parts::Storage& storage : work_.storages) {
    if (storage.first >= 0) UseRoom(storage.size_bytes, storage.first, storage.last);
  }
  for (std::int64_t op = 0; op < std::ssize(work_.used_later_bytes); ++op) {
    if (const std::int64_t bytes = work_.used_later_bytes[op]; bytes > 0) UseRoom(bytes, op, op);
  }
}

void WindowedWork::AddStretches() {
  for (const internal::RecomputedStretch& of_work : work_.stretches) {
    const Stretch stretch{.choices = of_work.choices.get(),
                          .from = CutsUpTo(2 * of_work.from + 2),
                          .to = CutsUpTo(2 * of_work.to),
                          .last = CutsUpTo(2 * of_work.until + 1)};
    if (stretch.from < stretch.to) stretches_.push_back(stretch);
  }
}

void WindowedWork::AddParameters(LayoutKind layout) {
  const bool flat = layout == LayoutKind::kFlat;
  const bool shards_count_always = ShardsCountAlways(layout);
  copied_per_gathered_ = flat ? 0 : 2;
  copies_in_order_ = !flat;
  on_meshes_.resize(work_.meshes.size());
  SetCopiedPerShard(flat);
  std::vector<std::int64_t> last_grads(on_meshes_.size(), -1);
  for (const StepWork::Parts::Parameter& p : work_.parameters) {
    if (p.numel == 0) continue;
    OnMesh& on = on_meshes_[p.mesh];
    const std::int64_t bytes = p.numel * p.gathered;
    for (std::size_t r = 0; r < p.reads.size(); ++r) {
      UseRoom(bytes, p.reads[r], p.reads[r]);
      const std::int64_t before = CutsUpTo(2 * p.reads[r]);
      if (r == 0) {
        on.first_gathers[before] += bytes;
      } else if (const Gap gap{CutsUpTo(2 * p.reads[r - 1] + 2), before}; gap.first < gap.second) {
        Gathered& gathered = on.gaps[gap];
        gathered.bytes += bytes;
        gathered.padded_bytes += flat ? bytes : p.padded_numel * p.gathered;
      }
    }
    if (!flat && work_.pools_apart && !p.reads.empty()) {
      largest_gathered_ = std::max(largest_gathered_, bytes);
      on.first_gathered += bytes;
    }
    const std::int64_t waiting_bytes = shards_count_always ? 0 : p.WaitingBytes(work_.MeshOf(p).shards);
    if (!p.grads.empty() && waiting_bytes > 0)
      UseRoom(waiting_bytes, p.grads.front(), std::ssize(work_.durations_ns));
    casts_gradients_ = casts_gradients_ || p.gathered != p.reduced || !flat;
    for (std::size_t g = 0; g < p.grads.size(); ++g) {
      const std::int64_t end = 2 * p.grads[g] + 2;
      const bool again = g + 1 < p.grads.size();
      const std::int64_t next = again ? CutsUpTo(2 * p.grads[g + 1]) : -1;
      const std::int64_t later = std::min(next, CutsUpTo(2 * work_.PassBehind(p.grads[g])));
      Reduced& reduced = on.reductions[{CutsUpTo(end), CutsUpTo(end - 2), next, later}];
      reduced.numel += p.numel;
      reduced.gradient_bytes += p.numel * std::min(p.gathered, p.reduced);
      reduced.unsharded_bytes += p.numel * std::min(p.gathered, p.reduced) - waiting_bytes;
      reduced.kept_bytes += p.numel * (flat ? std::min(p.gathered, p.reduced) : p.reduced) - waiting_bytes;
      reduced.reduced_bytes += p.numel * p.reduced;
      if (!again) last_grads[p.mesh] = std::max(last_grads[p.mesh], end);
    }
  }
  for (std::size_t m = 0; m < on_meshes_.size(); ++m) {
    if (last_grads[m] >= 0) on_meshes_[m].last_window = CutsUpTo(last_grads[m]);
  }
}

// While the compute stream waits for a collective of the model, no kernel of it runs. So what the prices of
// the links leave of a nanosecond is the price of the wait, and kernels of other streams share it
// (bound/concurrent_rates.h). Other windows have one price for all kernels.
PricesBesideWaits WindowedWork::PricesBeside(const WindowPrices& prices, std::size_t window) const {
  if (waits_ns_[window] == 0) return {.copies = prices.kernels};
  return internal::HighestBesideWaits(work_.cluster, prices);
}

// The shard is read in the dtype that it is stored in and written in the one that is gathered; of a flat
// parameter only where these differ.
void WindowedWork::SetCopiedPerShard(bool flat) {
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  for (OnMesh& on : on_meshes_) on.copied_per_shard = kNone;
  for (const StepWork::Parts::Parameter& p : work_.parameters) {
    if (p.numel == 0) continue;
    const bool copied = !flat || p.stored != p.gathered;
    std::int64_t& least = on_meshes_[p.mesh].copied_per_shard;
    least = std::min(least, copied ? 1 + p.stored / p.gathered : 0);
  }
  for (OnMesh& on : on_meshes_) {
    if (on.copied_per_shard == kNone) on.copied_per_shard = 0;
  }
}

// Prices by window, and the cheapest windows of ranges.
class PriceTable {
 public:
  explicit PriceTable(std::vector<Int128> prices) : prices_(std::move(prices)) {
    const std::size_t count = prices_.size();
    cheapest_.assign(count * count, 0);
    for (std::size_t from = 0; from < count; ++from) {
      std::size_t best = from;
      for (std::size_t to = from; to < count; ++to) {
        if (prices_[to] < prices_[best]) best = to;
        cheapest_[from * count + to] = static_cast<std::int32_t>(best);
      }
    }
  }
  Int128 operator[](std::int64_t window) const { return prices_[window]; }
  // The cheapest of the windows [from, to].
  std::int64_t Cheapest(std::int64_t from, std::int64_t to) const {
    return cheapest_[from * static_cast<std::int64_t>(prices_.size()) + std::max(from, to)];
  }
  Int128 Least(std::int64_t from, std::int64_t to) const { return prices_[Cheapest(from, to)]; }

 private:
  std::vector<Int128> prices_;
  std::vector<std::int32_t> cheapest_;
};

// The cheapest window from one on.
std::vector<std::int32_t> CheapestFrom(const std::vector<Int128>& prices) {
  std::vector<std::int32_t> cheapest(prices.size());
  for (std::size_t w = prices.size(); w-- > 0;) {
    const bool last = w + 1 == prices.size();
    cheapest[w] =
        last || prices[w] <= prices[cheapest[w + 1]] ? static_cast<std::int32_t>(w) : cheapest[w + 1];
  }
  return cheapest;
}

// One evaluation at given prices.
//
// [Note: where a collective is]
// A collective may run in several windows. In one of these its work is cheapest: the collective costs no less
// than all of it there, with the copies of its input there or earlier, and those of its output there or
// later. So it is in one window.
class WindowedWork::Sum {
 public:
  Sum(const WindowedWork& of, const std::vector<WindowPrices>& windows,
      const std::vector<std::int64_t>& bytes, WindowUse* use)
      : of_(of),
        windows_(windows),
        last_(static_cast<std::int64_t>(windows.size()) - 1),
        use_(use),
        before_(bytes.size() + 1, 0),
        beside_(BesideOf(of, windows)),
        kernels_(PricesOf([](const WindowPrices& prices) { return Int128{prices.kernels}; })),
        copies_(CopyPrices()) {
    for (std::size_t m = 0; m < of.on_meshes_.size(); ++m) AddMesh(of.on_meshes_[m], of.work_.meshes[m]);
    for (std::size_t c = 0; c < bytes.size(); ++c) before_[c + 1] = before_[c] + bytes[c];
    if (use_ == nullptr) return;
    use_->kernels_ns.assign(windows.size(), 0);
    use_->copies_ns = use_->kernels_ns;
    use_->links_ns.assign(windows.size(), std::vector<std::int64_t>(of.links(), 0));
    use_->bytes.assign(bytes.size(), 0);
  }

  Int128 Take() {
    Int128 sum = 0;
    for (std::size_t w = 0; w < windows_.size(); ++w) {
      sum += Int128{of_.kernels_ns_[w]} * windows_[w].kernels * kSlopeScale;
      sum += Int128{of_.waits_ns_[w]} * beside_[w].waits * kSlopeScale;
      if (use_ != nullptr) use_->kernels_ns[w] += of_.kernels_ns_[w];
    }
    for (const auto& [where, duration_ns] : of_.moved_) sum += Moved(where, duration_ns);
    for (std::size_t c = 0; c + 1 < before_.size(); ++c) {
      sum -= of_.room_bytes_[c] * (before_[c + 1] - before_[c]) * kByteFactor;
      if (use_ != nullptr) use_->bytes[c] -= of_.room_bytes_[c];
    }
    for (const Stretch& stretch : of_.stretches_) sum += KeepOrRunAgain(stretch);
    for (MeshPrices& at : meshes_) {
      for (const auto& [reduction, what] : at.on.reductions) {
        if (reduction.next >= 0) sum += ReduceOrKeep(at, reduction, what);
      }
      sum += LastReductions(at) + AllReduceBegin(at);
    }
    return sum + Gathers();
  }

 private:
  using Prices = std::vector<Int128>;  // by window

  // Prices of the collectives over one mesh, and what is gathered and reduced there.
  struct MeshPrices {
    const OnMesh& on;
    const StepWork::Parts::Mesh& mesh;
    Prices gather;
    Prices reduce;  // of a byte, the cheapest way
    PriceTable all_reduce;
    std::vector<Prices> parts;
    std::vector<Prices> inner;  // by TwoLevels: of a byte that is reduced over the inner ranks
    std::vector<std::vector<std::int32_t>> outer;  // ... the window, from one on, to reduce over the others
    Prices reduce_begin;                           // of a reduction that begins in the window
    std::vector<std::int32_t>
        levels_of;  // by window: the cheapest way to reduce, into TwoLevels; -1: at once
    // The first gathers: the cost of all of them, the least cost of their bytes, and the cost of each more.
    Int128 first_cost = 0, first_bytes_cost = 0, first_begin_cost = 0;
  };

  void AddMesh(const OnMesh& on, const StepWork::Parts::Mesh& mesh) {
    MeshPrices at{.on = on,
                  .mesh = mesh,
                  .gather = BytePrices(mesh.gather),
                  .reduce = BytePrices(mesh.reduce),
                  .all_reduce = PriceTable(BytePrices(mesh.all_reduce))};
    for (const StepWork::Parts::SubMesh& part : mesh.sub_meshes) at.parts.push_back(BytePrices(part.gather));
    AddWaysToReduce(at);
    meshes_.push_back(std::move(at));
  }

  static std::vector<PricesBesideWaits> BesideOf(const WindowedWork& of,
                                                 const std::vector<WindowPrices>& windows) {
    std::vector<PricesBesideWaits> beside;
    for (std::size_t w = 0; w < windows.size(); ++w) beside.push_back(of.PricesBeside(windows[w], w));
    return beside;
  }

  Prices CopyPrices() const {
    Prices prices;
    for (const PricesBesideWaits& beside : beside_) prices.push_back(beside.copies);
    return prices;
  }

  // A collective of the model on the links that it uses.
  Int128 Moved(const MovedInWindows& where, std::int64_t duration_ns) {
    std::array<std::int64_t, 2> links_ns{};
    for (std::size_t l = 0; l < of_.links(); ++l)
      links_ns[l] = static_cast<std::int64_t>(Int128{duration_ns} * where.loads.ppm[l] / 1'000'000);
    Int128 least = -1;
    std::int64_t window = where.from;
    for (std::int64_t w = where.from; w <= where.to; ++w) {
      Int128 cost = 0;
      for (std::size_t l = 0; l < of_.links(); ++l)
        cost += Int128{windows_[w].links[l]} * links_ns[l] * kSlopeScale;
      if (least < 0 || cost < least) std::tie(least, window) = std::tuple(cost, w);
    }
    for (std::size_t l = 0; use_ != nullptr && l < of_.links(); ++l) use_->links_ns[window][l] += links_ns[l];
    return least;
  }

  template <typename PriceOf>
  Prices PricesOf(PriceOf price_of) const {
    Prices prices;
    for (const WindowPrices& window : windows_) prices.push_back(price_of(window));
    return prices;
  }
  // Prices of a byte on the links.
  Prices BytePrices(const StepWork::Parts::Line& line) const {
    return PricesOf([&](const WindowPrices& prices) {
      Int128 price = 0;
      for (std::size_t l = 0; l < of_.links(); ++l) price += Int128{prices.links[l]} * line[l].per_byte;
      return price;
    });
  }
  // Prices of the begin of a collective.
  Prices BeginPrices(const StepWork::Parts::Line& line) const {
    return PricesOf([&](const WindowPrices& prices) {
      Int128 price = 0;
      for (std::size_t l = 0; l < of_.links(); ++l) price += Int128{prices.links[l]} * line[l].fixed_ns;
      return price * kSlopeScale;
    });
  }

  // [Note: ways to reduce]
  // Over all shards at once, or over inner ranks in one window and over the others in that or a later one.
  // The cheapest begin and the cheapest price of a byte, whichever way has them, are no more than any way's.
  void AddWaysToReduce(MeshPrices& at) const {
    at.reduce_begin = BeginPrices(at.mesh.reduce);
    at.levels_of.assign(windows_.size(), -1);
    for (std::size_t i = 0; i < at.mesh.two_levels.size(); ++i) {
      const StepWork::Parts::TwoLevels& levels = at.mesh.two_levels[i];
      at.inner.push_back(BytePrices(levels.inner));
      const Prices outer = BytePrices(levels.outer);
      at.outer.push_back(CheapestFrom(outer));
      const Prices begin = BeginPrices(levels.inner), outer_begin = BeginPrices(levels.outer);
      const std::vector<std::int32_t> begins = CheapestFrom(outer_begin);
      for (std::int64_t w = 0; w <= last_; ++w) {
        at.reduce_begin[w] = std::min(at.reduce_begin[w], begin[w] + outer_begin[begins[w]]);
        const Int128 byte = at.inner[i][w] + outer[at.outer[i][w]] / levels.inner_ranks;
        if (byte >= at.reduce[w]) continue;
        at.reduce[w] = byte;
        at.levels_of[w] = static_cast<std::int32_t>(i);
      }
    }
  }

  void UseReduce(const MeshPrices& at, std::int64_t begins, std::int64_t bytes, std::int64_t window) {
    const std::int32_t way = at.levels_of[window];
    if (way < 0) return UseLinks(at.mesh.reduce, begins, bytes, window);
    const StepWork::Parts::TwoLevels& levels = at.mesh.two_levels[way];
    UseLinks(levels.inner, begins, bytes, window);
    UseLinks(levels.outer, begins, bytes / levels.inner_ranks, at.outer[way][window]);
  }

  // The charge of cuts [from, to) for so many bytes.
  Int128 Kept(std::int64_t bytes, std::int64_t from, std::int64_t to) const {
    return to <= from ? 0 : (before_[to] - before_[from]) * bytes * kByteFactor;
  }

  void UseBytes(std::int64_t bytes, std::int64_t from, std::int64_t to) {
    for (std::int64_t c = from; use_ != nullptr && c < to; ++c) use_->bytes[c] += bytes;
  }
  void UseKernels(Int128 work, std::int64_t from, std::int64_t to) {
    if (use_ != nullptr)
      use_->kernels_ns[kernels_.Cheapest(from, to)] += static_cast<std::int64_t>(work / kSlopeScale);
  }
  void UseCopies(Int128 work, std::int64_t from, std::int64_t to) {
    if (use_ != nullptr)
      use_->copies_ns[copies_.Cheapest(from, to)] += static_cast<std::int64_t>(work / kSlopeScale);
  }
  // The kernels that copy what was gathered, and gradients that are to be reduced.
  const PriceTable& BesideModel() const { return of_.copies_in_order_ ? kernels_ : copies_; }
  void UseBesideModel(Int128 work, std::int64_t from, std::int64_t to) {
    of_.copies_in_order_ ? UseKernels(work, from, to) : UseCopies(work, from, to);
  }
  void UseLinks(const StepWork::Parts::Line& line, std::int64_t begins, std::int64_t bytes,
                std::int64_t window) {
    for (std::size_t l = 0; use_ != nullptr && l < of_.links(); ++l) {
      const Int128 work = Int128{bytes} * line[l].per_byte / kSlopeScale;
      use_->links_ns[window][l] += begins * line[l].fixed_ns + static_cast<std::int64_t>(work);
    }
  }

  // Work of kernels for so many bytes gathered: before the gather, and after it.
  Int128 CopiedIn(const MeshPrices& at, std::int64_t bytes) const {
    return Int128{bytes} * at.on.copied_per_shard * of_.work_.copy_slope / at.mesh.shards;
  }
  Int128 CopiedOut(std::int64_t bytes) const {
    return Int128{bytes} * of_.copied_per_gathered_ * of_.work_.copy_slope;
  }

  // [Note: buckets]
  // Parameters that are gathered by one collective are there before the first of their readers, and each
  // collective costs the begin of its line. Which of the windows a parameter may be gathered in is cheapest
  // for it does not depend on the parameter (what is copied behind the gather is priced as if it were wanted
  // when the last of them is): so of all ways to cut parameters into collectives, one that puts neighbours in
  // the order of their readers together is the cheapest, and the recurrence over such ways finds it.
  // Reductions likewise, from the end.
  struct Bucket {
    Int128 cost = -1;  // of all up to its end; -1: none is known
    std::size_t first = 0;
    std::int64_t window = 0;
  };

  // By number of items, the last bucket of the cheapest way to cut so many of the first items. `may_begin`:
  // whether a bucket that begins with an item may be in a window; what follows the item may be there, too.
  template <typename CostOf, typename MayBegin>
  std::vector<Bucket> CheapestBuckets(std::size_t items, const Prices& begins, CostOf cost_of,
                                      MayBegin may_begin) const {
    std::vector<Bucket> least(items + 1);
    least[0].cost = 0;
    std::vector<Bucket> open(windows_.size());  // by window: the cheapest that goes on
    for (std::size_t item = 0; item < items; ++item) {
      for (std::int64_t w = 0; w <= last_; ++w) {
        const Int128 fresh = least[item].cost + begins[w];
        if (may_begin(item, w) && (open[w].cost < 0 || fresh < open[w].cost)) open[w] = {fresh, item, w};
        if (open[w].cost < 0) continue;
        open[w].cost += cost_of(item, w);
        if (least[item + 1].cost < 0 || open[w].cost < least[item + 1].cost) least[item + 1] = open[w];
      }
    }
    return least;
  }

  // [Note: outputs of gathers]
  // From its gather to its copy out a parameter is in the output of the gather. The sum takes the higher of
  // two bounds. Either each parameter is charged at the cuts between its gather and its reader, as it is in
  // one of the pools. Or outputs are charged as what they are in the layout per_parameter, a pool of their
  // own: at all cuts the largest of them. That is no less than the largest parameter, and no less than all
  // bytes that are gathered first over the number of these gathers.
  Int128 Gathers() {
    if (of_.largest_gathered_ == 0) return AllGathers();
    WindowUse* const use = std::exchange(use_, nullptr);
    const Int128 waiting = AllGathers();
    waits_ = false;
    const Int128 apart = AllGathers() + LargestOutput();
    waits_ = waiting >= apart;
    use_ = use;
    if (use_ == nullptr) return std::max(waiting, apart);
    const Int128 gathers = AllGathers();
    return waits_ ? gathers : gathers + LargestOutput();
  }

  Int128 AllGathers() {
    Int128 sum = 0;
    for (MeshPrices& at : meshes_) {
      sum += FirstGathers(at);
      for (const auto& [gap, gathered] : at.on.gaps) sum += Between(at, gap, gathered);
    }
    return sum;
  }

  // The charge of cuts [from, to) for a parameter that is gathered and not yet read.
  Int128 Waiting(std::int64_t bytes, std::int64_t from, std::int64_t to) const {
    return waits_ ? Kept(bytes, from, to) : 0;
  }
  void UseWaiting(std::int64_t bytes, std::int64_t from, std::int64_t to) {
    if (waits_) UseBytes(bytes, from, to);
  }

  // The memory of the largest output, and what more first gathers than are the cheapest cost: of the mesh
  // over which most is gathered.
  Int128 LargestOutput() {
    const auto cuts = static_cast<std::int64_t>(before_.size()) - 1;
    const MeshPrices& most =
        *std::ranges::max_element(meshes_, {}, [](const MeshPrices& at) { return at.on.first_gathered; });
    const auto output = [&](std::int64_t gathers) {
      return std::max(of_.largest_gathered_, most.on.first_gathered / gathers);
    };
    std::int64_t best = 0;
    Int128 least = 0;
    for (std::int64_t gathers = 1;; ++gathers) {
      const Int128 more =
          std::max<Int128>(most.first_bytes_cost + gathers * most.first_begin_cost - most.first_cost, 0);
      const Int128 cost = more + Kept(output(gathers), 0, cuts);
      if (best == 0 || cost < least) std::tie(best, least) = std::tuple(gathers, cost);
      if (output(gathers) <= of_.largest_gathered_) break;
    }
    UseBytes(output(best), 0, cuts);
    return least;
  }

  Int128 FirstGathers(MeshPrices& at) {
    struct Item {
      std::int64_t over, bytes;
    };
    std::vector<Item> items;
    for (const auto& [over, bytes] : at.on.first_gathers) items.push_back({over, bytes});
    if (items.empty()) return 0;
    const std::int64_t last = items.back().over;
    const auto cost_of = [&](std::size_t i, std::int64_t w) {
      const Item& item = items[i];
      return at.gather[w] * item.bytes + copies_.Least(0, w) * CopiedIn(at, item.bytes) +
             BesideModel().Least(w, last) * CopiedOut(item.bytes) + Waiting(item.bytes, w, item.over);
    };
    const Prices begins = BeginPrices(at.mesh.gather);
    at.first_begin_cost = *std::min_element(begins.begin(), begins.begin() + last + 1);
    at.first_bytes_cost = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
      Int128 cheapest = cost_of(i, 0);
      for (std::int64_t w = 1; w <= items[i].over; ++w) cheapest = std::min(cheapest, cost_of(i, w));
      at.first_bytes_cost += cheapest;
    }
    const std::vector<Bucket> least = CheapestBuckets(
        items.size(), begins, cost_of, [&](std::size_t i, std::int64_t w) { return w <= items[i].over; });
    for (std::size_t end = items.size(); use_ != nullptr && end > 0; end = least[end].first) {
      const std::int64_t w = least[end].window;
      UseLinks(at.mesh.gather, 1, 0, w);
      for (std::size_t i = least[end].first; i < end; ++i) {
        UseLinks(at.mesh.gather, 0, items[i].bytes, w);
        UseCopies(CopiedIn(at, items[i].bytes), 0, w);
        UseBesideModel(CopiedOut(items[i].bytes), w, last);
        UseWaiting(items[i].bytes, w, items[i].over);
      }
    }
    at.first_cost = least.back().cost;
    return at.first_cost;
  }

  // Other work for a gradient that is reduced in the window: it is copied before, from the window `from` on,
  // and added up over the replicas behind.
  Int128 AroundReduction(const MeshPrices& at, const Reduced& what, std::int64_t from,
                         std::int64_t window) const {
    return BesideModel().Least(from, window) * CastWork(what) +
           at.all_reduce.Least(window, last_) * what.reduced_bytes / at.mesh.shards;
  }
  Int128 CastWork(const Reduced& what) const {
    if (!of_.casts_gradients_) return 0;
    return (Int128{what.gradient_bytes} + what.reduced_bytes) * of_.work_.copy_slope;
  }
  void UseReduction(const MeshPrices& at, const Reduced& what, std::int64_t from, std::int64_t window) {
    if (use_ == nullptr) return;
    UseReduce(at, 0, what.reduced_bytes, window);
    UseLinks(at.mesh.all_reduce, 0, what.reduced_bytes / at.mesh.shards,
             at.all_reduce.Cheapest(window, last_));
    UseBesideModel(CastWork(what), from, window);
  }

  Int128 LastReductions(const MeshPrices& at) {
    std::vector<std::pair<Reduction, Reduced>> items;  // from the last on
    for (const auto& item : at.on.reductions) {
      if (item.first.next < 0) items.push_back(item);
    }
    if (items.empty()) return 0;
    std::ranges::reverse(items);
    const std::int64_t earliest = items.back().first.window;
    const auto cost_of = [&](std::size_t i, std::int64_t w) {
      const auto& [reduction, what] = items[i];
      return at.reduce[w] * what.reduced_bytes + AroundReduction(at, what, earliest, w) +
             Kept(what.unsharded_bytes, reduction.cut, w);
    };
    const std::vector<Bucket> least =
        CheapestBuckets(items.size(), at.reduce_begin, cost_of,
                        [&](std::size_t i, std::int64_t w) { return w >= items[i].first.window; });
    for (std::size_t end = items.size(); use_ != nullptr && end > 0; end = least[end].first) {
      const std::int64_t w = least[end].window;
      UseReduce(at, 1, 0, w);
      for (std::size_t i = least[end].first; i < end; ++i) {
        UseReduction(at, items[i].second, earliest, w);
        UseBytes(items[i].second.unsharded_bytes, items[i].first.cut, w);
      }
    }
    return least.back().cost;
  }

  // Kept whole, gathered again, or kept in part and gathered again from fewer ranks. Parts are those of the
  // padded pieces of rows: parameters that are cut otherwise are not kept in part.
  Int128 Between(const MeshPrices& at, const Gap& gap, const Gathered& gathered) {
    const auto& [from, to] = gap;
    const std::int64_t bytes = gathered.bytes;
    const auto part_of = [&](std::size_t p) { return gathered.padded_bytes / at.mesh.sub_meshes[p].ranks; };
    constexpr std::int64_t kWhole = -1;
    Int128 least = Kept(bytes, from, to);
    if (least == 0) {
      UseBytes(bytes, from, to);
      return 0;
    }
    std::int64_t window = kWhole;
    std::size_t part = at.parts.size();  // of all ranks
    // A gather that is issued behind the first read may run on the device before it: then the parameter is
    // there from the first read to the second, which costs as much as to keep it where that is charged.
    const std::int64_t begin = waits_ ? from : 0;
    const Int128 copied_out = BesideModel().Least(begin, to) * CopiedOut(bytes);
    const auto consider = [&](const Prices& line, Int128 kept, std::int64_t moved, std::int64_t copied_in,
                              std::size_t by) {
      if (kept + copied_out >= least) return;  // in no window it is cheaper
      for (std::int64_t w = begin; w <= to; ++w) {
        const Int128 cost = kept + line[w] * moved + copies_.Least(begin, w) * CopiedIn(at, copied_in) +
                            BesideModel().Least(w, to) * CopiedOut(bytes) +
                            Waiting(bytes, std::max(w, from), to);
        if (cost < least) std::tie(least, window, part) = std::tuple(cost, w, by);
      }
    };
    consider(at.gather, 0, bytes, bytes, at.parts.size());
    for (std::size_t p = 0; p < at.parts.size(); ++p)
      consider(at.parts[p], Kept(part_of(p), from, to), gathered.padded_bytes, 0, p);
    if (use_ == nullptr) return least;
    if (window == kWhole) {
      UseBytes(bytes, from, to);
      return least;
    }
    UseWaiting(bytes, std::max(window, from), to);
    const bool of_all = part == at.parts.size();
    if (!of_all) UseBytes(part_of(part), from, to);
    UseLinks(of_all ? at.mesh.gather : at.mesh.sub_meshes[part].gather, 0,
             of_all ? bytes : gathered.padded_bytes, window);
    UseCopies(CopiedIn(at, of_all ? bytes : 0), begin, window);
    UseBesideModel(CopiedOut(bytes), window, to);
    return least;
  }

  // At each cut that charges for bytes some of the stretch is kept, and the rest is made again behind it.
  // With the price of a nanosecond divided among the cuts as these prices are, each has the same cheapest
  // choice.
  Int128 KeepOrRunAgain(const Stretch& stretch) {
    const Int128 again = kernels_.Least(stretch.from + 1, stretch.last) * kSlopeScale;
    const internal::RecomputationChoice* cheapest = nullptr;
    Int128 least = 0;
    for (const internal::RecomputationChoice& choice : *stretch.choices) {
      const Int128 cost = again * choice.again_ns + Kept(choice.kept_bytes, stretch.from, stretch.to);
      if (cheapest != nullptr && cost >= least) continue;
      cheapest = &choice;
      least = cost;
    }
    UseKernels(Int128{cheapest->again_ns} * kSlopeScale, stretch.from + 1, stretch.last);
    UseBytes(cheapest->kept_bytes, stretch.from, stretch.to);
    return least;
  }

  // Added to the next gradient of the parameter; reduced before; or reduced over the inner ranks of two
  // levels, and what that leaves is added to the next.
  Int128 ReduceOrKeep(const MeshPrices& at, const Reduction& reduction, const Reduced& what) {
    constexpr std::int64_t kNever = -1;
    const auto kept_until = [&](std::int64_t cut) {
      return Kept(what.unsharded_bytes, reduction.cut, std::min(cut, reduction.later)) +
             Kept(what.kept_bytes, reduction.later, cut);
    };
    // Beside the shard, which is counted for every gradient.
    const auto left_of = [&](std::size_t level) {
      return std::max<std::int64_t>(0, what.reduced_bytes / at.mesh.two_levels[level].inner_ranks -
                                           what.reduced_bytes / at.mesh.shards);
    };
    Int128 least = kept_until(reduction.next);
    std::int64_t window = kNever;
    const std::size_t all_the_way = at.inner.size();
    std::size_t level = all_the_way;
    const auto consider = [&](const Prices& line, std::int64_t left_bytes, std::size_t by) {
      for (std::int64_t w = reduction.window; w <= last_; ++w) {
        const Int128 moved = BesideModel().Least(reduction.window, w) * CastWork(what);
        const Int128 cost = line[w] * what.reduced_bytes + moved + kept_until(w) +
                            Kept(left_bytes, std::max(w, reduction.cut), reduction.next);
        if (cost < least) std::tie(least, window, level) = std::tuple(cost, w, by);
      }
    };
    consider(at.reduce, 0, all_the_way);
    for (std::size_t l = 0; l < at.inner.size(); ++l) consider(at.inner[l], left_of(l), l);
    if (use_ == nullptr) return least;
    const std::int64_t until = window == kNever ? reduction.next : window;
    UseBytes(what.unsharded_bytes, reduction.cut, std::min(until, reduction.later));
    UseBytes(what.kept_bytes, reduction.later, until);
    if (window == kNever) return least;
    if (level == all_the_way) {
      UseReduce(at, 0, what.reduced_bytes, window);
    } else {
      UseBytes(left_of(level), std::max(window, reduction.cut), reduction.next);
      UseLinks(at.mesh.two_levels[level].inner, 0, what.reduced_bytes, window);
    }
    UseBesideModel(CastWork(what), reduction.window, window);
    return least;
  }

  // One collective at least adds the last gradient up over the replicas.
  Int128 AllReduceBegin(const MeshPrices& at) {
    if (at.on.last_window < 0) return 0;
    const PriceTable begins(BeginPrices(at.mesh.all_reduce));
    UseLinks(at.mesh.all_reduce, 1, 0, begins.Cheapest(at.on.last_window, last_));
    return begins.Least(at.on.last_window, last_);
  }

  const WindowedWork& of_;
  const std::vector<WindowPrices>& windows_;
  const std::int64_t last_;  // window
  WindowUse* use_;
  bool waits_ = true;                            // [Note: outputs of gathers]
  std::vector<Int128> before_;                   // by cut: the prices of those before it
  const std::vector<PricesBesideWaits> beside_;  // by window
  const PriceTable kernels_, copies_;
  std::vector<MeshPrices> meshes_;
};

Nanoseconds WindowedWork::ValueOf(const std::vector<WindowPrices>& windows,
                                  const std::vector<std::int64_t>& bytes, WindowUse* use) const {
  const Int128 sum = Sum(*this, windows, bytes, use).Take();
  const Int128 before = std::clamp<Int128>(sum / kSumScale, 0, kLongestStep.value);
  const auto before_ns = static_cast<std::int64_t>(before);
  return std::max(work_.host_ns, Nanoseconds{before_ns} + work_.optimizer_ns);
}

Status WindowedWork::CheckPrices(const std::vector<WindowPrices>& windows,
                                 const std::vector<std::int64_t>& bytes) const {
  const auto refused = [](std::string what) { return MakeError(ErrorCode::kNegative, std::move(what)); };
  if (windows.size() != cuts_.size() + 1 || bytes.size() != cuts_.size())
    return refused("a branch of the certificate does not have prices for every window and cut");
  if (std::ranges::any_of(bytes, [](std::int64_t price) { return price < 0 || price > kHighestBytePrice; }))
    return refused("a price of a byte is negative or more than 1,024 ns");
  const std::size_t links = work_.cluster.links.size();
  for (const WindowPrices& prices : windows) {
    const bool negative =
        prices.kernels < 0 || std::ranges::any_of(prices.links, [](std::int64_t price) { return price < 0; });
    if (negative || prices.links.size() != links)
      return refused("a window of the certificate does not have a price for every link, from 0 on");
    for (const internal::ConcurrentRates& rates : internal::ConcurrentRatesOf(work_.cluster)) {
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
