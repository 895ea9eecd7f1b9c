// SPDX-License-Identifier: Apache-2.0
// record_model NAME cpu|meta|gpu|gpu_bfloat16: the trace of a model of trace_models.h on standard output.
// record_model names, tables: what there is, and the recorder's tables of operators.
#include <cstdio>
#include <string>

#include "shardplan/schemas/io.h"
#include "trace_models.h"
#include "tracer/operators.h"

int main(int argc, char** argv) {
  namespace models = shardplan::executor::testing;
  const std::string name = argc > 1 ? argv[1] : "", device = argc > 2 ? argv[2] : "";
  if (name == "tables") return std::fputs(shardplan::executor::OperatorTables().c_str(), stdout) < 0;
  if (name == "names") {
    for (const std::string& known : models::TraceModelNames()) std::puts(known.c_str());
    return 0;
  }
  const bool of_gpu = device.starts_with("gpu");
  auto model = models::MakeTraceModel(name, of_gpu || device == "meta" ? c10::kMeta : c10::kCPU,
                                      device == "gpu_bfloat16" ? at::kBFloat16 : at::kFloat);
  if (of_gpu) model.options.kernels = shardplan::executor::RecordedKernels::kGpu;
  const auto trace = model.Record();
  if (!trace) {
    std::fprintf(stderr, "%s\n", shardplan::ToString(trace.error()).c_str());
    return 1;
  }
  return std::fputs(shardplan::ToJson(*trace).c_str(), stdout) < 0;
}
