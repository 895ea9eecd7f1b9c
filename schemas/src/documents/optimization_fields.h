// SPDX-License-Identifier: Apache-2.0
// The optimizer's report and the certificate in JSON (docs/reference/optimize.md).
#pragma once

#include "documents/plan_fields.h"
#include "shardplan/schemas/optimization.h"

namespace shardplan {

template <>
inline constexpr Definition kDefinition<WindowPrices> = {
    .says = "What a nanosecond of work costs in one window of the step, in parts of 2^20."};
template <>
inline constexpr auto kFields<WindowPrices> = FieldList(
    Required("kernels", &WindowPrices::kernels, "Of kernels.").AtMost(kPriceScale),
    Required("links", &WindowPrices::links, "Of collectives, by the cluster's links.").AtMost(kPriceScale));

template <>
inline constexpr bool kIsBlock<CertificateBranch> = true;
template <>
inline constexpr Definition kDefinition<CertificateBranch> = {
    "certificate", "branch", "The prices that prove the bound for the plans of one layout."};
template <>
inline constexpr auto kFields<CertificateBranch> =
    FieldList(Required("layout", &CertificateBranch::layout, "Of the units."),
              Required("windows", &CertificateBranch::windows, "One more than there are cuts.").Lines(),
              Required("bytes", &CertificateBranch::bytes,
                       "What a byte of memory costs at each cut, in nanoseconds / 2^40."),
              Required("lower_bound_ns", &CertificateBranch::lower_bound_ns, "What these prices prove."));

template <>
inline constexpr bool kIsBlock<Certificate> = true;
template <>
inline constexpr Definition kDefinition<Certificate> = {
    "certificate", "certificate", "No plan of the class has a shorter step within the budget."};
template <>
inline constexpr auto kFields<Certificate> = FieldList(
    Required("digests", &Certificate::digests, "Of the documents that the plan was made from."),
    Required("plan_digest", &Certificate::plan_digest, "Digest of the plan, \"sha256:...\"."),
    Required("plan_class", &Certificate::plan_class, "Which plans it is about."),
    Optional("activation_offload", &Certificate::activation_offload,
             "Plans that move activations to host memory are among them; the bound gives them the time."),
    Required("recomputation", &Certificate::recomputation,
             "Plans that run parts of the forward again are among them."),
    Optional("shared_pools", &Certificate::shared_pools,
             "Plans whose gathers share a pool with other memory are among them."),
    Optional(
        "meshes", &Certificate::meshes,
        "Ranks that parameters are cut over, by mesh. Each parameter is kept or gathered again whatever the "
        "others of its unit are."),
    Optional("model_wait_ns", &Certificate::model_wait_ns,
             "What the compute stream of each plan waits for collectives of the model at once, alone."),
    Required("layouts", &Certificate::layouts, "Layouts of units that the plans may have."),
    Required("budget_bytes", &Certificate::budget_bytes, "What the allocator may reserve."),
    Required("peak_pooled_bytes", &Certificate::peak_pooled_bytes, "Of the plan."),
    Required("step_ns", &Certificate::step_ns, "Of the plan."),
    Required("lower_bound_ns", &Certificate::lower_bound_ns, "Of every plan of the class."),
    Required("cuts", &Certificate::cuts, "Operators of the step before which a window ends, ascending."),
    Required("branches", &Certificate::branches, "One for each layout.").Lines());

template <>
inline constexpr Definition kDefinition<DecisionReport> = {
    .says = "What was chosen in one class of decisions, and what it is worth."};
template <>
inline constexpr auto kFields<DecisionReport> =
    FieldList(Required("decision", &DecisionReport::decision, "Its name."),
              Required("chosen", &DecisionReport::chosen, "In words."),
              Required("worth_ns", &DecisionReport::worth_ns,
                       "How much longer the step is with FSDP2's default in its place.")
                  .AtLeast(-kMaxExact),
              Required("without_bytes", &DecisionReport::without_bytes,
                       "What the allocator reserves then, without a budget."),
              Required("fits_without", &DecisionReport::fits_without, "Whether that plan fits the budget."));

template <>
inline constexpr Definition kDefinition<BaselineReport> = {
    .says = "A strategy that people use, for the same job."};
template <>
inline constexpr auto kFields<BaselineReport> =
    FieldList(Required("name", &BaselineReport::name, "Its name."),
              Required("step_ns", &BaselineReport::step_ns, "One steady step."),
              Required("peak_reserved_bytes", &BaselineReport::peak_reserved_bytes,
                       "What the allocator reserves within the budget; out of memory: without one."),
              Required("cache_releases", &BaselineReport::cache_releases,
                       "Requests that release the cache, within the budget."),
              Required("fits", &BaselineReport::fits,
                       "Whether it fits the budget, without releases where none are allowed."));

template <>
inline constexpr Definition kDefinition<CurvePoint> = {
    .says = "A plan that was found, where none is both smaller and no slower."};
template <>
inline constexpr auto kFields<CurvePoint> =
    FieldList(Required("peak_reserved_bytes", &CurvePoint::peak_reserved_bytes,
                       "The least budget that it fits without a release of the cache."),
              Required("step_ns", &CurvePoint::step_ns, "One steady step."));

template <>
inline constexpr Definition kDefinition<VariantReport> = {
    .says = "A mesh and a micro-batch that the job may have, and what became of it."};
template <>
inline constexpr auto kFields<VariantReport> = FieldList(
    Required("trace", &VariantReport::trace, "Path of its trace."),
    Required("mesh", &VariantReport::mesh, "\"replicate=2,shard=4\", outermost first."),
    Optional("microbatch_size", &VariantReport::microbatch_size,
             "Samples of a rank's micro-batch; 0: not decided."),
    Optional("microbatches", &VariantReport::microbatches, "Micro-batches of a step; 0: not decided."),
    Required("outcome", &VariantReport::outcome, "Whether it was chosen, or why not."),
    Optional("step_ns", &VariantReport::step_ns, "Of its best plan; 0: none was found."),
    Optional("lower_bound_ns", &VariantReport::lower_bound_ns, "Of its plans of the class; 0: not known."),
    Optional("says", &VariantReport::says, "The same in words."));

template <>
inline constexpr Definition kDefinition<CornerReport> = {.says = "Costs at an end of their intervals."};
template <>
inline constexpr auto kFields<CornerReport> = FieldList(
    Required("compute_ppm", &CornerReport::compute_ppm, "Of kernels' times."),
    Required("links_ppm", &CornerReport::links_ppm, "Of collectives' times."),
    Required("overlap_ppm", &CornerReport::overlap_ppm, "Of what either loses while the other runs."),
    Required("step_ns", &CornerReport::step_ns, "Of the plan."),
    Required("plain_step_ns", &CornerReport::plain_step_ns,
             "Of the plan that is fastest at the nominal costs."));

template <>
inline constexpr Definition kDefinition<RobustReport> = {
    .says = "The plan is the best at the worst of the costs; nominal costs are among them."};
template <>
inline constexpr auto kFields<RobustReport> =
    FieldList(Required("off_ppm", &RobustReport::off_ppm, "How far each cost may be off."),
              Required("worst_ns", &RobustReport::worst_ns, "The plan's longest step."),
              Required("plain_step_ns", &RobustReport::plain_step_ns,
                       "Of the plan that is fastest at the nominal costs."),
              Required("plain_worst_ns", &RobustReport::plain_worst_ns, "Its longest step."),
              Required("corners", &RobustReport::corners, "The slowest first.").Lines());

template <>
inline constexpr bool kIsBlock<Optimization> = true;
template <>
inline constexpr Definition kDefinition<Optimization> = {"optimization", "optimization",
                                                         "What the optimising planner says of its plan."};
template <>
inline constexpr auto kFields<Optimization> = FieldList(
    Required("model", &Optimization::model, "Name of the model."),
    Required("policy", &Optimization::policy, "Policy of the plan."),
    Required("cluster", &Optimization::cluster, "Name of the cluster."),
    Required("plan_digest", &Optimization::plan_digest, "Digest of the plan, \"sha256:...\"."),
    Required("step_ns", &Optimization::step_ns, "One steady step."),
    Required("lower_bound_ns", &Optimization::lower_bound_ns, "Of every plan of the class."),
    Required("gap_ppm", &Optimization::gap_ppm, "(step - bound) / bound."),
    Required("peak_allocated_bytes", &Optimization::peak_allocated_bytes, "Of all pools together."),
    Required("peak_pooled_bytes", &Optimization::peak_pooled_bytes, "Sum of the pools' own peaks."),
    Required("peak_reserved_bytes", &Optimization::peak_reserved_bytes, "By the allocator's model."),
    Required("cache_releases", &Optimization::cache_releases,
             "Requests that release the cache, within the budget."),
    Required("budget_bytes", &Optimization::budget_bytes, "What the allocator may reserve."),
    Required("planning_ns", &Optimization::planning_ns, "Wall time of search and bound."),
    Required("evaluations", &Optimization::evaluations, "Plans that were made and simulated."),
    Required("evaluations_per_second", &Optimization::evaluations_per_second, "Of them."),
    Required("complete", &Optimization::complete, "False: a limit or a signal ended the search."),
    Required("decisions", &Optimization::decisions, "By class of decisions.").Lines(),
    Required("baselines", &Optimization::baselines, "Of the same job.").Lines(),
    Required("curve", &Optimization::curve, "Time against memory, ascending bytes.").Lines(),
    Optional("robust", &Optimization::robust, "Asked for: not the fastest, but the best at the worst."),
    Optional("variants", &Optimization::variants, "Meshes and micro-batches that the job may have.").Lines(),
    Optional("variants_lower_bound_ns", &Optimization::variants_lower_bound_ns,
             "Of every plan of the class, whatever the variant; 0: not known of one."),
    Optional("notes", &Optimization::notes, "What was assumed.").Lines());

}  // namespace shardplan
