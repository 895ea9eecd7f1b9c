// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/plan_text.h"

#include <fmt/format.h>

#include "documents/plan_fields.h"
#include "json/tables.h"
#include "json/writer.h"
#include "text/plan_text_fields.h"
#include "text/plan_words.h"

namespace shardplan {

template const JsonObjectType& JsonObjectTypeOf<PlanHeader>();
template const JsonObjectType& JsonObjectTypeOf<ProcedureHeader>();
template const JsonObjectType& JsonObjectTypeOf<SegmentHeader>();

namespace {

class PlanTextWriter {
 public:
  explicit PlanTextWriter(const Plan& plan) : plan_(plan), names_(plan), words_(plan, &names_) {}

  std::string Write() {
    out_ += "shardplan plan text 1\n";
    Table("plan", PlanHeaderOf(plan_));
    for (const PlanStep& step : plan_.steps) WriteStep(step);
    for (const Procedure& procedure : plan_.procedures) WriteProcedure(procedure);
    out_ += "\n# What the program works with.\n";
    for (const Unit& unit : plan_.units) Table("unit", unit);
    for (const Buffer& buffer : plan_.buffers) Table("buffer", buffer);
    for (const PlanStream& stream : plan_.streams) Table("stream", stream);
    for (const std::string& event : plan_.events) Table("event", event);
    for (const Communicator& communicator : plan_.communicators) Table("communicator", communicator);
    for (const Exchange& exchange : plan_.exchanges) Table("exchange", exchange);
    for (const TraceInput& input : plan_.inputs) Table("input", input);
    for (const ModuleBuffer& buffer : plan_.model_buffers) Table("model_buffer", buffer);
    out_ += "\n# What it was made from.\n";
    Table("cluster", plan_.cluster);
    Table("strategy", plan_.strategy);
    out_ += "\n# The model's compute.\n";
    for (const Segment& segment : plan_.segments) {
      Table("segment", SegmentHeaderOf(segment));
      for (const SegmentEntry& entry : segment.entries) Table(" ", entry);
    }
    return std::move(out_);
  }

 private:
  void WriteStep(const PlanStep& step) {
    out_ += fmt::format("\nstep {}\n", QuoteWord(step.name));
    std::size_t next = 0;
    for (const auto& repeated : Repeats<Trigger>::Find(step.triggers)) {
      WriteTriggers(step.triggers, next, repeated.at);
      const auto& [triggers, times] = repeated.entry.repeat;
      out_ += fmt::format("  repeat the last {} triggers {} times\n", triggers, times);
      next = repeated.at + repeated.count();
    }
    WriteTriggers(step.triggers, next, step.triggers.size());
  }
  void WriteTriggers(const std::vector<Trigger>& triggers, std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      out_ += fmt::format("  {}\n", words_.Line(triggers[t]));
      for (const Instruction& instruction : triggers[t].instructions) {
        out_ += fmt::format("    {}\n", words_.Line(AsWritten(triggers[t], instruction)));
      }
    }
  }
  void WriteProcedure(const Procedure& procedure) {
    Table("\nprocedure", ProcedureHeaderOf(procedure));
    for (const Instruction& instruction : procedure.instructions) {
      out_ += fmt::format("    {}\n", words_.Line(instruction));
    }
  }
  template <typename T>
  void Table(std::string_view keyword, const T& value) {
    JsonWriter writer(&names_);
    writer.WriteInline(value);
    out_ += fmt::format("{} {}\n", keyword, writer.Take());
  }

  const Plan& plan_;
  PlanNames names_;
  PlanWords words_;
  std::string out_;
};

}  // namespace

std::string PlanText(const Plan& plan) { return PlanTextWriter(plan).Write(); }

}  // namespace shardplan
