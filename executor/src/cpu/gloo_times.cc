// SPDX-License-Identifier: Apache-2.0
#include "cpu/gloo_times.h"

#include <string_view>
#include <utility>

#include "shardplan/executor/device.h"

namespace shardplan::executor {
namespace {

// torch has no kind for others to use; this one says who made a piece of work, and torch leaves it alone.
c10::DebugInfoKind Kind() { return c10::DebugInfoKind::PRODUCER_INFO; }

// Context of one work of Gloo's.
struct Observed : at::ObserverContext {
  explicit Observed(std::shared_ptr<GlooTimes> of) : times(std::move(of)) {}
  std::shared_ptr<GlooTimes> times;
};

std::unique_ptr<at::ObserverContext> Begin(const at::RecordFunction& function) {
  if (!std::string_view(function.name()).starts_with("gloo:")) return nullptr;
  auto* times = dynamic_cast<GlooTimes*>(c10::ThreadLocalDebugInfo::get(Kind()));
  if (times == nullptr) return nullptr;
  times->Began(SteadyNanoseconds());
  return std::make_unique<Observed>(times->shared_from_this());
}

void End(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  static_cast<Observed*>(context)->times->Ended(SteadyNanoseconds());
}

}  // namespace

void GlooTimes::Began(std::int64_t now_ns) {
  std::int64_t nobody = -1;
  begin_ns_.compare_exchange_strong(nobody, now_ns);
}

void GlooTimes::Ended(std::int64_t now_ns) { end_ns_ = now_ns; }

void GlooTimes::EndedBy(std::int64_t now_ns) {
  std::int64_t nobody = -1;
  end_ns_.compare_exchange_strong(nobody, now_ns);
}

TimedIssue::TimedIssue(std::shared_ptr<GlooTimes> times)
    : callback_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(&Begin, &End).scopes({at::RecordScope::USER_SCOPE}))),
      info_(Kind(), std::move(times)) {}

TimedIssue::~TimedIssue() { at::removeCallback(callback_); }

}  // namespace shardplan::executor
